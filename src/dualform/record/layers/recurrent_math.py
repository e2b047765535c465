r"""``nn.RNN``, ``nn.LSTM``, ``nn.GRU``: the linear maps behind the gates, computed from what a fused kernel exposes.

The kernel exposes its input, its first state, its output, and the gradients that arrive at ``output``, ``h_n`` and
``c_n``. That is enough: a state is the input of the next step, so one product gives the gates of all steps, and one
pass backwards through time gives the gradients δ at their pre-activations z.

.. math:: z_t = [W_{hh}\ W_{ih}]\,[h_{t-1}; x_t] + b_{hh} + b_{ih},\qquad
    \frac{\partial L}{\partial [W_{hh}\ W_{ih}]} = \sum_t \delta_t\, [h_{t-1}; x_t]^\top,\qquad
    \frac{\partial L}{\partial b_{hh}} = \frac{\partial L}{\partial b_{ih}} = \sum_t \delta_t

The key is :math:`[h_{t-1}; x_t]`, the error :math:`\delta_t`. A GRU multiplies a part of its hidden side by a gate, so
its two sides have different errors and are two maps. A projection (``proj_size``) is a separate map.

In this file the time axis comes first, a batch is in the user's order, and sequences of different lengths are padded
with zeros after their end to a rectangle. A *strand* is one layer in one direction.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from dualform.errors import UnsupportedLayer

Sequences = Tensor | PackedSequence
RecurrentState = Tensor | tuple[Tensor, Tensor] | None
TimeRows = Float[Tensor, "t b _"]

# (g, y) to g·y·(1 − y) and to g·(1 − y²): the gradient at z, given the gradient g at y = σ(z) or y = tanh(z)
sigmoid_backward, tanh_backward = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward


@dataclass(frozen=True)
class GateMap:
    """One linear map inside a recurrent module."""

    name: str
    """``l0``, ``l0_reverse``, ``l1``, …; of a GRU ``l0.input`` and ``l0.hidden``; of a projection ``l0.projection``."""
    weights: tuple[str, ...]
    """The attributes that are its weight, in the order of the key's columns."""
    biases: tuple[str, ...]
    """The attributes that are added to its output: the gradient of each is the sum of the errors."""
    d_in: int
    d_out: int


@dataclass(frozen=True, eq=False)
class GradsOfOutputs:
    """The gradients that arrived at the module's outputs, in their shapes; None where none arrived.

    For a packed output this is the gradient of ``PackedSequence.data``.
    """

    output: Tensor | None = None
    h: Tensor | None = None
    c: Tensor | None = None


def refusal(module: nn.Module) -> str | None:
    """Why this module cannot be recorded as it is now, as the end of a sentence; None where it can."""
    if not isinstance(module, nn.RNNBase) or type(module).forward not in FORWARDS or "forward" in vars(module):
        return (
            f"runs a forward of its own ({type(module).__module__}.{type(module).__qualname__}), so its gates are not "
            "known. Use nn.RNN, nn.LSTM or nn.GRU as they are."
        )
    if module.dropout > 0 and module.num_layers > 1 and module.training:
        return (
            f"applies dropout between its layers (dropout={module.dropout}, num_layers={module.num_layers}), and its "
            "fused kernel does not expose the masks. Set dropout=0 between the layers, or split it into single-layer "
            "modules with nn.Dropout between them."
        )
    return None


def gate_maps(module: nn.RNNBase) -> tuple[GateMap, ...]:
    """The linear maps of a module: layer by layer, the forward direction first, each projection after its gates."""
    hidden, visible = module.hidden_size, module.proj_size or module.hidden_size
    maps = []
    for layer in range(module.num_layers):
        names = _strand_names(module, layer)
        d_in = visible * len(names) if layer else module.input_size
        for name in names:
            ih, hh = (f"weight_ih_{name}",), (f"weight_hh_{name}",)
            b_ih, b_hh = ((f"bias_ih_{name}",), (f"bias_hh_{name}",)) if module.bias else ((), ())
            if module.mode == "GRU":
                maps.append(GateMap(f"{name}.input", ih, b_ih, d_in, 3 * hidden))
                maps.append(GateMap(f"{name}.hidden", hh, b_hh, hidden, 3 * hidden))
            else:
                gates = 4 if module.mode == "LSTM" else 1
                maps.append(GateMap(name, hh + ih, b_hh + b_ih, visible + d_in, gates * hidden))
            if module.proj_size:
                maps.append(GateMap(f"{name}.projection", (f"weight_hr_{name}",), (), hidden, visible))
    return tuple(maps)


@torch.no_grad()
def gate_inputs(
    module: nn.RNNBase, x: Sequences, state: RecurrentState = None, output: Sequences | None = None
) -> list[TimeRows]:  # fmt: skip
    """The keys of each map, in the order of ``gate_maps``: as in ``gate_rows``, without the backward pass."""
    call = _Call(module, x, state)
    with torch.autocast(call.device.type, enabled=False):
        return [key for strands in call.layers(output) for strand in strands for key in strand.keys]


@torch.no_grad()
def gate_rows(
    module: nn.RNNBase, x: Sequences, state: RecurrentState, grads: GradsOfOutputs, output: Sequences | None = None
) -> list[tuple[TimeRows, TimeRows]]:  # fmt: skip
    """Keys and errors of each map, in the order of ``gate_maps``: errorsᵀ·keys is the gradient of its weights.

    ``x`` and ``state`` are the arguments of the call, and the module's weights must be unchanged since. ``output`` is
    what the call returned: with it, the last layer need not run again. All rows are (time, batch, d) in the order of
    the user's batch, zero where a sequence has ended, in float32 or better. Keys may share their memory with ``x``.
    """
    call = _Call(module, x, state)
    with torch.autocast(call.device.type, enabled=False):
        dh = None if grads.output is None else call.rectangle(grads.output)
        dh_n, dc_n = (None if grad is None else call.stack(grad) for grad in (grads.h, grads.c))
        rows: list[tuple[TimeRows, TimeRows]] = []
        for layer, strands in reversed(list(enumerate(call.layers(output)))):
            layer_rows, below = [], None
            for direction, strand in enumerate(strands):
                part = None if dh is None else dh.chunk(len(strands), dim=2)[direction]
                place = layer * len(strands) + direction
                errors = strand.errors(strand.arriving(part, _at(dh_n, place)), _at(dc_n, place))
                layer_rows += zip(strand.keys, errors, strict=True)
                if layer > 0:
                    dx = errors[0] @ strand.w_ih  # the first map of a strand multiplies its input
                    below = dx if below is None else below + dx
            rows, dh = layer_rows + rows, below
    return rows


class _Call:
    """One call of a module: its arguments, brought from the user's shapes to rectangles."""

    def __init__(self, module: nn.RNNBase, x: Sequences, state: RecurrentState) -> None:
        if reason := refusal(module):
            raise UnsupportedLayer(f"{type(module).__name__} {reason}")
        self.module, self.packed = module, x if isinstance(x, PackedSequence) else None
        data, weight = _data(x), next(module.parameters())
        self.device, self.batched = data.device, self.packed is not None or data.ndim == 3
        self.dtype = torch.promote_types(torch.promote_types(data.dtype, weight.dtype), torch.float32)
        self.x, self.ended = self.rectangle(x), None if self.packed is None else _ended(self.packed)
        h, c = (state, None) if state is None or isinstance(state, Tensor) else state
        self.h = self._zeros(module.proj_size or module.hidden_size) if h is None else self.stack(h)
        self.c = self._zeros(module.hidden_size) if c is None else self.stack(c)

    def rectangle(self, rows: Sequences) -> TimeRows:
        """Bring inputs, outputs, or gradients of them from the module's shape to a rectangle."""
        data = self.cast(_data(rows))
        if self.packed is not None:
            return pad_packed_sequence(self.packed._replace(data=data))[0]
        if not self.batched:
            return data.unsqueeze(1)
        return data.transpose(0, 1) if self.module.batch_first else data

    def stack(self, state: Tensor) -> Float[Tensor, "strands b _"]:
        """Bring a state, or its gradient, to one matrix per layer and direction."""
        return self.cast(state if self.batched else state.unsqueeze(1))

    def cast(self, tensor: Tensor) -> Tensor:
        """Detach a tensor, and bring it to the precision of this computation."""
        return tensor.detach().to(self.dtype)

    def layers(self, output: Sequences | None) -> Iterator[list["_Strand"]]:
        """The strands of each layer, from the first layer to the last."""
        module, x, last = self.module, self.x, self.module.num_layers - 1
        kernel_rows = x if self.packed is None else self.cast(self.packed.data)  # in the layout of the kernel
        for layer in range(module.num_layers):
            names = _strand_names(module, layer)
            weights = [self._weights(name) for name in names]
            if layer == last and output is not None:
                h = self.rectangle(output)
            else:
                flat_weights = [weight for strand in weights for weight in strand.values()]
                kernel_rows = self._run(kernel_rows, layer, flat_weights)
                h = kernel_rows if self.packed is None else self.rectangle(kernel_rows)
            parts = enumerate(h.chunk(len(names), dim=2), start=layer * len(names))
            yield [
                STRANDS[module.mode](
                    x, part, self.h[place], self.c[place], self.ended, name.endswith("_reverse"), **weight
                )
                for name, weight, (place, part) in zip(names, weights, parts, strict=True)
            ]
            x = h

    def _run(self, rows: Tensor, layer: int, weights: list[Tensor]) -> Tensor:
        """Compute the output of one layer with the fused kernel itself: calling the module would fire its hooks."""
        module = self.module
        count = len(_strand_names(module, layer))
        states = [self.h, self.c] if module.mode == "LSTM" else [self.h]
        states = [state[layer * count : (layer + 1) * count] for state in states]
        if self.packed is not None and self.packed.sorted_indices is not None:
            states = [state.index_select(1, self.packed.sorted_indices) for state in states]
        state = tuple(states) if module.mode == "LSTM" else states[0]
        options = (weights, module.bias, 1, 0.0, False, module.bidirectional)
        with _not_one_chunk(self.device):
            if self.packed is None:
                return KERNELS[module.mode](rows, state, *options, False)[0]
            return KERNELS[module.mode](rows, self.packed.batch_sizes, state, *options)[0]

    def _weights(self, name: str) -> dict[str, Tensor]:
        """The weights of one strand, in the kernel's order."""
        kinds = [("w_ih", "weight_ih"), ("w_hh", "weight_hh")]
        kinds += [("b_ih", "bias_ih"), ("b_hh", "bias_hh")] if self.module.bias else []
        kinds += [("w_hr", "weight_hr")] if self.module.proj_size else []
        return {short: self.cast(getattr(self.module, f"{kind}_{name}")) for short, kind in kinds}

    def _zeros(self, width: int) -> Float[Tensor, "strands b _"]:
        strands = self.module.num_layers * (2 if self.module.bidirectional else 1)
        return self.x.new_zeros(strands, self.x.shape[1], width)


@dataclass(frozen=True, eq=False)
class _Strand:
    """One layer in one direction: its input x, its output h, and the states h0 and c0 before the first step."""

    x: Float[Tensor, "t b d"]
    h: Float[Tensor, "t b p"]
    h0: Float[Tensor, "b p"]
    c0: Float[Tensor, "b H"]
    ended: Bool[Tensor, "t b 1"] | None
    reverse: bool
    w_ih: Float[Tensor, "z d"]
    w_hh: Float[Tensor, "z p"]
    b_ih: Float[Tensor, " z"] | None = None
    b_hh: Float[Tensor, " z"] | None = None
    w_hr: Float[Tensor, "p H"] | None = None

    @property
    def keys(self) -> list[TimeRows]:
        """The keys of the strand's maps."""
        raise NotImplementedError

    def errors(self, dh: Float[Tensor, "t b p"], dc: Float[Tensor, "b H"] | None) -> list[TimeRows]:
        """The errors of the strand's maps, given the gradients at its outputs and at its last c. Changes ``dh``."""
        raise NotImplementedError

    @property
    def times(self) -> range:
        """The time steps in the order of the computation."""
        steps = range(len(self.x))
        return steps[::-1] if self.reverse else steps

    @cached_property
    def before(self) -> Float[Tensor, "t b p"]:
        """h_{t−1}. In reverse, the last step of each sequence comes first, and the state before it is h0."""
        if not self.reverse:
            return self._only_running(torch.cat([self.h0.unsqueeze(0), self.h[:-1]]))
        h = self.h if self.ended is None else torch.where(self.ended, self.h0, self.h)
        return self._only_running(torch.cat([h[1:], self.h0.unsqueeze(0)]))

    @cached_property
    def both(self) -> TimeRows:
        """[h_{t−1}; x_t], for maps whose two sides have the same error."""
        return torch.cat([self.before, self.x], dim=2)

    def arriving(self, dh: Float[Tensor, "t b p"] | None, dh_n: Float[Tensor, "b p"] | None) -> Float[Tensor, "t b p"]:
        """The gradient at each output from outside this layer; that of the last state is added to the last output."""
        dh = torch.zeros_like(self.h) if dh is None else dh.clone(memory_format=torch.contiguous_format)
        if dh_n is not None and (self.reverse or self.ended is None):
            dh[self.times[-1]] += dh_n
        elif dh_n is not None and self.ended is not None:
            last = (~self.ended).sum(0).squeeze(1) - 1
            dh[last, torch.arange(len(last), device=last.device)] += dh_n
        return dh

    def _only_running(self, rows: TimeRows) -> TimeRows:
        return rows if self.ended is None else rows.masked_fill_(self.ended, 0)


class _RNN(_Strand):
    r"""Elman's network.

    .. math:: h_t = \varphi(z_t),\quad \delta_t = \varphi'(z_t)\, dh_t,\quad dh_{t-1} \mathrel{+}= W_{hh}^\top \delta_t
    """

    @property
    def keys(self) -> list[TimeRows]:
        """[h_{t−1}; x_t]."""
        return [self.both]

    @property
    def slope(self) -> Float[Tensor, "t b p"]:
        """φ′, from φ = tanh."""
        return 1 - self.h * self.h

    def errors(self, dh: Float[Tensor, "t b p"], dc: Tensor | None) -> list[TimeRows]:
        """The gradients δ."""
        delta = self._only_running(self.slope)
        later = None
        for t in reversed(self.times):
            if later is not None:
                dh[t].addmm_(later, self.w_hh)
            later = delta[t].mul_(dh[t])
        return [delta]


class _ReluRNN(_RNN):
    """Elman's network with φ = relu."""

    @property
    def slope(self) -> Float[Tensor, "t b p"]:
        """φ′, from φ = relu."""
        return (self.h > 0).to(self.h.dtype)


class _LSTM(_Strand):
    r"""Long short-term memory.

    .. math:: i, f, o = \sigma(z^{i,f,o}),\quad g = \tanh(z^g),\quad c_t = f c_{t-1} + i g,\quad
        m_t = o \tanh(c_t),\quad h_t = W_{hr} m_t \text{ or } m_t

    .. math:: dm_t = W_{hr}^\top dh_t,\quad dc_t \mathrel{+}= o\,(1 - \tanh^2 c_t)\, dm_t,\quad
        \delta_t = (g\,i(1-i)\,dc_t,\ c_{t-1}\,f(1-f)\,dc_t,\ i\,(1-g^2)\,dc_t,\ \tanh(c_t)\,o(1-o)\,dm_t)

    .. math:: dc_{t-1} = f\,dc_t,\qquad dh_{t-1} \mathrel{+}= W_{hh}^\top \delta_t
    """

    @property
    def keys(self) -> list[TimeRows]:
        """[h_{t−1}; x_t], and m_t if there is a projection."""
        return [self.both] if self.w_hr is None else [self.both, self.gates[:, :, 3] * self.squashed]

    @cached_property
    def gates(self) -> Float[Tensor, "t b 4 H"]:
        """i, f, g, o of all steps. Where a sequence has ended, f = 1 and i = o = 0, so that c stays as it is."""
        bias = None if self.b_ih is None or self.b_hh is None else self.b_ih + self.b_hh
        gates = F.linear(self.both, torch.cat([self.w_hh, self.w_ih], dim=1), bias).unflatten(2, (4, -1))
        gates[:, :, :2].sigmoid_()
        gates[:, :, 2].tanh_()
        gates[:, :, 3].sigmoid_()
        if self.ended is not None:
            gates[:, :, [0, 3]] = gates[:, :, [0, 3]].masked_fill(self.ended.unsqueeze(3), 0)
            gates[:, :, 1].masked_fill_(self.ended, 1)
        return gates

    @cached_property
    def cells(self) -> tuple[Float[Tensor, "t b H"], Float[Tensor, "t b H"]]:
        """c_{t−1} and c_t."""
        i, f, g, _ = self.gates.unbind(2)
        cells = i.new_empty(len(i) + 1, *self.c0.shape)
        before, after = (cells[1:], cells[:-1]) if self.reverse else (cells[:-1], cells[1:])
        torch.mul(i, g, out=after)
        before[self.times[0]] = self.c0
        for t in self.times:
            after[t].addcmul_(f[t], before[t])
        return before, after

    @cached_property
    def squashed(self) -> Float[Tensor, "t b H"]:
        """tanh(c_t)."""
        return self.cells[1].tanh()

    def errors(self, dh: Float[Tensor, "t b p"], dc: Float[Tensor, "b H"] | None) -> list[TimeRows]:
        """The gradients δ, and dh if there is a projection."""
        i, f, g, o = self.gates.unbind(2)
        delta = torch.empty_like(self.gates)
        sigmoid_backward.grad_input(g, i, grad_input=delta[:, :, 0])
        sigmoid_backward.grad_input(self.cells[0], f, grad_input=delta[:, :, 1])
        tanh_backward.grad_input(i, g, grad_input=delta[:, :, 2])
        sigmoid_backward.grad_input(self.squashed, o, grad_input=delta[:, :, 3])
        to_c, to_z, at_h, keep = (rows.unbind() for rows in (tanh_backward(o, self.squashed), delta, dh, f))
        dc, later = torch.zeros_like(self.c0) if dc is None else dc.clone(), None
        for t in reversed(self.times):
            if later is not None:
                at_h[t].addmm_(later, self.w_hh)
            dm = at_h[t] if self.w_hr is None else at_h[t] @ self.w_hr
            dc.addcmul_(dm, to_c[t])
            to_z[t][:, :3].mul_(dc.unsqueeze(1))
            to_z[t][:, 3].mul_(dm)
            dc.mul_(keep[t])
            later = to_z[t].flatten(1)
        return [delta.flatten(2)] if self.w_hr is None else [delta.flatten(2), self._only_running(dh)]


class _GRU(_Strand):
    r"""Gated recurrent unit, with u the hidden side of the n-gate.

    .. math:: r, z = \sigma(\cdot),\quad u = W_{hn} h_{t-1} + b_{hn},\quad n = \tanh(W_{in} x_t + b_{in} + r u),\quad
        h_t = (1 - z)\, n + z\, h_{t-1}

    .. math:: \delta^n_t = (1-z)(1-n^2)\, dh_t,\quad \delta^r_t = u\,r(1-r)\,\delta^n_t,\quad
        \delta^z_t = (h_{t-1} - n)\,z(1-z)\,dh_t

    .. math:: dh_{t-1} \mathrel{+}= z\,dh_t + W_{hh}^\top (\delta^r_t, \delta^z_t, r\,\delta^n_t)

    The input side has the errors :math:`(\delta^r, \delta^z, \delta^n)`, the hidden side
    :math:`(\delta^r, \delta^z, r\,\delta^n)`.
    """

    @property
    def keys(self) -> list[TimeRows]:
        """x_t and h_{t−1}."""
        return [self.x, self.before]

    def errors(self, dh: Float[Tensor, "t b p"], dc: Tensor | None) -> list[TimeRows]:
        """The errors of the input side and of the hidden side."""
        outer = F.linear(self.x, self.w_ih, self.b_ih).unflatten(2, (3, -1))
        inner = F.linear(self.before, self.w_hh, self.b_hh).unflatten(2, (3, -1))
        r, z = (outer[:, :, :2] + inner[:, :, :2]).sigmoid_().unbind(2)
        n, u = torch.addcmul(outer[:, :, 2], r, inner[:, :, 2]).tanh_(), inner[:, :, 2]
        if self.ended is not None:
            z.masked_fill_(self.ended, 1)  # h stays as it is where a sequence has ended, whatever the other gates are
        to_n = tanh_backward(1 - z, n)
        delta = torch.stack([sigmoid_backward(to_n * u, r), sigmoid_backward(self.before - n, z), r * to_n], dim=2)
        later = None
        for t in reversed(self.times):
            if later is not None:
                s, rows = later
                dh[t].addmm_(rows, self.w_hh).addcmul_(dh[s], z[s])
            delta[t].mul_(dh[t].unsqueeze(1))
            later = t, delta[t].flatten(1)
        hidden = delta.flatten(2)
        return [torch.cat([hidden[:, :, : -n.shape[2]], dh * to_n], dim=2), hidden]


FORWARDS = (nn.RNN.forward, nn.LSTM.forward, nn.GRU.forward)
KERNELS: dict[str, Callable[..., Sequence[Tensor]]] = {
    "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu, "LSTM": torch.lstm, "GRU": torch.gru
}  # fmt: skip
STRANDS: dict[str, type[_Strand]] = {"RNN_TANH": _RNN, "RNN_RELU": _ReluRNN, "LSTM": _LSTM, "GRU": _GRU}


def _strand_names(module: nn.RNNBase, layer: int) -> list[str]:
    return [f"l{layer}", f"l{layer}_reverse"] if module.bidirectional else [f"l{layer}"]


def _ended(packed: PackedSequence) -> Bool[Tensor, "t b 1"]:
    """A mask of the entries of the rectangle after the end of their sequence."""
    running, _ = pad_packed_sequence(packed._replace(data=torch.ones_like(packed.data[:, :1], dtype=torch.bool)))
    return ~running


def _data(rows: Sequences) -> Tensor:
    return rows.data if isinstance(rows, PackedSequence) else rows


def _at(stack: Tensor | None, place: int) -> Tensor | None:
    return None if stack is None else stack[place]


@contextmanager
def _not_one_chunk(device: torch.device) -> Iterator[None]:
    """Silence cuDNN's advice to compact weights: one layer of several, or a cast of it, is never one chunk."""
    if device.type != "cuda":
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        yield
