"""Checks of arguments that layers, models and tuning methods share. Each returns the value that it has checked."""

from collections.abc import Sequence
from typing import TypeVar

from dualform.errors import SizeError

ChoiceT = TypeVar("ChoiceT", bound=str | None)


def whole_number(name: str, value: object, least: int = 0) -> int:
    """Require an integer of at least ``least``."""
    if not isinstance(value, int) or value < least:
        raise SizeError(f"{name}={value!r} must be a whole number, {least} or more.")
    return value


def exact_ratio(name: str, value: int, divisor_name: str, divisor: int) -> int:
    """The quotient of two positive integers, the first of which must be a multiple of the second."""
    if divisor < 1 or value < 1 or value % divisor:
        divisors = [i for i in range(1, max(1, value) + 1) if value % i == 0]
        raise SizeError(
            f"{name}={value} must be a multiple of {divisor_name}={divisor}; divisors of {value} are {divisors}."
        )
    return value // divisor


def one_of(name: str, value: ChoiceT, choices: Sequence[ChoiceT]) -> ChoiceT:
    """Require one of a few values. The error message lists them."""
    if value not in choices:
        *first, last = map(repr, choices)
        raise SizeError(f"{name}={value!r} is not known; choose {', '.join(first)} or {last}.")
    return value
