"""Refuses to record while somebody else's module is imported: a script that trains must not replace what is asked."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dualform.errors import RecordError

_REASON: ContextVar[str] = ContextVar("reason why nothing may be recorded", default="")


@contextmanager
def recording_refused(reason: str) -> Iterator[None]:
    """Inside the block a recording cannot begin; the error says why."""
    token = _REASON.set(reason)
    try:
        yield
    finally:
        _REASON.reset(token)


def require_permission() -> None:
    """Raise if nothing may be recorded now."""
    if reason := _REASON.get():
        raise RecordError(reason)
