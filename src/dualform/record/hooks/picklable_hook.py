"""Hooks that belong to one recording: copies and pickles of the model do not inherit them."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class Hook:
    """Calls ``function``. A copy or a pickle of it is a function that does nothing.

    ``copy.deepcopy(model)`` and ``torch.save(model)`` include a model's hooks. In place of this one they get a function
    of Python itself, so that a saved model loads where dualform is not installed.
    """

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple]:
        return getattr, (nullcontext(), "__exit__")  # accepts any arguments, returns None
