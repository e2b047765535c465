"""What a training needs to run again: the log of its steps, kept beside slots or alone."""

from .pass_watch import RunPass
from .run_keeper import RunKeeper

__all__ = ["RunKeeper", "RunPass"]
