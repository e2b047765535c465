"""What training put into a target through the weights and biases of several layers at once.

The part of some slots in a target φ is ⟨∂φ/∂θ, what they put into θ⟩, summed over the parameters θ: the first-order
effect of taking them out of all of these layers together. Queries hold the gradient as products u qᵀ, one for each use
of a weight. A weight that several layers feed (an embedding that is tied to the output) gets the products of all of its
uses, whichever of them its slots come from.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.engine import (
    LayerQueries,
    LayerScan,
    Reduction,
    StoreView,
    coefficients,
    initial_part,
    scan_backwards,
    scan_together,
)
from dualform.errors import QueryError
from dualform.progress import OnProgress
from dualform.store import Store, assemble_matrix, piece_of
from dualform.types import LayerInfo

from ..query import Question, apply, is_preconditioned
from .one_layer import step_coefficients

FirstFactors = dict[str, tuple[float | Tensor, float | Tensor]]
"""The factors of a first weight and of the first buffer in the weight at the horizon."""


@dataclass(frozen=True)
class NetworkQuestion:
    """The questions to several uses of layers, asked together: their parts of one target add up."""

    store: Store
    view: StoreView
    questions: Sequence[Question]
    left_out: tuple[str, ...] = ()
    """Layers that could not be asked."""

    @property
    def queries(self) -> int:
        """How many examples are asked about."""
        return len(self.questions[0].queries)

    @property
    def target(self) -> str:
        """What contributions add to."""
        return self.questions[0].target

    @cached_property
    def biases(self) -> dict[str, Float[Tensor, "n d"]]:
        """The gradient of the target with respect to each explained bias."""
        gradients: dict[str, Tensor] = {}
        for question in self.questions:
            directions = question.queries.directions
            assert directions is not None
            pull = directions.unflatten(0, (self.queries, -1)).sum(1)
            for name in question.module.biases:
                if self.store.parameters[name].by_slots:
                    gradients[name] = gradients[name] + pull if name in gradients else pull
        return gradients

    @cached_property
    def asked(self) -> list[tuple[str, LayerQueries]]:
        """What is asked of each layer whose slots feed one of the parameters."""
        asked = []
        weights = {name for question in self.questions for name in question.info.weights}
        for info in self.store.manifest.layers:
            biases = {name: self.biases[name] for name in info.biases if name in self.biases}
            if not (biases or weights.intersection(info.weights)):
                continue
            for queries in self._queries_of(info):
                asked.append((info.name, replace(queries, biases=biases)))
                biases = {}
            if biases:
                asked.append((info.name, self._without_weights(info, biases)))
        return asked

    def _queries_of(self, info: LayerInfo) -> Iterator[LayerQueries]:
        """The products u qᵀ in the form of a layer's matrix: of its own uses, and of others that share a weight."""
        for question in self.questions:
            if question.info is info:
                yield question.queries
                continue
            for name in set(question.info.weights).intersection(info.weights):
                yield in_matrix_of(info, name, question)

    def _without_weights(self, info: LayerInfo, biases: dict[str, Tensor]) -> LayerQueries:
        """Queries that ask for the biases alone."""
        rows = torch.full((self.queries, info.key_size), -1.0 if info.indexed else 0.0, dtype=self.store.compute)
        return LayerQueries(rows, torch.zeros(self.queries, info.d_out, dtype=self.store.compute), 1, biases)

    def scan(self, examples: slice, reductions: Sequence[Reduction], watch: OnProgress | None) -> FirstFactors:
        """Pass the contributions of all slots to some examples to the reductions.

        Returns the factors of the first state in parameters whose rules have a preconditioner.
        """
        store, view, factors = self.store, self.view, FirstFactors()
        swept, layer_scans = [], []
        for layer, of_all in self.asked:
            queries = of_all.of_examples(examples)
            if is_swept(store, layer, queries):
                swept.append((layer, queries))
            else:
                layer_scans.append(partial(layer_scan, store, view, layer, queries, reductions))
        scan_layers(store, view, layer_scans, watch)
        if swept:
            scan_backwards(store, swept, view, reductions, watch, factors)
        return factors

    @property
    def swept(self) -> tuple[str, ...]:
        """The layers whose rules have a preconditioner."""
        return tuple(dict.fromkeys(layer for layer, queries in self.asked if is_swept(self.store, layer, queries)))

    @property
    def slots(self) -> int:
        """The slots that a pass reads."""
        return sum(self.store.slots(layer) for layer, _ in self.asked)

    def initial(self, factors: FirstFactors) -> Float[Tensor, " n"]:
        """The part of the first weights and biases, and of what no rule explains."""
        first: dict[str, Tensor] = {}
        for question in self.questions:
            for name in (*question.info.weights, *question.module.biases):
                if name not in first:
                    first[name] = self._first_part(name, factors)
        return torch.stack([_through(question, first) for question in self.questions]).sum(0)

    def _first_part(self, name: str, factors: FirstFactors) -> Tensor:
        """What is left of a first weight or bias; one that no rule explains as a whole."""
        store = self.store
        if not store.parameters[name].by_slots:
            return store.snapshot(name, self.view.horizon).double()
        if name not in factors:
            return initial_part(store, name, self.view.horizon)
        rule, buffer = store.rule(name), store.initial_state(name, "buffer")
        by_matrix = rule is not None and rule.acts == "left"
        of_weight, of_buffer = factors[name]
        part = _times(of_weight, store.initial(name).double(), by_matrix)
        return part if buffer is None else part + _times(of_buffer, buffer.double(), by_matrix)

    @property
    def total(self) -> Float[Tensor, " n"]:
        """⟨∂φ/∂θ, θ⟩ over all parameters of these layers, at the weights that the queries saw."""
        parts = []
        for question in self.questions:
            directions = question.queries.directions
            assert directions is not None
            outputs = question.outputs.flatten(0, 1).double().cpu()
            parts.append((directions.double() * outputs).sum(1).unflatten(0, (self.queries, -1)).sum(1))
        return torch.stack(parts).sum(0)


def is_swept(store: Store, layer: str, queries: LayerQueries) -> bool:
    """Whether a rule with a preconditioner explains what a layer is asked about, so that steps are swept backwards."""
    info, _ = store.layer(layer)
    return is_preconditioned(store, info) or any(store.is_preconditioned(name) for name in queries.biases)


def layer_scan(
    store: Store, view: StoreView, layer: str, queries: LayerQueries, reductions: Sequence[Reduction]
) -> LayerScan:
    """The scan of a layer for contributions through its weights and the biases of the queries."""
    of_step = step_coefficients(store, view, store.layer(layer)[0])
    of_bias = {name: coefficients(store, name, view.horizon).of_step for name in queries.biases}
    return LayerScan(store, layer, queries, reductions, of_step, of_bias)


def scan_layers(
    store: Store, view: StoreView, layer_scans: Sequence[Callable[[], LayerScan]], watch: OnProgress | None
) -> None:
    """Scan layers one after the other, or side by side where their slots are made by training again."""
    for at_a_time in [layer_scans] if store.is_supplied else [[each] for each in layer_scans]:
        scan_together(store, [make() for make in at_a_time], view, watch)


def in_matrix_of(info: LayerInfo, name: str, question: Question) -> LayerQueries:
    """The queries of another use of a weight, as queries to the matrix of a layer that holds it too."""
    used, queries = question.info, question.queries
    if info.parts > 1 or used.parts > 1:
        raise QueryError(
            f"'{name}' is shared by the grouped convolutions '{info.name}' and '{used.name}', whose parts cannot be "
            "told apart. Ask one layer: layer=…"
        )
    here, there = piece_of(info, name), piece_of(used, name)
    rows, directions = queries.rows, queries.directions
    assert directions is not None
    if used.indexed and rows.shape[1] == 1:
        rows = torch.nn.functional.one_hot(rows[:, 0].long(), used.width).to(directions.dtype)
    rows = rows[:, there.begin : there.end]
    if here.transposed != there.transposed:
        rows, directions = directions, rows
    wide = rows.new_zeros(len(rows), info.width)
    wide[:, here.begin : here.end] = rows
    return LayerQueries(wide, directions, queries.per_example)


def _through(question: Question, first: dict[str, Tensor]) -> Float[Tensor, " n"]:
    """The part of a target that given weights and biases have, in one use of a layer."""
    info, queries = question.info, question.queries
    assert queries.directions is not None
    outputs = apply(info, assemble_matrix(info, {name: first[name] for name in info.weights}), queries.rows.double())
    for bias in question.module.biases:
        outputs = outputs + first[bias]
    return (queries.directions.double() * outputs).sum(1).unflatten(0, (len(queries), -1)).sum(1)


def _times(factor: float | Tensor, tensor: Tensor, by_matrix: bool) -> Tensor:
    if isinstance(factor, Tensor) and by_matrix and tensor.ndim > 1:
        return (factor.double() @ tensor.flatten(1)).reshape(tensor.shape)
    return factor * tensor
