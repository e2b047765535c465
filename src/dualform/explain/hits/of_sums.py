"""Hits from sums: the examples or visits whose slots add up to most."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.engine import StoreView
from dualform.store import Store
from dualform.types import Order, Per, Score

from ..groups import GroupOfSlot, groups_of
from ..notebook import PLACES
from .answers import ExampleHits, HitOrigin, Hits, VisitHits
from .of_slots import visit_columns

INDEX = "index"
"""The column that names training examples."""


class Summands:
    """What may be a hit: the training examples, or the visits, of a view; with the visits that each stands for.

    Where no index was noted, every visit is an example of its own.
    """

    def __init__(self, store: Store, view: StoreView, per: Per, within: str | None = None) -> None:
        self.store, self.per = store, per if INDEX in store.visits.column_names else "visit"
        steps = store.visits["step"].to_numpy()
        shown = steps <= view.horizon
        if view.visible is not None:
            shown &= view.visible
        if self.per == "example":
            names, ids = groups_of(store, INDEX)
            shown &= ids < len(names)
        else:
            ids = np.arange(len(steps))
        self.names: tuple[Any, ...] = ()
        of_visit = np.zeros(len(steps), np.int64)
        if within is not None:
            self.names, of_visit = groups_of(store, within)
            shown &= of_visit < len(self.names)
            ids = of_visit * (int(ids.max(initial=0)) + 1) + ids
        places = np.flatnonzero(shown)
        summands, number = np.unique(ids[places], return_inverse=True)
        self.count = len(summands)
        number_of_visit = np.full(len(steps), self.count)
        number_of_visit[places] = number
        self.groups = GroupOfSlot.of_visits("", (*range(self.count), None), number_of_visit)
        """The summand of each visit; the last is for slots of visits that cannot be a hit."""
        order = np.argsort(number, kind="stable")
        begins = np.searchsorted(number[order], np.arange(self.count))
        self.first_visit = places[order][begins] if self.count else places
        self.visits = np.bincount(number, minlength=self.count)
        self.first_steps = steps[self.first_visit]
        last = np.append(begins[1:], len(order)) - 1
        self.last_steps = steps[places[order][last]] if self.count else self.first_steps
        self.of_name = of_visit[self.first_visit]

    def hits(
        self, sums: Float[Tensor, "n G1"], k: int, *, layer: str, score: Score, target: str, order: Order,
        left_out: tuple[str, ...], remark: str, origin: HitOrigin, of_name: int | None = None,
    ) -> Hits:  # fmt: skip
        """The k largest of the sums (in one of the groups that they are ``within``)."""
        allowed = np.arange(self.count) if of_name is None else np.flatnonzero(self.of_name == of_name)
        values = sums[:, torch.from_numpy(allowed)]
        keyed = {"largest": values, "smallest": values.neg(), "magnitude": values.abs()}[order]
        best = keyed.topk(min(k, len(allowed)), dim=1).indices
        found = torch.from_numpy(allowed)[best]
        number = found.numpy()
        value = values.gather(1, best)
        nothing = torch.full_like(value, torch.nan)
        columns = visit_columns(self.store, self.first_visit[number.reshape(-1)])
        if self.per == "example":
            columns = columns.drop_columns([name for name in PLACES if name in columns.column_names])
        shared: dict[str, Any] = {
            "layer": layer, "score": score, "target": target, "columns": columns,
            "left_out": left_out, "remark": remark, "folder": str(self.store.path),
            "origin": origin,
            "weight": nothing if score == "contribution" else value,
            "contribution": value if score == "contribution" else nothing,
        }  # fmt: skip
        if self.per == "visit":
            return VisitHits(
                **shared, visits=_tensor(self.first_visit, number), steps=_tensor(self.first_steps, number)
            )
        return ExampleHits(
            **shared, visits=_tensor(self.visits, number), first_steps=_tensor(self.first_steps, number),
            last_steps=_tensor(self.last_steps, number),
        )  # fmt: skip


def _tensor(values: Int[np.ndarray, " G"], number: Int[np.ndarray, "n k"]) -> Int[Tensor, "n k"]:
    return torch.from_numpy(np.ascontiguousarray(values[number]))
