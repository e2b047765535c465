r"""Att-SVM for a token selection: which tokens must score above which, for every query.

.. math:: \min_W \|W\|\quad\text{s.t.}\quad (x_{i,\alpha_i} - x_{it})^\top W z_i \ge 1\quad\text{for } t \ne \alpha_i

Tokens x, queries z, selected tokens α (Tarzanagh et al. 2023, arXiv 2308.16898). Where a query selects several tokens,
all of them must score alike and above the rest. Two reductions leave the solution unchanged: duplicate rows are kept
once, and W is only searched in the span of the token differences on one side and of the queries on the other.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dualform.errors import QueryError, SizeError

from .constraint_rows import ConstraintRows

Selected = Int[Tensor, " n"] | Bool[Tensor, "n T"]


@dataclass(frozen=True)
class Problem:
    """Tokens of sequences, queries and what each selects. Make it with ``of``, which checks the arguments.

    ``sequence`` is the sequence that each query attends to, ``hidden`` is True where it does not see a token.
    Duplicate rows are kept ``once``, unless a soft margin counts each of them.
    """

    tokens: Float[Tensor, "s T x"]
    queries: Float[Tensor, "n z"]
    selected: Bool[Tensor, "n T"]
    sequence: Int[Tensor, " n"]
    hidden: Bool[Tensor, "n T"]
    reduce: bool = True
    once: bool = True

    @classmethod
    def of(
        cls, tokens: Float[Tensor, "s T x"], queries: Float[Tensor, "n z"], selected: Selected, *,
        sequence: Int[Tensor, " n"] | None = None, hidden: Bool[Tensor, "n T"] | None = None, reduce: bool = True,
        once: bool = True,
    ) -> "Problem":  # fmt: skip
        """Check the arguments and make a problem. Without ``sequence``, query i attends to sequence i."""
        if tokens.ndim != 3 or queries.ndim != 2 or not tokens.numel() or not queries.numel():
            raise SizeError(
                f"tokens are (sequences, tokens, width) and queries (queries, width), none of them empty: "
                f"these are {tuple(tokens.shape)} and {tuple(queries.shape)}."
            )
        (s, T, _), n = tokens.shape, len(queries)
        if sequence is None and s != n:
            raise SizeError(f"there are {s} sequences and {n} queries: give sequence=, the sequence of each query.")
        sequence = torch.arange(n) if sequence is None else sequence.detach().cpu().long()
        if len(sequence) != n or not bool(((sequence >= 0) & (sequence < s)).all()):
            raise QueryError(f"sequence= gives each of the {n} queries a sequence, from 0 to {s - 1}.")
        hidden = torch.zeros(n, T, dtype=torch.bool) if hidden is None else hidden.detach().cpu().bool()
        if hidden.shape != (n, T):
            raise SizeError(f"hidden= is (queries, tokens) = {(n, T)}, and this is {tuple(hidden.shape)}.")
        tokens, queries = (tensor.detach().cpu().double() for tensor in (tokens, queries))
        return cls(tokens, queries, _as_mask(selected, hidden), sequence, hidden, reduce, once)._check_finite()

    def _check_finite(self) -> "Problem":
        """Reject values that are not finite, except in tokens that no query sees, such as padding."""
        visible = torch.zeros(self.tokens.shape[:2], dtype=torch.bool)
        at, t = (~self.hidden).nonzero(as_tuple=True)
        visible[self.sequence[at], t] = True
        if not bool(self.queries.isfinite().all() and self.tokens[visible].isfinite().all()):
            raise QueryError("the tokens or the queries hold NaN or infinity.")
        return self

    @cached_property
    def chosen(self) -> Int[Tensor, " n"]:
        """The first selected token of each query, which the other tokens are compared with."""
        return self.selected.long().argmax(1)

    @cached_property
    def rows(self) -> ConstraintRows:
        """One row for each token that must score below a selected one, and for each that must score the same."""
        return self.rows_with(torch.zeros(self.selected.shape, dtype=torch.float64))

    def rows_with(self, alike: Float[Tensor, "n T"], *, masked: bool = True) -> ConstraintRows:
        """The rows if selected tokens must score below the first one by the amounts ``alike``.

        ``masked`` also includes the rows of tokens that are not selected.
        """
        wanted = ~self.hidden & (self.selected | masked)
        wanted[torch.arange(len(wanted)), self.chosen] = False
        query, token = wanted.nonzero(as_tuple=True)
        if self.reduce and self.once and not bool(alike.any()):
            kept = self._distinct_rows(query, token)
            query, token = query[kept], token[kept]
        sequence, equal = self.sequence[query], self.selected[query, token]
        (points, plus, minus), queries = self._points(sequence, self.chosen[query], token), self.queries
        if self.reduce:
            points, queries = (x if at is None else x @ at for x, at in ((points, self.left), (queries, self.right)))
        target = torch.where(equal, alike[query, token].double(), 1.0)
        arrays = (points, queries, query, plus, minus, target, equal, query * wanted.shape[1] + token)
        return ConstraintRows(*(np.ascontiguousarray(array.numpy()) for array in arrays))

    def _points(
        self, sequence: Int[Tensor, " r"], plus: Int[Tensor, " r"], minus: Int[Tensor, " r"]
    ) -> tuple[Float[Tensor, "p x"], Int[Tensor, " r"], Int[Tensor, " r"]]:
        """The tokens that occur in rows, less the mean of their sequence, and the indices of each row's two tokens."""
        T = self.tokens.shape[1]
        used, numbers = torch.cat([sequence * T + plus, sequence * T + minus]).unique(return_inverse=True)
        points, source = self.tokens.flatten(0, 1)[used], used // T
        count = torch.zeros(len(self.tokens), dtype=points.dtype).index_add_(0, source, torch.ones_like(points[:, 0]))
        total = points.new_zeros(len(self.tokens), points.shape[1]).index_add_(0, source, points)
        points -= (total / count.clamp(min=1).unsqueeze(1))[source]
        return points, numbers[: len(sequence)], numbers[len(sequence) :]

    def _distinct_rows(self, query: Int[Tensor, " r"], token: Int[Tensor, " r"]) -> Int[Tensor, " k"]:
        """The indices of the rows that do not repeat an earlier row."""
        ids, sequence = _ids_of_equal_rows(self.tokens.flatten(0, 1)).view(self.tokens.shape[:2]), self.sequence[query]
        columns = (
            _ids_of_equal_rows(self.queries)[query],
            ids[sequence, self.chosen[query]],
            ids[sequence, token],
            self.selected[query, token],
        )
        table = np.stack([column.numpy().astype(np.int64) for column in columns])
        order = np.lexsort(table)  # stable: the first of equal rows comes first
        new = np.diff(table[:, order], prepend=-1).any(0)
        return torch.from_numpy(np.sort(order[new]))

    @cached_property
    def left(self) -> Float[Tensor, "x a"] | None:
        """A basis of the span of token differences, if it is not the whole space. W = left · W_small · rightᵀ."""
        query, token = (~self.hidden).nonzero(as_tuple=True)
        sequence = self.sequence[query]
        return _span_basis(self._points(sequence, self.chosen[query], token)[0])

    @cached_property
    def right(self) -> Float[Tensor, "z b"] | None:
        """A basis of the span of the queries, if it is not the whole space."""
        return _span_basis(self.queries)

    def full_matrix(self, W: Float[np.ndarray, "a b"]) -> Float[Tensor, "x z"]:
        """W of the reduced problem, mapped back to the space of tokens and queries."""
        full = torch.from_numpy(W)
        if not self.reduce:
            return full
        full = full if self.left is None else self.left @ full
        return full if self.right is None else full @ self.right.mT

    def table(self, rows: ConstraintRows, values: Float[np.ndarray, " r"]) -> Float[Tensor, "n T"]:
        """Values of rows, put back into the table of queries and tokens, with zeros elsewhere."""
        flat = torch.zeros(self.selected.numel(), dtype=torch.float64)
        flat[torch.from_numpy(rows.place)] = torch.from_numpy(values)
        return flat.view(self.selected.shape)

    def margins(self, W: Float[Tensor, "x z"]) -> Float[Tensor, "n T"]:
        """The margin of the selected tokens over each other token; infinite at selected and hidden tokens."""
        logits, at = torch.empty(self.selected.shape, dtype=torch.float64), self.queries @ W.mT
        for queries in torch.arange(len(at)).split(max(1, (1 << 24) // self.tokens[0].numel())):
            logits[queries] = (self.tokens[self.sequence[queries]] @ at[queries].unsqueeze(2)).squeeze(2)
        least = logits.masked_fill(~self.selected, torch.inf).amin(1, keepdim=True)
        return (least - logits).masked_fill(self.hidden | self.selected, torch.inf)


def _as_mask(selected: Tensor, hidden: Bool[Tensor, "n T"]) -> Bool[Tensor, "n T"]:
    """The mask of selected tokens, from one index per query or from a mask, which is checked."""
    n, T = hidden.shape
    selected = selected.detach().cpu()
    if selected.dtype != torch.bool:
        if selected.shape != (n,) or selected.is_floating_point() or not bool(((selected >= 0) & (selected < T)).all()):
            raise QueryError(
                f"selected= is one token a query, {n} numbers from 0 to {T - 1}, or a mask of {(n, T)}; this is "
                f"{selected.dtype} of {tuple(selected.shape)}"
                + (f" from {selected.min()} to {selected.max()}." if selected.numel() else ".")
            )
        selected = torch.nn.functional.one_hot(selected.long(), T).bool()
    if selected.shape != (n, T):
        raise SizeError(f"selected= is a mask of (queries, tokens) = {(n, T)}, and this is {tuple(selected.shape)}.")
    if bool((selected & hidden).any()):
        raise QueryError(
            f"query {int((selected & hidden).any(1).nonzero()[0])} selects a token that is hidden from it."
        )
    if not bool(selected.any(1).all()):
        raise QueryError(f"query {int((~selected.any(1)).nonzero()[0])} selects no token.")
    if not bool((~selected & ~hidden).any()) and not bool((selected.sum(1) > 1).any()):
        raise QueryError("no query sees a token besides the selected one, so there is nothing to separate.")
    return selected


def _ids_of_equal_rows(x: Float[Tensor, "r d"]) -> Int[Tensor, " r"]:
    """A number for each row of a matrix, the same only for equal rows."""
    way = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    ids = torch.from_numpy(np.unique((x * way).sum(1).numpy(), return_inverse=True)[1])
    first = torch.empty(int(ids.max()) + 1, dtype=torch.int64).scatter_(0, ids.flip(0), torch.arange(len(x)).flip(0))
    same = (x == x[first[ids]]).all(1)
    return torch.where(same, first[ids], torch.arange(len(x)))


def _span_basis(x: Float[Tensor, "r d"]) -> Float[Tensor, "d k"] | None:
    """An orthonormal basis of the span of the rows, up to rounding; None where that is the whole space."""
    few = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: 2 * x.shape[1]]]
    singular = torch.linalg.svdvals(few)
    if len(singular) == x.shape[1] and float(singular[-1]) > 1e-9 * float(singular[0]):
        return None  # the usual case: a sample of the rows already spans the space
    _, singular, across = torch.linalg.svd(torch.linalg.qr(x, "r")[1], full_matrices=False)
    rank = max(1, int((singular > singular[0] * max(x.shape) * torch.finfo(x.dtype).eps).sum()))
    return across[:rank].mT if rank < x.shape[1] else None
