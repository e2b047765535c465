"""One forward pass gives the query of every recorded layer; one backward pass of a target gives the directions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from dualform.errors import ModelMismatch, QueryError
from dualform.record import ErrorPoint, LayerKind, ModuleCall, kind_of, owns_forward
from dualform.store import LayerMatrix, Store, assemble_matrix, outside_inference_mode
from dualform.types import LayerInfo, ModuleInfo

from .model_inputs import arguments_of, axis_of_examples, count_examples, require_batch_axis
from .model_shadow import shadow_of
from .targets import Target, choose

RecordedLayers = Mapping[str, tuple[LayerInfo, ModuleInfo]]
"""Recorded layers by the names of their uses."""


@dataclass(frozen=True)
class MapCalls:
    """The calls of one map: its inputs, the gradient of the target at its outputs, its outputs, and functions that give
    rows of outputs the shape that its module gives them.
    """

    inputs: Sequence[Tensor]
    directions: Sequence[Tensor]
    outputs: Sequence[Tensor]
    shapes: Sequence[Callable[[Tensor], Tensor]] = ()
    axis: int = 0
    """The axis that counts the examples."""


@dataclass(frozen=True)
class Capture:
    """What one forward and backward pass of a network over the queries shows."""

    output: Any
    target: str
    examples: int
    calls: Mapping[str, MapCalls]
    """What the recorded layers saw, by the names of their uses."""


def run_model(model: nn.Module, inputs: Any) -> Any:
    """Run a model on a tensor, on a tuple of arguments or on a mapping of them."""
    args, kwargs = arguments_of(model, inputs)
    return model(*args, **kwargs)


@dataclass
class WatchedModule:
    """The calls of one module, and the errors that arrived at each."""

    kind: LayerKind
    names: Sequence[str]
    calls: list[tuple[ModuleCall, list[Tensor | None]]] = field(default_factory=list)

    def note_call(self, call: ModuleCall, points: Sequence[ErrorPoint]) -> None:
        """Keep a call, and the errors that will arrive at its points."""
        errors: list[Tensor | None] = [None] * len(points)
        self.calls.append((call, errors))
        for i, point in enumerate(points):
            point.node.register_prehook(partial(_note_error, errors, i, point.number))


def _note_error(errors: list[Tensor | None], place: int, number: int, grads: tuple[Tensor | None, ...]) -> None:
    errors[place] = grads[number]


def capture(
    model: nn.Module,
    inputs: Any,
    layers: RecordedLayers,
    weights: Mapping[str, Tensor] | None,
    target: Target,
    store: Store,
) -> Capture:
    """Run a shadow of the model forwards and the target backwards, and keep what the recorded layers see."""
    with outside_inference_mode(), torch.enable_grad():
        shadow = shadow_of(model, weights, differentiable=True)
        watched = _watch_layers(shadow, layers)
        output = run_model(shadow, inputs)
        keys = _inputs_by_map(watched)
        require_batch_axis(store, inputs, keys)
        axes = {
            name: max(axis_of_examples(store, layers[name][0], rows) for rows in inputs_of_map) if name in layers else 0
            for name, inputs_of_map in keys.items()
        }
        examples = count_examples(inputs, axes, keys)
        scalar, described = choose(output, target, examples, _output_axes(layers, keys, axes))
        if scalar.requires_grad:
            _backward(model, shadow, scalar, target)
        tensors = {name: p.detach() for name, p in shadow.named_parameters()}
        calls = {name: _map_calls(layers[name], tensors, watched, name, axes.get(name, 0)) for name in layers}
    return Capture(_detached(output), described, examples, calls)


def _watch_layers(model: nn.Module, layers: RecordedLayers) -> dict[str, WatchedModule]:
    """Watch the calls of all recorded modules, by their paths."""
    watched: dict[str, WatchedModule] = {}
    modules = dict(model.named_modules())
    for info, use in layers.values():
        if use.path not in modules:
            raise ModelMismatch(
                f"this {type(model).__name__} has no layer '{use.name}', which the memory recorded. "
                "Pass the model that was trained."
            )
        module = modules[use.path]
        if info.kind == "linear" and not owns_forward(module):
            module.register_forward_pre_hook(partial(_check_width, use.name, info.d_in), with_kwargs=True)
        if use.path not in watched:
            watched[use.path] = layer = _watched_module(model, use.path, module)
            layer.kind.attach(module, layer.note_call)
    return watched


def _backward(model: nn.Module, shadow: nn.Module, scalar: Tensor, target: Target) -> None:
    """Run the target backwards. Raise if it depends on the model's own parameters, which a target function may use."""
    parameters = [p for p in shadow.parameters() if p.is_floating_point()]
    own = {} if callable(target) else {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(scalar.sum(), [*parameters, *own.values()], allow_unused=True)
    for name, gradient in zip(own, gradients[len(parameters) :], strict=True):
        if gradient is not None:
            raise QueryError(
                f"a question runs a copy of the model's modules, but this {type(model).__name__} uses its own "
                f"'{name}' in a way that the copy cannot follow (a global variable, say). Let its forward pass reach "
                "its layers through self."
            )


def _watched_module(model: nn.Module, path: str, module: nn.Module) -> WatchedModule:
    kind = kind_of(module)
    if kind is None:
        raise ModelMismatch(
            f"'{path}' of this {type(model).__name__} is a {type(module).__name__}, which is no kind of layer that can "
            "be recorded. Pass the model that was trained."
        )
    return WatchedModule(kind, [f"{path}.{inner.name}" if inner.name else path for inner in kind.maps(module)])


def _output_axes(
    layers: RecordedLayers, keys: Mapping[str, Sequence[Tensor]], axes: Mapping[str, int]
) -> dict[torch.Size, int]:
    """The axis that counts the examples, by the shape of an output."""
    return {
        torch.Size((*key.shape[:-1], info.d_out)): axes[name]
        for name, (info, _) in layers.items()
        for key in keys.get(name, ())
    }


def _inputs_by_map(watched: Mapping[str, WatchedModule]) -> dict[str, list[Tensor]]:
    """The inputs of each map, call by call."""
    inputs: dict[str, list[Tensor]] = {}
    for module in watched.values():
        for call, _ in module.calls:
            for number, rows in call.inputs():
                inputs.setdefault(module.names[number], []).append(rows)
    return inputs


def _map_calls(
    layer: tuple[LayerInfo, ModuleInfo], tensors: Mapping[str, Tensor], watched: Mapping[str, WatchedModule], name: str,
    axis: int,
) -> MapCalls:  # fmt: skip
    info, use = layer
    module = watched[use.path]
    number = module.names.index(name)
    matrix = assemble_matrix(info, tensors)
    bias = sum((tensors[bias] for bias in use.biases), torch.zeros((), dtype=matrix.dtype))
    inputs, directions, outputs, shapes = [], [], [], []
    for call, errors in module.calls:
        for rows in call.rows(errors):
            if rows.map == number:
                inputs.append(rows.key)
                outputs.append(apply(info, matrix, rows.key) + bias)
                directions.append(
                    torch.zeros_like(outputs[-1]) if rows.error is None else rows.error.reshape(outputs[-1].shape)
                )
                shapes.append(call.shape)
    return MapCalls(inputs, directions, outputs, shapes, axis)


def apply(
    layer: LayerInfo, matrix: Float[Tensor, "d_out w"], rows: Shaped[Tensor, "*r k"]
) -> Float[Tensor, "*r d_out"]:
    """The product of a layer's matrix with its inputs, without the bias."""
    return LayerMatrix(layer).apply(matrix, rows)


def _check_width(name: str, width: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
    x = args[0] if args else kwargs["input"]
    if x.shape[-1] != width:
        raise QueryError(
            f"layer '{name}' takes {width} numbers a row, but the query has {x.shape[-1]} (shape {tuple(x.shape)})."
        )


def _detached(output: Any) -> Any:
    return output.detach() if isinstance(output, Tensor) else output
