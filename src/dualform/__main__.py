"""``python -m dualform``: the command line, also where the script ``dualform`` is not on the path."""

from runpy import run_module

if __name__ == "__main__":
    run_module("dualform.show.commands", run_name="__main__")
