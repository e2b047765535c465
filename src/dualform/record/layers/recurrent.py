"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as the user has them: their fused kernels stay in use."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .protocol import AfterForward, CallAndPoints, ErrorPoint, LinearMap, MapInputs, MapRows, argument
from .recurrent_math import GradsOfOutputs, RecurrentState, Sequences, gate_inputs, gate_maps, gate_rows, refusal


class RecurrentCall:
    """The keys are [h; x], the errors those at the gates before their nonlinearity: one row a time step."""

    def __init__(
        self, module: nn.RNNBase, x: Sequences, state: RecurrentState, output: Sequences, places: Sequence[int]
    ) -> None:
        self.module, self.x, self.state, self.output = module, _held(x), _held(state), _held(output)
        self._places = places

    def inputs(self) -> Sequence[MapInputs]:
        """The inputs of the gates, time first."""
        found = gate_inputs(self.module, self.x, self.state, self.output)
        return [MapInputs(i, key) for i, key in enumerate(found)]

    def rows(self, errors: Sequence[Tensor | None]) -> Sequence[MapRows]:
        """The rows of all maps, time first."""
        found: list[Tensor | None] = [None, None, None]
        for place, error in zip(self._places, errors, strict=True):
            found[place] = error
        rows = gate_rows(self.module, self.x, self.state, GradsOfOutputs(*found), self.output)
        return [MapRows(i, key, error) for i, (key, error) in enumerate(rows)]

    def shape(self, output: Tensor) -> Tensor:
        """What the gates see, time first: (time, batch, d)."""
        return output.unflatten(0, self.inputs()[0].rows.shape[:2])


class RecurrentKind(AfterForward):
    """One map for each layer and direction (a GRU has two)."""

    name, batch_dim = "recurrent", 1

    def maps(self, module: nn.Module) -> Sequence[LinearMap]:
        """Its maps; the name of the only one is the module's own."""
        assert isinstance(module, nn.RNNBase)
        maps = gate_maps(module)
        return [
            LinearMap(
                tuple((name, getattr(module, name).shape[1]) for name in each.weights),
                each.biases,
                each.d_in,
                each.d_out,
                name="" if len(maps) == 1 else each.name,
            )
            for each in maps
        ]

    def refusal(self, module: nn.Module) -> str | None:
        """Dropout between the layers leaves no trace."""
        return refusal(module)

    def call(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> CallAndPoints | None:
        """Its inputs and its outputs."""
        assert isinstance(module, nn.RNNBase)
        outputs = _tensors(output)
        places = [i for i, tensor in enumerate(outputs) if tensor.requires_grad]
        if not places:
            return None
        x, state = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "hx")
        return RecurrentCall(module, x, state, output[0], places), [_point(outputs[i]) for i in places]


def _tensors(output: Any) -> list[Tensor]:
    """What the module returned: its outputs, h_n, and c_n of an LSTM."""
    sequence, last = output
    sequence = sequence.data if isinstance(sequence, PackedSequence) else sequence
    return [sequence, *(last if isinstance(last, tuple) else (last,))]


def _point(output: Tensor) -> ErrorPoint:
    """Where the error of an output shows in the shape that it was returned in."""
    assert output.grad_fn is not None
    return ErrorPoint(output.grad_fn, output.output_nr)


def _held(value: Any) -> Any:
    """What a call saw, in memory of its own: users carry states over and change them in place."""
    if isinstance(value, PackedSequence):
        return value._replace(data=value.data.detach().clone())
    if isinstance(value, tuple | list):
        return tuple(_held(each) for each in value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
