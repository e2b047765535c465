"""Hooks that belong to one recording: a copy or a pickle of the model has none of them."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class Hook:
    """Calls ``function`` until it is released. Copied or pickled it becomes a function that does nothing.

    ``copy.deepcopy(model)`` and ``torch.save(model)`` take a model's hooks along. What they get instead of ours comes
    from Python itself, so that a saved model loads where dualform is not installed.
    """

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        """Run as the hook that it holds."""
        return self.function(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple]:
        return getattr, (nullcontext(), "__exit__")  # takes whatever it is given, returns None
