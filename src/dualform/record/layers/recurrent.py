"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``: recorded without replacing their fused kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .protocol import AfterForward, CallAndPoints, ErrorPoint, LinearMap, MapInputs, MapRows, argument
from .recurrent_math import GradsOfOutputs, RecurrentState, Sequences, gate_inputs, gate_maps, gate_rows, refusal


class RecurrentCall:
    """The keys are [h; x], the errors are the gradients at the pre-activations of the gates: one row per time step."""

    def __init__(
        self, module: nn.RNNBase, x: Sequences, state: RecurrentState, output: Sequences, places: Sequence[int]
    ) -> None:
        self.module, self.x, self.state, self.output = module, _copied(x), _copied(state), _copied(output)
        self._places = places

    def inputs(self) -> Sequence[MapInputs]:
        """The inputs of the gates, time first."""
        keys = gate_inputs(self.module, self.x, self.state, self.output)
        return [MapInputs(i, key) for i, key in enumerate(keys)]

    def rows(self, errors: Sequence[Tensor | None]) -> Sequence[MapRows]:
        """The rows of all maps, time first."""
        grads: list[Tensor | None] = [None, None, None]
        for place, error in zip(self._places, errors, strict=True):
            grads[place] = error
        rows = gate_rows(self.module, self.x, self.state, GradsOfOutputs(*grads), self.output)
        return [MapRows(i, key, error) for i, (key, error) in enumerate(rows)]

    def shape(self, output: Tensor) -> Tensor:
        """The shape of the rows at the gates: (time, batch, d)."""
        return output.unflatten(0, self.inputs()[0].rows.shape[:2])


class RecurrentKind(AfterForward):
    """A recurrent module: one map for each layer and direction (a GRU has two)."""

    name, batch_dim = "recurrent", 1

    def maps(self, module: nn.Module) -> Sequence[LinearMap]:
        """The maps of all gates; a single map has the module's own name."""
        assert isinstance(module, nn.RNNBase)
        maps = gate_maps(module)
        return [
            LinearMap(
                tuple((name, getattr(module, name).shape[1]) for name in gate_map.weights),
                gate_map.biases,
                gate_map.d_in,
                gate_map.d_out,
                name="" if len(maps) == 1 else gate_map.name,
            )
            for gate_map in maps
        ]

    def refusal(self, module: nn.Module) -> str | None:
        """Modules with another forward pass, or with dropout between their layers, are rejected."""
        return refusal(module)

    def call(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> CallAndPoints | None:
        """Capture a call from its inputs and its outputs."""
        assert isinstance(module, nn.RNNBase)
        outputs = _output_tensors(output)
        places = [i for i, tensor in enumerate(outputs) if tensor.requires_grad]
        if not places:
            return None
        x, state = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "hx")
        return RecurrentCall(module, x, state, output[0], places), [_point(outputs[i]) for i in places]


def _output_tensors(output: Any) -> list[Tensor]:
    """The tensors that the module returned: its outputs, h_n, and c_n of an LSTM."""
    sequence, last = output
    sequence = sequence.data if isinstance(sequence, PackedSequence) else sequence
    return [sequence, *(last if isinstance(last, tuple) else (last,))]


def _point(output: Tensor) -> ErrorPoint:
    """Where the error of an output arrives, in the shape that the module returned."""
    assert output.grad_fn is not None
    return ErrorPoint(output.grad_fn, output.output_nr)


def _copied(value: Any) -> Any:
    """A copy of a call's tensors: users carry states over and change them in place."""
    if isinstance(value, PackedSequence):
        return value._replace(data=value.data.detach().clone())
    if isinstance(value, tuple | list):
        return tuple(_copied(element) for element in value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
