"""The query parameters of an address, read strictly."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dualform.errors import QueryError, require

if TYPE_CHECKING:
    from starlette.requests import Request


class AddressFields:
    """Reads query parameters and raises an error for a value of the wrong kind."""

    def __init__(self, request: "Request") -> None:
        self._query = request.query_params

    @classmethod
    def of_text(cls, query: str) -> "AddressFields":
        """The fields of an address that was sent as text."""
        fields = cls.__new__(cls)
        fields._query = require("starlette.datastructures", "web").QueryParams(query.removeprefix("?"))
        return fields

    def text(self, name: str) -> str | None:
        """A text; None if the parameter is missing or empty."""
        return self._query.get(name) or None

    def all(self, name: str) -> list[str]:
        """All values of a parameter that are not empty."""
        return [value for value in self._query.getlist(name) if value != ""]

    def number(self, name: str, otherwise: Any = None) -> Any:
        """A whole number; ``otherwise`` if the parameter is missing."""
        return next(iter(self.numbers(name)), otherwise)

    def numbers(self, name: str) -> list[int]:
        """All values of a parameter, which must be whole numbers."""
        texts = self.all(name)
        for value in texts:
            if not is_whole_number(value):
                raise QueryError(f"{name}={value[:20]!r} is not a whole number.")
        return [int(value) for value in texts]

    def one_of(self, name: str, choices: Sequence[str]) -> Any:
        """One of some choices; None if the parameter is missing."""
        value = self.text(name)
        if value is not None and value not in choices:
            raise QueryError(f"{name}={value!r} is not known; choose one of {list(choices)}.")
        return value


def is_whole_number(text: str) -> bool:
    """Whether a text is a whole number of at most 12 characters."""
    return text.isascii() and text.removeprefix("-").isdigit() and len(text) <= 12
