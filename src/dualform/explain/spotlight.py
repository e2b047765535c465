"""A spotlight: some inputs of a network, and what its layers recall from training when they see them."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.engine import (
    GroupSums,
    TopSlots,
    TopSlotsByGroup,
    coefficients,
    dual_output,
    initial_part,
    scan,
    scan_backwards,
    split_by_group,
)
from dualform.errors import QueryError
from dualform.progress import Progress, bar
from dualform.store import assemble_matrix
from dualform.types import LayerInfo, Order, Score

from .answers import Groups, Hits, Timeline
from .contributions import group_parts, output_parts, without_scan
from .groups import Stretches, group_slots
from .hits import hits_of
from .notebook import spotlight_html
from .query import Capture, LayerQuestion, Target, apply, capture, first_axis, target_key
from .weights import is_preconditioned, is_shared

if TYPE_CHECKING:
    from .memory import Memory

SCORES, ORDERS = ("weight", "abs", "contribution"), ("largest", "smallest", "magnitude")
STRETCHES = 50


@dataclass(frozen=True)
class ScanAnswers:
    """Several answers from one pass over the slots."""

    hits: Hits | None
    groups: dict[str, Groups]
    timeline: Timeline | None
    hits_by: dict[Any, Hits]
    """The top slots of each group."""


class Spotlight:
    """What a memory recalls for some inputs. Lazy: one forward pass gives all queries, each question is one scan.

    ``target`` is what contributions add to: the logit of the predicted class (None), a class, one class an example, a
    pair of classes (the difference of their logits), or a function of the model's output that gives one number an
    example. A contribution is exact for the last layer and first order through the layers after it otherwise; it
    always sums to the layer's own change.
    """

    def __init__(
        self, memory: "Memory", model: nn.Module, inputs: Any, weights: Mapping[str, Tensor] | None, target: Target
    ) -> None:
        first_axis(inputs)
        self.memory, self.model, self.inputs = memory, model, inputs
        self._weights = weights
        self._target = target.clone() if isinstance(target, Tensor) else target
        self._captures: dict[Hashable, Capture] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What is asked, without the passes that were run: another process runs its own."""
        return {**{name: value for name, value in vars(self).items() if name != "_own"}, "_captures": {}}

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return spotlight_html(self)

    @property
    def prediction(self) -> Any:
        """What the network itself answers."""
        return self._own.output

    @property
    def examples(self) -> int:
        """How many examples the inputs hold."""
        return self._own.examples

    # ------------------------------------------------------------------------------------------- questions

    def top(
        self,
        k: int = 10,
        *,
        layer: str | int,
        score: Score = "contribution",
        order: Order = "largest",
        target: Target = None,
        position: int | None = None,
        progress: Progress = True,
    ) -> Hits:
        """The exact k best slots of each query, with weight α, contribution, and the visit's columns."""
        _at_least(1, "k", k)
        answer = self.ask(layer, top=k, score=score, order=order, target=target, position=position, progress=progress)
        assert answer.hits is not None
        return answer.hits

    def top_by(
        self,
        column: str,
        k: int = 10,
        *,
        layer: str | int,
        score: Score = "contribution",
        order: Order = "largest",
        target: Target = None,
        position: int | None = None,
        progress: Progress = True,
    ) -> dict[Any, Hits]:
        """The exact k best slots of each query in every group of a column: group → hits."""
        _at_least(1, "k", k)
        answer = self.ask(
            layer, top=k, top_by=column, score=score, order=order, target=target, position=position, progress=progress
        )
        return answer.hits_by

    def by(
        self,
        column: str,
        *,
        layer: str | int,
        score: Score = "contribution",
        target: Target = None,
        position: int | None = None,
        places: bool = False,
        progress: Progress = True,
    ) -> Groups:
        """A score summed over the groups of a column. ``score="abs"`` is the paper's: Σ|α|.

        With ``places`` every position of the examples is a group of its own: names are (value, position), as for the
        words of a text that is noted by where a stretch of it begins. That is for weights α.
        """
        answer = self.ask(
            layer, by=(column,), score=score, target=target, position=position, places=places, progress=progress
        )
        return answer.groups[column]

    def timeline(
        self, column: str | None = None, *, layer: str | int, stretches: int = STRETCHES, score: Score = "contribution",
        target: Target = None, position: int | None = None, progress: Progress = True,
    ) -> Timeline:  # fmt: skip
        """A score over training time, in equal stretches of steps; by groups of a column if one is given."""
        _at_least(1, "stretches", stretches)
        answer = self.ask(
            layer,
            timeline=stretches,
            timeline_by=column,
            score=score,
            target=target,
            position=position,
            progress=progress,
        )
        assert answer.timeline is not None
        return answer.timeline

    def ask(
        self, layer: str | int, *, top: int = 0, top_by: str | None = None, by: Sequence[str] = (), timeline: int = 0,
        timeline_by: str | None = None, score: Score = "contribution", order: Order = "largest", target: Target = None,
        position: int | None = None, places: bool = False, progress: Progress = True,
    ) -> ScanAnswers:  # fmt: skip
        """Several questions in one pass: the ``top`` slots (of each group of ``top_by``), sums ``by`` columns, a
        ``timeline`` of so many stretches.
        """
        _among("score", score, SCORES)
        _among("order", order, ORDERS)
        _at_least(0, "top", top)
        _at_least(0, "timeline", timeline)
        store, view = self.memory.store, self.memory.view
        info, module = store.layer(layer)
        if info.in_ledger and ((top or timeline) if score == "contribution" else info.keep == "ledger"):
            raise QueryError(
                f"of layer '{layer}' a ledger by '{store.manifest.by}' was kept and no slots, so it can only be asked "
                f"for by({store.manifest.by!r}, layer={layer!r}). For top examples record with keep='slots'."
            )
        if places and score == "contribution":
            raise QueryError("places=True is for weights α: say score='abs' or score='weight'.")
        asked = LayerQuestion(info, module, score, position, self._capture(target))
        queries = asked.queries(store.compute)
        k = min(top, max(1, store.slots(info.name)))
        best = TopSlots(k, len(queries), score, order) if top and top_by is None else None
        of = group_slots(store, [info.name], top_by) if top and top_by is not None else None
        bests = TopSlotsByGroup(len(of.names), k, len(queries), score, order, of) if of else None
        columns = (by,) if isinstance(by, str) else tuple(by)
        groups = {column: group_parts(store, asked, column, places) for column in columns}
        over = Stretches(view.horizon, timeline, group_slots(store, [info.name], timeline_by)) if timeline else None
        times = GroupSums(over.count, len(queries), score, over) if over else None
        with bar(f"attending over {info.name}", store.slots(info.name), progress) as watch:
            alone = not (top or timeline)
            found = {c: without_scan(store, view, asked, queries, c, g, alone, watch) for c, g in groups.items()}
            known = {c: values for c, values in found.items() if values is not None}
            sums = {c: GroupSums(len(g.names), len(queries), score, g) for c, g in groups.items() if c not in known}
            reductions = [each for each in (best, bests, *sums.values(), times) if each is not None]
            if not reductions:
                pass
            elif score == "contribution" and is_preconditioned(store, info):
                scan_backwards(store, info.name, view, queries, reductions, watch)
            else:
                scan(store, info.name, view, queries, reductions, of_step=self._of_step(info, score), watch=watch)
        values = known | {column: each.total for column, each in sums.items()}
        return ScanAnswers(
            hits_of(store, view, asked, queries, best) if best else None,
            {c: output_parts(store, view, asked, queries, c, g, values[c]) for c, g in groups.items()},
            _timeline(asked, timeline_by, over, times) if over and times else None,
            {name: hits_of(store, view, asked, queries, b) for name, b in zip(of.names, bests.best, strict=True)}
            if of and bests
            else {},
        )

    def output(self, layer: str | int, *, progress: Progress = True) -> Tensor:
        """The output of a layer, from its first weights and its slots alone; in the shape the layer gives."""
        store, view = self.memory.store, self.memory.view
        info, module = store.layer(layer)
        seen = self._own.seen[module.name]
        if not seen.inputs:
            raise QueryError(f"layer '{layer}' was not used in this forward pass.")
        rows = torch.cat([x.reshape(-1, x.shape[-1]) for x in seen.inputs]).cpu()
        with bar(f"dual output of {layer}", store.slots(info.name), progress) as watch:
            if is_preconditioned(store, info) or is_shared(store, info) or info.in_ledger:
                parts = split_by_group(store, view, info.weights, watch=watch)
                out = apply(info, assemble_matrix(info, {name: part.total for name, part in parts.items()}), rows)
            else:
                of_step = self._of_step(info, "contribution")
                assert of_step is not None
                out = dual_output(store, info.name, view, rows.to(store.compute), of_step, watch)
                start = {name: initial_part(store, name, view.horizon) for name in info.weights}
                out += apply(info, assemble_matrix(info, start), rows)
        for bias in module.biases:
            out += self.memory.parameter(bias)
        parts = out.to(seen.outputs[0].dtype).split([z.shape[:-1].numel() for z in seen.outputs])
        outs = [shape(part) for part, shape in zip(parts, seen.shapes, strict=True)]
        if len(outs) == 1:
            return outs[0]
        return torch.stack(outs) if len({each.shape for each in outs}) == 1 else torch.cat(parts)

    def _of_step(self, info: LayerInfo, score: Score) -> list[np.ndarray] | None:
        """The coefficients of each piece of a layer, if contributions are asked for."""
        if score != "contribution":
            return None
        store, horizon = self.memory.store, self.memory.view.horizon
        return [coefficients(store, name, horizon).of_step for name in info.weights]

    # ------------------------------------------------------------------------------------------- passes

    @cached_property
    def _own(self) -> Capture:
        """The pass under the spotlight's own target."""
        return self._run(self._target)

    def _capture(self, target: Target) -> Capture:
        if target is None or target is self._target:
            return self._own
        key = target_key(target)
        if key is None:
            return self._run(target)
        if key not in self._captures:
            self._captures[key] = self._run(target)
        return self._captures[key]

    def _run(self, target: Target) -> Capture:
        if self._weights is None:  # the model may have changed since the last pass
            self._weights = self.memory.weights_for(self.model)
        layers = {module.name: (info, module) for info in self.memory.store.manifest.layers for module in info.modules}
        return capture(self.model, self.inputs, layers, self._weights, target, self.memory.store)


def _timeline(asked: LayerQuestion, column: str | None, over: Stretches, times: GroupSums) -> Timeline:
    values = times.total.unflatten(1, (len(over.names), -1))
    return Timeline(asked.module.name, asked.score, asked.target, column, over.names, over.edges, values)


def _among(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise QueryError(f"{what}={value!r} is not known; choose one of {list(known)}.")


def _at_least(least: int, what: str, value: int) -> None:
    if not isinstance(value, Integral) or value < least:
        raise QueryError(f"{what}={value!r} cannot be; choose a whole number, {least} or more.")
