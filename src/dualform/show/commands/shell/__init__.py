"""The command line and the shell around it: completion, Ctrl-C, warnings."""

from .completion import Shell, script
from .interrupted import after_interrupt
from .sentences import warnings_as_sentences

__all__ = ["Shell", "after_interrupt", "script", "warnings_as_sentences"]
