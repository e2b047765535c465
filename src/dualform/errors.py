"""The exceptions of dualform.

    DualformError
    ├── RecordError                 while a network is being trained
    │   ├── UnsupportedLayer        a layer that cannot be recorded exactly
    │   ├── UnsupportedOptimizer    an optimiser that no rule explains
    │   ├── NothingToRecord         no layer, or no parameter of one, is trained
    │   ├── NoteError               columns that do not fit the batch, or the batches before it
    │   ├── NonFiniteGradient       NaN or infinity in a gradient, before it enters the weights
    │   └── ResumeError             the checkpoint and the memory are from different steps
    ├── StoreError                  the folder on disk
    │   ├── MemoryNotFound          no such folder
    │   ├── NotAMemory              the folder holds something else
    │   ├── MemoryExists            the folder already holds a memory
    │   ├── MemoryLocked            another process is recording into it
    │   ├── FormatVersionError      written by a newer (or unknown) version
    │   ├── CorruptMemory           a file is missing, cut short or changed
    │   └── WriteError              the disk is full, or writing failed
    ├── AskError                    a question the memory cannot answer
    │   ├── LayerNotFound           (also while recording)
    │   ├── NoSteps                 nothing was recorded
    │   ├── UnknownColumn           no such column among the visits
    │   ├── FilterError             a filter that cannot be read, or that matches nothing
    │   ├── QueryError              inputs, targets or options that do not fit
    │   ├── ModelMismatch           a model that is not the one recorded
    │   ├── FrozenWeights           frozen weights that only the model holds
    │   ├── HorizonError            a step that is not in the memory
    │   ├── ConsentNeeded           a recipe that names code which is not dualform's own
    │   └── RetrainingFailed        a training in a process of its own ended without a result
    ├── SizeError                   sizes of a layer that do not fit together
    ├── UnknownLayer                a layer, or an option of one, that is not in the table
    ├── DataNotFound                a data set is not on this machine
    └── MissingExtra                an optional package is not installed

Each message says what happened, with which value, and what to do about it.
"""

import sys
import warnings
from dataclasses import dataclass
from types import FrameType
from typing import Any


class DualformError(Exception):
    """The base class of all errors that dualform raises on purpose."""


class RecordError(DualformError):
    """Something about the training loop cannot be recorded."""


class UnsupportedLayer(RecordError):
    """A layer that cannot be recorded exactly."""


class UnsupportedOptimizer(RecordError):
    """An optimiser that no rule explains."""


class NothingToRecord(RecordError):
    """No recorded layer has a parameter in the optimiser."""


class NoteError(RecordError):
    """Noted columns that do not fit their batch or the batches before it."""


class NonFiniteGradient(RecordError):
    """A gradient with NaN or infinity was about to enter the weights."""


class ResumeError(RecordError):
    """The checkpoint and the memory are from different steps."""


class StoreError(DualformError):
    """Something about the folder on disk."""


class MemoryNotFound(StoreError):
    """There is no such folder."""


class NotAMemory(StoreError):
    """The folder is not a dualform memory."""


class MemoryExists(StoreError):
    """The folder already holds a memory."""


class MemoryLocked(StoreError):
    """Another recording has locked the folder."""


class FormatVersionError(StoreError):
    """The memory has a format that this version does not read."""


class CorruptMemory(StoreError):
    """A file of the memory is missing, cut short or changed."""


class WriteError(StoreError):
    """The memory could not be written."""


class AskError(DualformError):
    """A question that the memory cannot answer."""


class LayerNotFound(AskError):
    """No recorded layer has that name."""


class NoSteps(AskError):
    """The memory holds no complete step."""


class UnknownColumn(AskError):
    """The visits have no such column."""


class FilterError(AskError):
    """A filter that cannot be read, or that matches no visit."""


class QueryError(AskError):
    """Inputs, targets or options that do not fit the recorded network."""


class ModelMismatch(AskError):
    """The model is not the one that was recorded."""


class FrozenWeights(AskError):
    """The memory holds only a fingerprint of frozen weights; the weights are in the model."""


class HorizonError(AskError):
    """The memory cannot be read at that step."""


class ConsentNeeded(AskError):
    """The recipe of a memory names code of others, and the user has not agreed to run it."""


class RetrainingFailed(AskError):
    """A training that ran in a process of its own ended without a result."""


class UnknownLayer(DualformError):
    """No layer has this name, or this option."""


class SizeError(DualformError):
    """Sizes of a layer that do not fit together."""


class DataNotFound(DualformError):
    """A data set is not on this machine."""


class MissingExtra(DualformError):
    """An optional package is needed for this."""


class DualformWarning(UserWarning):
    """Something happened that the memory cannot explain; the memory also holds a mark of it."""


NOT_THE_USERS = frozenset([
    "dualform", "torch", "contextlib", "functools", "threading", "jaxtyping", "beartype",
    "transformers", "accelerate", "trl", "lightning", "pytorch_lightning", "lightning_fabric",
])  # fmt: skip
"""Packages whose code stands between a line of the user's and a warning of ours."""


@dataclass(frozen=True)
class UserLine:
    """A line of the user's program that called us, however deep inside we are."""

    file: str
    number: int
    module: str
    registry: dict[Any, Any]
    """Where Python keeps which warnings this module has shown."""

    @classmethod
    def calling(cls) -> "UserLine":
        """The innermost line on the stack that is neither ours nor torch's; the outermost one if all are."""
        frame: FrameType = sys._getframe(1)
        while _package(frame) in NOT_THE_USERS and frame.f_back is not None:
            frame = frame.f_back
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        return cls(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__") or "<unknown>", registry)


def _package(frame: FrameType) -> str:
    return (frame.f_globals.get("__name__") or "").split(".")[0]


def warn(message: str, line: UserLine | None = None) -> None:
    """Issue a :class:`DualformWarning` that points at the line of the user's program which led here.

    Another ``line`` is given where the warning comes later than its cause, or from another thread.
    """
    line = UserLine.calling() if line is None else line
    warnings.warn_explicit(message, DualformWarning, line.file, line.number, line.module, line.registry)


def require(module: str, extra: str | None = None) -> Any:
    """Import an optional package, or raise an error that names the extra to install (or the package, without one)."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        command = f"pip install '{module}'"
        if extra is not None:
            command = f"pip install 'dualform[{extra}]' (in a clone of dualform: pip install '.[{extra}]')"
        raise MissingExtra(
            f"this needs the package '{module}', which is not installed. Install it with: {command}"
        ) from error
