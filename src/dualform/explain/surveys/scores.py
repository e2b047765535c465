"""How much each surveyed example speaks for a target, by gradients at the trained weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from dualform.engine import example_products, extended_matrix, kronecker_factors, solve_fisher, usual_damping
from dualform.errors import QueryError
from dualform.progress import OnProgress, Progress, bar
from dualform.store import KroneckerFactors, Store, SurveyPass, outside_inference_mode
from dualform.types import LayerInfo

from ..query import Target, choose, examples_first, first_axis, logits_of, run_model, shadow_of
from .answers import SurveyScores

Method = Literal["gradient", "ekfac"]
METHODS = ("gradient", "ekfac")

WIDEST = 8192
"""The widest side of a layer that has EK-FAC factors: a square matrix of this width takes 256 MiB in float32."""

QUERY_ENTRIES = 1 << 26
"""The most entries of query gradients that are in memory at a time."""

WeightsAt = Callable[[int], Mapping[str, Tensor] | None]
"""The weights of the network at a step of the survey; None for those that the model has."""


def survey_scores(
    store: Store, model: nn.Module, inputs: Any, weights_at: WeightsAt, shown: Bool[np.ndarray, " V"], *,
    method: Method, target: Target, damping: float | None, progress: Progress,
) -> SurveyScores:  # fmt: skip
    """The scores of the shown visits for a target of each input."""
    if method not in METHODS:
        raise QueryError(f"method={method!r} is not known; choose one of {list(METHODS)}.")
    if damping is not None and (method == "gradient" or damping <= 0):
        raise QueryError(f"damping={damping!r}: give a number above 0, with method='ekfac'.")
    layers, left_out = _split_layers(store, model, method)
    if not layers:
        raise QueryError(f"no layer can be scored by method={method!r}: {_listed(left_out)}.")
    passes = store.manifest.survey if method == "gradient" else store.manifest.survey[-1:]
    values, name = None, ""
    total = sum(store.slots(layer.name) for layer in layers) * (1 if method == "gradient" else 3)
    with bar(f"{method} scores", total, progress) as watch, outside_inference_mode(), torch.enable_grad():
        target, name = _fixed_target(shadow_of(model, weights_at(store.steps)), inputs, target)
        factors = {layer.name: _factors(store, layer, watch) for layer in layers} if method == "ekfac" else {}
        added = {layer: damping or usual_damping(of_layer) for layer, of_layer in factors.items()}
        for one_pass in passes:
            shadow = shadow_of(model, weights_at(one_pass.last), differentiable=True)
            part = _pass_scores(store, shadow, inputs, target, layers, one_pass, factors, added, watch)
            values = part if values is None else values + part
    assert values is not None
    if method == "ekfac":
        shown = shown & (store.visits["step"].to_numpy() >= passes[0].first)
        values = values / (len(store.visits) // len(store.manifest.survey))  # the loss is the mean over the examples
    visits = store.visits.filter(pa.array(shown))
    per_visit = values[:, torch.from_numpy(shown)]
    index, example = np.unique(visits["index"].to_numpy(), return_inverse=True)
    by_example = per_visit.new_zeros(len(per_visit), len(index)).index_add_(1, torch.from_numpy(example), per_visit)
    rates = tuple(one_pass.learning_rate for one_pass in passes)
    return SurveyScores(
        method, name, index, by_example, visits, per_visit, rates, added, left_out, folder=str(store.path)
    )


def _pass_scores(
    store: Store, shadow: nn.Module, inputs: Any, target: Target, layers: Sequence[LayerInfo], one_pass: SurveyPass,
    factors: Mapping[str, KroneckerFactors], damping: Mapping[str, float], watch: OnProgress | None,
) -> Float[Tensor, "n V"]:  # fmt: skip
    """The scores at one checkpoint, some queries at a time."""
    targets, _ = choose(run_model(shadow, inputs), target, first_axis(inputs))
    parameters = dict(shadow.named_parameters())
    names = list(dict.fromkeys(name for layer in layers for name in layer.parameters))
    leaves = [parameters[name] for name in names]
    size = max(1, QUERY_ENTRIES // sum(leaf.numel() for leaf in leaves))
    rate = 1.0 if factors else one_pass.learning_rate
    parts = []
    for some_targets in targets.split(size):
        gradients = [
            dict(zip(names, torch.autograd.grad(value, leaves, retain_graph=True, materialize_grads=True), strict=True))
            for value in some_targets
        ]
        part = torch.zeros(len(some_targets), store.manifest.visits, dtype=store.compute)
        for layer in layers:
            queries = torch.stack([extended_matrix(layer, gradient) for gradient in gradients]).cpu().to(store.compute)
            if factors:
                queries = solve_fisher(factors[layer.name], queries, damping[layer.name])
            part -= rate * example_products(store, layer, range(one_pass.first, one_pass.last + 1), queries, watch)
        parts.append(part)
    return torch.cat(parts)


def _fixed_target(trained: nn.Module, inputs: Any, target: Target) -> tuple[Target, str]:
    """The target, and its name. The predicted class is that of the last checkpoint."""
    with torch.no_grad():
        output = run_model(trained, inputs)
    _, name = choose(output, target, first_axis(inputs))
    return (examples_first(logits_of(output), {}).argmax(1) if target is None else target), name


def _factors(store: Store, layer: LayerInfo, watch: OnProgress | None) -> KroneckerFactors:
    last = store.manifest.survey[-1]
    steps = range(last.first, last.last + 1)
    return store.cache.kronecker_factors(layer.name, lambda: kronecker_factors(store, layer, steps, watch))


def _split_layers(store: Store, model: nn.Module, method: Method) -> tuple[list[LayerInfo], dict[str, str]]:
    """The layers that a method can score; and the layers and trained parameters that it leaves out, with reasons."""
    left_out = {
        layer.name: reason for layer in store.manifest.layers if (reason := _reason_against(store, layer, method))
    }
    of_layers = {name for layer in store.manifest.layers for name in layer.parameters}
    left_out |= {
        name: store.parameters[name].reason
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in of_layers
    }
    return [layer for layer in store.manifest.layers if layer.name not in left_out], left_out


def _reason_against(store: Store, layer: LayerInfo, method: Method) -> str:
    if not store.slots(layer.name):
        return "no example of the survey reached it"
    if (store.calls(layer.name).visit < 0).any():
        return "which of its rows belong to which example is not known"
    if method == "gradient":
        return ""
    if layer.indexed:
        return "EK-FAC is not for embeddings"
    if layer.parts > 1:
        return "EK-FAC is not for grouped convolutions"
    inputs, outputs = layer.width + len(layer.biases), layer.d_out
    if max(inputs, outputs) > WIDEST:
        size = (inputs**2 + outputs**2) * store.compute.itemsize / 2**30
        return f"its EK-FAC factors of {inputs:,} × {inputs:,} and {outputs:,} × {outputs:,} would take {size:.1f} GiB"
    return ""


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"'{name}': {reason}" for name, reason in reasons.items())
