"""What a training needs to run again: the log of its steps, kept beside slots or alone."""

from .run_keeper import RunKeeper

__all__ = ["RunKeeper"]
