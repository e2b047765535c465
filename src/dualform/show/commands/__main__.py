"""``python -m dualform.show.commands``: the command line without an installed script."""

from .cli import app

app(prog_name="dualform")
