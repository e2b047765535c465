"""A spotlight: some inputs of a network, and what its layers recall from training when they see them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.attend import (
    Best,
    GroupSums,
    Queries,
    add_up,
    coefficients,
    dual_output,
    explained_layers,
    initial_part,
    layer_sums,
    scan,
)
from dualform.errors import QueryError
from dualform.memory import Block
from dualform.types import LayerInfo, ModuleInfo, Order, Score

from .answers import Groups, Hits, Timeline
from .filters import groups_of
from .forward import Capture, Target, capture, count_examples
from .progress import bar

if TYPE_CHECKING:
    from .memory import Memory

SCORES, ORDERS = ("weight", "abs", "contribution"), ("largest", "smallest", "magnitude")
STRETCHES = 50


@dataclass(frozen=True)
class Answer:
    """Several answers from one pass over the slots."""

    hits: Hits | None
    groups: dict[str, Groups]
    timeline: Timeline | None


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
        self.memory, self.model, self.inputs = memory, model, inputs
        self._weights, self._target = weights, target
        self._captures: dict[Any, Capture] = {}
        self.examples = count_examples(inputs)

    @property
    def output(self) -> "_Output":
        """``spot.output("fc2")``: the dual form's own output of a layer. It equals the layer's."""
        return _Output(self)

    @cached_property
    def prediction(self) -> Any:
        """What the network itself answers."""
        return self._capture(self._target).output

    # ------------------------------------------------------------------------------------------- questions

    def top(
        self,
        k: int = 10,
        *,
        layer: str,
        score: Score = "contribution",
        order: Order = "largest",
        target: Target = None,
        position: int | None = None,
        progress: bool = True,
    ) -> Hits:
        """The exact k best slots of each query, with weight α, contribution, and the visit's columns."""
        answer = self.ask(layer, top=k, score=score, order=order, target=target, position=position, progress=progress)
        assert answer.hits is not None
        return answer.hits

    def by(
        self,
        column: str,
        *,
        layer: str,
        score: Score = "contribution",
        target: Target = None,
        position: int | None = None,
        progress: bool = True,
    ) -> Groups:
        """A score summed over the groups of a column. ``score="abs"`` is the paper's: Σ|α|."""
        return self.ask(layer, by=(column,), score=score, target=target, position=position, progress=progress).groups[
            column
        ]

    def timeline(
        self, column: str | None = None, *, layer: str, stretches: int = STRETCHES, score: Score = "contribution",
        target: Target = None, position: int | None = None, progress: bool = True,
    ) -> Timeline:  # fmt: skip
        """A score over training time, in equal stretches of steps; by groups of a column if one is given."""
        asked = self.ask(
            layer,
            timeline=stretches,
            timeline_by=column,
            score=score,
            target=target,
            position=position,
            progress=progress,
        )
        assert asked.timeline is not None
        return asked.timeline

    def ask(
        self, layer: str, *, top: int = 0, by: Sequence[str] = (), timeline: int = 0, timeline_by: str | None = None,
        score: Score = "contribution", order: Order = "largest", target: Target = None, position: int | None = None,
        progress: bool = True,
    ) -> Answer:  # fmt: skip
        """Several questions in one pass:
        the ``top`` slots, sums ``by`` columns, a ``timeline`` of so many stretches.
        """
        _among("score", score, SCORES)
        _among("order", order, ORDERS)
        store, view = self.memory.store, self.memory.view
        info, module = store.layer(layer)
        queries, seen_target = self._queries(info, module, target, position, score)
        of_step = coefficients(store, info.weight, view.horizon).of_step if score == "contribution" else None
        best = Best(min(top, max(1, store.slots(info.name))), len(queries), score, order) if top else None
        columns = (by,) if isinstance(by, str) else tuple(by)
        named = {column: self._groups(info, column) for column in columns}
        sums = {column: GroupSums(len(g.names), len(queries), score, g) for column, g in named.items()}
        stretch = _Stretches(view.horizon, timeline, self._groups(info, timeline_by)) if timeline else None
        over_time = GroupSums(stretch.count, len(queries), score, stretch) if stretch else None
        reductions = [r for r in (best, *sums.values(), over_time) if r is not None]
        with bar(f"attending over {info.name}", store.slots(info.name), progress) as watch:
            scan(store, info.name, view, queries, reductions, of_step=of_step, watch=watch)
        return Answer(
            None if best is None else self._hits(best, info, layer, queries, score, seen_target),
            {c: self._summed(info, module, c, named[c], sums[c].total, queries, score, seen_target, position)
             for c in columns},
            None if stretch is None or over_time is None else Timeline(
                layer, score, seen_target, timeline_by, stretch.names, stretch.edges,
                over_time.total.unflatten(1, (len(stretch.names), -1)),
            ),
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------- queries

    def _capture(self, target: Target) -> Capture:
        target = self._target if target is None else target
        key = tuple(target.tolist()) if isinstance(target, Tensor) else target
        if key not in self._captures:
            widths = {m.name: layer.d_in for layer in self.memory.store.manifest.layers for m in layer.modules}
            self._captures[key] = capture(self.model, self.inputs, widths, self._weights, target)
        return self._captures[key]

    def _rows(self, info: LayerInfo, tensors: Sequence[Tensor]) -> Float[Tensor, "n r d"]:
        """Example by example, all rows of all calls; one row an example where the leading axis is something else."""
        if not tensors:
            raise QueryError(f"layer '{info.name}' was not used in this forward pass, so there is nothing to ask it.")
        axis = info.batch_dim
        parts = []
        for t in tensors:
            if t.ndim <= axis + 1 or t.shape[axis] != self.examples:
                return torch.cat([t.reshape(-1, 1, t.shape[-1]) for t in tensors])
            parts.append(t.movedim(axis, 0).reshape(self.examples, -1, t.shape[-1]))
        return torch.cat(parts, 1)

    def _queries(
        self, info: LayerInfo, module: ModuleInfo, target: Target, position: int | None, score: Score
    ) -> tuple[Queries, str]:  # fmt: skip
        found = self._capture(target)
        dtype = self.memory.store.compute
        rows = self._at(self._rows(info, found.seen[module.name].inputs), position)
        directions = self._at(self._rows(info, found.seen[module.name].directions), position)
        queries = Queries(rows.flatten(0, 1).cpu().to(dtype), directions.flatten(0, 1).cpu().to(dtype), rows.shape[1])
        return queries, found.target

    @staticmethod
    def _at(rows: Float[Tensor, "n r d"], position: int | None) -> Float[Tensor, "n s d"]:
        if position is None:
            return rows
        if not -rows.shape[1] <= position < rows.shape[1]:
            raise QueryError(
                f"position {position} is not among the {rows.shape[1]} rows that an example sends through this layer."
            )
        return rows[:, position % rows.shape[1]].unsqueeze(1)

    # ------------------------------------------------------------------------------------------- answers

    def _groups(self, info: LayerInfo, column: str | None) -> "_Groups":
        store = self.memory.store
        if column is None:
            return _Groups(("all",), np.zeros(len(store.visits) + 1, np.int64))
        names, ids = groups_of(store.visits, column)
        if (store.calls(info.name).visit < 0).any() or (ids == len(names)).any():
            names = (*names, None)  # slots whose visit, or whose value, is not known
        return _Groups(names, np.append(ids, len(names) - 1))

    def _hits(self, best: Best, info: LayerInfo, layer: str, queries: Queries, score: Score, target: str) -> Hits:
        store, calls = self.memory.store, self.memory.store.calls(info.name)
        n, found = len(best.slot), best.slot.numpy()
        slots = found[:, (found >= 0).all(0)]
        flat = slots.reshape(-1)
        weight, contribution = self._both(info, queries, slots)
        visits = calls.visits_of(flat) if len(flat) else flat
        columns = store.visits.take(np.where(visits < 0, 0, visits)) if len(store.visits) else store.visits.slice(0, 0)
        if (visits < 0).any():
            unknown = pa.array(visits < 0)
            columns = pa.table({
                name: pc.if_else(unknown, pa.scalar(None, column.type), column)  # pyright: ignore[reportAttributeAccessIssue]
                for name, column in zip(columns.column_names, columns.columns, strict=True)
            })  # fmt: skip

        def shaped(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).reshape(n, -1)

        return Hits(
            layer, score, target, shaped(slots), shaped(calls.step[calls.of(flat)]), shaped(calls.positions_of(flat)),
            shaped(visits), weight, contribution, columns,
        )  # fmt: skip

    def _both(self, info: LayerInfo, queries: Queries, slots: np.ndarray) -> tuple[Tensor, Tensor]:
        """Weight and contribution of the hits themselves: few enough to be read one by one."""
        store, (n, k) = self.memory.store, slots.shape
        flat = slots.reshape(-1)
        keys = store.gather(info.name, flat, "key").unflatten(0, (n, k))
        rows = queries.rows.unflatten(0, (n, -1))
        weight = torch.einsum("nrd,nkd->nrk", rows, keys)
        explained = info.keep == "slots" and store.parameters[info.weight].kind != "rest"
        if not explained or queries.directions is None:
            return weight.sum(1), torch.full((n, k), torch.nan, dtype=weight.dtype)
        calls = store.calls(info.name)
        of_step = coefficients(store, info.weight, self.memory.view.horizon).of_step
        value = torch.from_numpy(of_step[calls.step[calls.of(flat)]] * calls.factor[calls.of(flat)]).to(weight.dtype)
        errors = store.gather(info.name, flat, "error").unflatten(0, (n, k))
        pull = torch.einsum("nrd,nkd->nrk", queries.directions.unflatten(0, (n, -1)), errors)
        return weight.sum(1), (weight * pull).sum(1) * value.reshape(n, k)

    def _summed(
        self,
        info: LayerInfo,
        module: ModuleInfo,
        column: str,
        groups: "_Groups",
        values: Tensor,
        queries: Queries,
        score: Score,
        target: str,
        position: int | None,
    ) -> Groups:
        if score != "contribution":
            return Groups(module.name, column, score, target, groups.names, values)
        assert queries.directions is not None
        store, horizon = self.memory.store, self.memory.view.horizon
        n, directions = len(queries), queries.directions.double()
        start = initial_part(store, info.weight, horizon)
        initial = (directions * (queries.rows.double() @ start.mT)).sum(1).unflatten(0, (n, -1)).sum(1)
        pull = directions.unflatten(0, (n, -1)).sum(1)
        bias = torch.zeros_like(values)
        if module.bias is not None:
            bias_start, by_group = self._bias(info, module, column, groups)
            bias, initial = pull @ by_group.mT, initial + pull @ bias_start
        outputs = self._at(self._rows(info, self._seen_outputs(module, target)), position).flatten(0, 1).double().cpu()
        total = (directions * outputs).sum(1).unflatten(0, (n, -1)).sum(1)
        return Groups(module.name, column, score, target, groups.names, values, bias, initial, total)

    def _seen_outputs(self, module: ModuleInfo, target: str) -> Sequence[Tensor]:
        return next(c for c in self._captures.values() if c.target == target).seen[module.name].outputs

    def _bias(self, info: LayerInfo, module: ModuleInfo, column: str, groups: "_Groups") -> tuple[Tensor, Tensor]:
        """What was left of the first bias, and what each group put into it."""
        store, view = self.memory.store, self.memory.view
        assert module.bias is not None
        if store.parameters[module.bias].kind == "rest":
            return store.snapshot(module.bias, view.horizon).double(), torch.zeros(
                len(groups.names), info.d_out, dtype=torch.float64
            )
        key = ("bias", module.bias, column, view.key)
        if key not in store.cache:
            total = torch.zeros(len(groups.names), info.d_out, dtype=torch.float64)
            for layer in explained_layers(store):  # a bias may be shared by several layers
                term = layer_sums(store, layer, view.horizon, group_of=groups, groups=len(groups.names)).get(
                    module.bias
                )
                if term is not None:
                    add_up(store, layer.name, view, [term])
                    total += term.total[:, :, 0]
            store.cache[key] = total
        return initial_part(store, module.bias, view.horizon), store.cache[key]


@dataclass(frozen=True)
class _Output:
    spot: Spotlight

    def __call__(self, layer: str, *, progress: bool = True) -> Tensor:
        """The output of a layer, from its first weights and its slots alone; in the shape the layer gives."""
        memory = self.spot.memory
        store, view = memory.store, memory.view
        info, module = store.layer(layer)
        seen = self.spot._capture(None).seen[module.name]
        if not seen.inputs:
            raise QueryError(f"layer '{layer}' was not used in this forward pass.")
        rows = torch.cat([x.reshape(-1, x.shape[-1]) for x in seen.inputs]).cpu()
        of_step = coefficients(store, info.weight, view.horizon).of_step
        with bar(f"dual output of {layer}", store.slots(info.name), progress) as watch:
            out = dual_output(store, info.name, view, rows.to(store.compute), of_step, watch)
        out += rows.double() @ initial_part(store, info.weight, view.horizon).mT
        if module.bias is not None:
            out += memory.parameter(module.bias)
        shapes = [z.shape for z in seen.outputs]
        parts = out.to(seen.outputs[0].dtype).split([s[:-1].numel() for s in shapes])
        outs = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        return outs[0] if len(outs) == 1 else torch.stack(outs) if len(set(shapes)) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class _Groups:
    """The group of each slot, through its visit. The last id is for visits that are not known."""

    names: tuple[Any, ...]
    of_visit: np.ndarray

    def __call__(self, block: Block) -> np.ndarray:
        return self.of_visit[block.visits]


class _Stretches:
    """The stretch of training time of each slot (times its group)."""

    def __init__(self, horizon: int, stretches: int, groups: _Groups) -> None:
        self.groups, self.names = groups, groups.names
        edges = np.unique(np.round(np.linspace(0, horizon, min(stretches, max(1, horizon)) + 1)).astype(np.int64))
        self.edges, self._edges = torch.from_numpy(edges), edges
        self.count = len(groups.names) * (len(edges) - 1)

    def __call__(self, block: Block) -> np.ndarray:
        stretch = np.searchsorted(self._edges, block.steps, side="left") - 1
        return self.groups(block) * (len(self._edges) - 1) + stretch


def _among(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise QueryError(f"{what}={value!r} is not known; choose one of {list(known)}.")
