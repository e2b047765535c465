"""Replaces a method of one object for as long as a ``with`` lasts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any


@contextmanager
def wrapped_method(owner: object, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside the ``with`` block calls of the method go to ``function``, which takes the original method first."""
    method, own = getattr(owner, name), vars(owner).get(name)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(method, *args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
