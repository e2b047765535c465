"""The fields of an address, read strictly."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dualform.errors import QueryError

if TYPE_CHECKING:
    from starlette.requests import Request


class AddressFields:
    """The fields of an address, read strictly."""

    def __init__(self, request: "Request") -> None:
        self._given = request.query_params

    def text(self, name: str) -> str | None:
        """A text; None where there is none."""
        return self._given.get(name) or None

    def all(self, name: str) -> list[str]:
        """All values of a field."""
        return [value for value in self._given.getlist(name) if value != ""]

    def number(self, name: str, otherwise: Any = None) -> Any:
        """A whole number, or something else where there is none."""
        return next(iter(self.numbers(name)), otherwise)

    def numbers(self, name: str) -> list[int]:
        """All values of a field, which must be whole numbers."""
        found = self.all(name)
        for value in found:
            if not whole(value):
                raise QueryError(f"{name}={value[:20]!r} is no whole number.")
        return [int(value) for value in found]

    def one_of(self, name: str, known: Sequence[str]) -> Any:
        """One of some names; None where there is none."""
        value = self.text(name)
        if value is not None and value not in known:
            raise QueryError(f"{name}={value!r} is not known; choose one of {list(known)}.")
        return value


def whole(text: str) -> bool:
    """Whether a text is a whole number of a sensible length."""
    return text.isascii() and text.removeprefix("-").isdigit() and len(text) <= 12
