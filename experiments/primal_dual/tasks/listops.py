"""ListOps as in Long Range Arena (Tay et al. 2021, arXiv 2011.04006): nested lists of digits, and their values.

    [MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]   has the value 5

A node at depth d (1 for the root) with d < ``max_depth`` is an operator with 2 to ``max_arguments`` children with
probability 1/4; all other nodes are digits. Trees that are too short or too long are rejected, which changes the
distribution: with the default 17 to 128 tokens a tree has 45 tokens on average, the values 0 and 9 occur in 15 % of the
trees each and the others in 8 to 10 %, and the first operator alone allows an accuracy of 34 %.
"""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from statistics import median
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dualform.errors import SizeError

TOKENS = ("", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
"""The text of each token; 0 is padding."""

OPERATOR = 0.25
DIGITS, OPERATORS, END = TOKENS.index("0"), TOKENS.index("[MIN"), TOKENS.index("]")
TRIES = 100_000
"""Limit of rejected trees in a row. One in 30 trees has a default length, one in 12 a length of Long Range Arena."""


class ListOps(NamedTuple):
    """Trees as tokens, their padding masks, and their values."""

    tokens: Int[Tensor, "n length"]
    padding: Bool[Tensor, "n length"]
    labels: Int[Tensor, " n"]


def listops(
    count: int,
    *,
    min_length: int = 17,
    max_length: int = 128,
    max_depth: int = 10,
    max_arguments: int = 10,
    seed: int = 0,
) -> ListOps:
    """``count`` different trees of ``min_length`` to ``max_length`` tokens, padded to ``max_length``.

    No tree occurs twice, so training and test trees never overlap. Lengths in Long Range Arena are 501 to 1,999.
    """
    random = Random(seed).random
    values: dict[bytes, int] = {}
    rejected = 0
    while len(values) < count:
        tree = _tree(random, max_length, max_depth, max_arguments)
        if tree is not None and len(tree[0]) >= min_length and (written := bytes(tree[0])) not in values:
            values[written], rejected = tree[1], 0
        elif (rejected := rejected + 1) > TRIES:
            raise SizeError(
                f"found only {len(values)} of {count} different trees of {min_length} to {max_length} tokens with "
                f"max_depth={max_depth} and max_arguments={max_arguments}. Ask for fewer, or allow longer ones."
            )
    padded = b"".join(written.ljust(max_length, b"\0") for written in values)
    tokens = torch.frombuffer(bytearray(padded), dtype=torch.uint8).reshape(count, max_length).long()
    return ListOps(tokens, tokens == 0, torch.tensor(list(values.values())))


def _tree(random: Callable[[], float], longest: int, deepest: int, widest: int) -> tuple[list[int], int] | None:
    """Tokens and value of a tree, or None as soon as it is known to be too long."""
    tokens: list[int] = []
    opened: list[tuple[int, int, list[int]]] = []  # operator, number of children, values of the children so far
    length = 1  # at least one token for each node still to come, and one for each closing bracket
    while True:
        if len(opened) + 1 < deepest and random() < OPERATOR:
            operator, children = int(random() * 4), 2 + int(random() * (widest - 1))
            length += 1 + children
            if length > longest:
                return None
            tokens.append(OPERATORS + operator)
            opened.append((operator, children, []))
            continue
        value = int(random() * 10)
        tokens.append(DIGITS + value)
        while opened:
            operator, children, values = opened[-1]
            values.append(value)
            if len(values) < children:
                break
            value = _value(operator, values)
            tokens.append(END)
            opened.pop()
        else:
            return tokens, value


def _value(operator: int, values: list[int]) -> int:
    if operator == 2:
        values.sort()
        return (values[len(values) // 2] + values[(len(values) - 1) // 2]) // 2
    return min(values) if operator == 0 else max(values) if operator == 1 else sum(values) % 10


def write(tokens: Sequence[int] | Int[Tensor, " length"]) -> str:
    """The text of a tree, without padding."""
    return " ".join(TOKENS[int(token)] for token in tokens if token)


def evaluate(tokens: Sequence[int] | Int[Tensor, " length"]) -> int:
    """The value of a tree, computed from its text."""
    words = iter(write(tokens).split())
    try:
        value = _read(next(words), words)
    except StopIteration:  # a list that is not closed
        value = None
    if value is None or next(words, None) is not None:
        raise ValueError(f"this is not one tree: {write(tokens)}")
    return value


def _read(word: str, words: Iterator[str]) -> int | None:
    """The value of the expression that begins at a word; None at a closing bracket."""
    if not word.startswith("["):
        return None if word == "]" else int(word)
    values = []
    while (value := _read(next(words), words)) is not None:
        values.append(value)
    return {"[MIN": min, "[MAX": max, "[MED": lambda v: int(median(v)), "[SM": lambda v: sum(v) % 10}[word](values)
