"""The gates of nn.RNN, nn.LSTM and nn.GRU, computed from outside, agree with autograd inside of them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from helpers import EXACT
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from dualform.errors import UnsupportedLayer
from dualform.record.layers.recurrent_math import GradsOfOutputs, gate_inputs, gate_maps, gate_rows, refusal

KINDS: dict[str, tuple[type[nn.RNN | nn.LSTM | nn.GRU], dict[str, Any]]] = {
    "RNN of tanh": (nn.RNN, {}),
    "RNN of relu": (nn.RNN, {"nonlinearity": "relu"}),
    "LSTM": (nn.LSTM, {}),
    "LSTM with projection": (nn.LSTM, {"proj_size": 2}),
    "GRU": (nn.GRU, {}),
}
FORMS = ["time first", "batch first", "one sequence", "packed, longest first", "packed in any order"]
PLACES = ["output", "h", "c"]
LOSSES = [
    (kind, loss)
    for kind in KINDS
    for n in (1, 2, 3)
    for loss in combinations(PLACES, n)
    if "LSTM" in kind or "c" not in loss
]

every_kind, every_form = pytest.mark.parametrize("kind", KINDS), pytest.mark.parametrize("form", FORMS)


@dataclass
class Run:
    """A module, what it was given, and what autograd says about a loss on its outputs."""

    module: nn.RNNBase
    x: Tensor | PackedSequence
    state: Any
    output: Tensor | PackedSequence
    grads: GradsOfOutputs
    wanted: dict[str, Tensor]
    lengths: list[int]

    def rows(self, **changes: Any) -> list[tuple[Tensor, Tensor]]:
        return gate_rows(self.module, self.x, self.state, replace(self.grads, **changes))


def run(
    kind: str, form: str = "time first", *, loss: Iterable[str] = PLACES, steps: int = 5, batch: int = 3, d: int = 3,
    hidden: int = 4, given: bool = True, seed: int = 0, dtype: torch.dtype = torch.float64, **settings: Any,
) -> Run:  # fmt: skip
    torch.manual_seed(seed)
    make, own = KINDS[kind]
    module = make(d, hidden, batch_first=form == "batch first", dtype=dtype, **own, **settings)
    batch = 1 if form == "one sequence" else batch
    lengths = [steps] * batch
    x, state = torch.randn(steps, batch, d, dtype=dtype), first_state(module, batch, dtype) if given else None
    if form.startswith("packed"):
        lengths = [steps, *torch.randint(1, steps + 1, (batch - 1,)).tolist()]
        lengths = sorted(lengths, reverse=True) if "longest" in form else lengths[::-1]
        x = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted="longest" in form)
    elif form == "one sequence":
        x, state = x.squeeze(1), squeezed(state)
    elif form == "batch first":
        x = x.transpose(0, 1).contiguous()
    return outcome(module, x, state, loss, lengths)


def outcome(module: nn.RNNBase, x: Any, state: Any, loss: Iterable[str], lengths: list[int]) -> Run:
    output, last = module(x, state)
    outputs = dict(zip(PLACES, [data_of(output), *(last if isinstance(last, tuple) else [last])], strict=False))
    value = sum((torch.randn_like(at) * at.sin()).sum() for name, at in outputs.items() if name in set(loss))
    assert isinstance(value, Tensor)
    weights = dict(module.named_parameters())
    grads = torch.autograd.grad(value, [*weights.values(), *outputs.values()], allow_unused=True)
    of_weights, of_outputs = grads[: len(weights)], grads[len(weights) :]
    wanted = {n: torch.zeros_like(w) if g is None else g for (n, w), g in zip(weights.items(), of_weights, strict=True)}
    return Run(module, x, state, output, GradsOfOutputs(*of_outputs), wanted, lengths)


def first_state(module: nn.RNNBase, batch: int, dtype: torch.dtype) -> Any:
    strands = module.num_layers * (2 if module.bidirectional else 1)
    h = torch.randn(strands, batch, module.proj_size or module.hidden_size, dtype=dtype)
    return (h, torch.randn(strands, batch, module.hidden_size, dtype=dtype)) if module.mode == "LSTM" else h


def squeezed(state: Any) -> Any:
    return tuple(s.squeeze(1) for s in state) if isinstance(state, tuple) else state if state is None else state[:, 0]


def data_of(rows: Tensor | PackedSequence) -> Tensor:
    return rows.data if isinstance(rows, PackedSequence) else rows


def farthest(ran: Run, rows: list[tuple[Tensor, Tensor]]) -> float:
    """How far the rows are from the gradients of all weights and biases, relative to each: the most."""
    gradients = {}
    for gates, (keys, errors) in zip(gate_maps(ran.module), rows, strict=True):
        assert keys.shape == (max(ran.lengths), len(ran.lengths), gates.d_in)
        assert errors.shape == (max(ran.lengths), len(ran.lengths), gates.d_out)
        gradient = errors.flatten(0, 1).mT @ keys.flatten(0, 1)
        widths = [ran.wanted[name].shape[1] for name in gates.weights]
        gradients |= dict(zip(gates.weights, gradient.split(widths, dim=1), strict=True))
        gradients |= dict.fromkeys(gates.biases, errors.sum((0, 1)))
    assert gradients.keys() == ran.wanted.keys(), "each parameter belongs to one map"
    gaps = [(gradients[name] - wanted).abs().max() / (wanted.abs().max() or 1) for name, wanted in ran.wanted.items()]
    return float(max(gaps))


# ---------------------------------------------------------------- exactness


@every_kind
@every_form
def test_errors_times_keys_are_the_gradients_of_all_weights_and_errors_those_of_the_biases(kind, form):
    for layers, bidirectional, bias, given_state in product([1, 2], [False, True], [True, False], [True, False]):
        settings = {"num_layers": layers, "bidirectional": bidirectional, "bias": bias}
        ran = run(kind, form, given=given_state, **settings)
        assert farthest(ran, ran.rows()) <= EXACT, f"{settings}, state given: {given_state}"


@pytest.mark.parametrize(("kind", "loss"), LOSSES, ids=str)
@pytest.mark.parametrize("form", ["time first", "packed in any order"])
def test_the_loss_may_look_at_any_of_the_outputs(kind, loss, form):
    for bidirectional in (False, True):
        ran = run(kind, form, loss=loss, num_layers=2, bidirectional=bidirectional)
        assert tuple(place for place in PLACES if getattr(ran.grads, place) is not None) == loss
        assert farthest(ran, ran.rows()) <= EXACT


@given(
    kind=st.sampled_from(list(KINDS)), form=st.sampled_from(FORMS), steps=st.integers(1, 7), batch=st.integers(1, 5),
    d=st.integers(1, 4), hidden=st.integers(3, 5), num_layers=st.integers(1, 3), bidirectional=st.booleans(),
    bias=st.booleans(), given=st.booleans(), loss=st.sets(st.sampled_from(PLACES)), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_sizes_settings_and_lengths_make_no_difference(kind, form, loss, **settings):
    ran = run(kind, form, loss=loss | {"h"}, **settings)
    rows = ran.rows()
    assert farthest(ran, rows) <= EXACT
    again = gate_rows(ran.module, ran.x, ran.state, ran.grads, ran.output)
    for (key, error), (same_key, same_error) in zip(rows, again, strict=True):
        torch.testing.assert_close(key, same_key)
        torch.testing.assert_close(error, same_error)


@every_kind
def test_without_gradients_there_are_no_errors(kind):
    ran = run(kind, num_layers=2, bidirectional=True)
    for keys, errors in ran.rows(output=None, h=None, c=None):
        assert keys.any()
        assert not errors.any()


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_state_that_is_carried_over_is_the_first_key_of_the_next_segment(kind):
    first = run(kind)
    state = first.module(first.x, first.state)[1]
    state = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
    second = outcome(first.module, first.x, state, ["output"], first.lengths)
    assert farthest(second, second.rows()) <= EXACT
    hidden = gate_inputs(second.module, second.x, state)[-1][0, :, :4]
    torch.testing.assert_close(hidden, state[0][0] if isinstance(state, tuple) else state[0])


# ---------------------------------------------------------------- rows and their examples


@every_kind
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("form", ["time first", "packed, longest first", "packed in any order"])
def test_the_rows_of_an_example_are_those_it_has_alone_and_zero_after_its_end(kind, form, bidirectional):
    ran = run(kind, form, batch=5, num_layers=2, bidirectional=bidirectional)
    rows, alone = ran.rows(), run(kind, "one sequence", num_layers=2, bidirectional=bidirectional).module
    alone.load_state_dict(ran.module.state_dict())
    xs, grads = (one_by_one(ran, rows) for rows in (data_of(ran.x), ran.grads.output))
    for b, length in enumerate(ran.lengths):
        state = tuple(s[:, b] for s in ran.state) if isinstance(ran.state, tuple) else ran.state[:, b]
        h, c = (None if grad is None else grad[:, b] for grad in (ran.grads.h, ran.grads.c))
        expected = gate_rows(alone, xs[b], state, GradsOfOutputs(grads[b], h, c))
        for batched, single in zip(rows, expected, strict=True):
            for tensor, tensor_alone in zip(batched, single, strict=True):
                torch.testing.assert_close(tensor[:length, b], tensor_alone[:, 0], rtol=EXACT, atol=EXACT)
                assert not tensor[length:, b].any()


def one_by_one(ran: Run, data: Tensor | None) -> list[Tensor]:
    """The sequences of a batch, each with its own length, in the user's order; the slow way."""
    assert data is not None
    if not isinstance(ran.x, PackedSequence):
        return [data[:length, b] for b, length in enumerate(ran.lengths)]
    ranks = range(len(ran.lengths)) if ran.x.unsorted_indices is None else ran.x.unsorted_indices.tolist()
    begins = [0, *ran.x.batch_sizes.cumsum(0).tolist()]
    return [torch.stack([data[begins[t] + rank] for t in range(n)]) for rank, n in zip(ranks, ran.lengths, strict=True)]


@every_kind
@every_form
def test_gate_inputs_are_the_keys_of_gate_rows(kind, form):
    ran = run(kind, form, num_layers=2, bidirectional=True)
    for output in (None, ran.output):
        inputs = gate_inputs(ran.module, ran.x, ran.state, output)
        for key, (key_of_rows, _) in zip(inputs, ran.rows(), strict=True):
            torch.testing.assert_close(key, key_of_rows)


def test_the_key_of_an_lstm_is_the_state_before_beside_the_input():
    ran = run("LSTM", "time first")
    (key,) = gate_inputs(ran.module, ran.x, ran.state)
    before = torch.cat([ran.state[0], data_of(ran.output)[:-1].detach()])
    torch.testing.assert_close(key, torch.cat([before, data_of(ran.x)], dim=2))


def test_maps_are_named_after_their_layer_direction_and_side():
    def names(kind: str, **settings: Any) -> list[str]:
        return [gate_map.name for gate_map in gate_maps(run(kind, **settings).module)]

    assert names("LSTM", num_layers=2, bidirectional=True) == ["l0", "l0_reverse", "l1", "l1_reverse"]
    assert names("LSTM with projection", num_layers=2) == ["l0", "l0.projection", "l1", "l1.projection"]
    assert names("GRU", bidirectional=True) == ["l0.input", "l0.hidden", "l0_reverse.input", "l0_reverse.hidden"]
    assert names("RNN of relu") == ["l0"]
    lstm, gru = gate_maps(run("LSTM").module)[0], gate_maps(run("GRU", bias=False).module)[1]
    assert (lstm.weights, lstm.biases) == (("weight_hh_l0", "weight_ih_l0"), ("bias_hh_l0", "bias_ih_l0"))
    assert (gru.weights, gru.biases, gru.d_in, gru.d_out) == (("weight_hh_l0",), (), 4, 12)


# ---------------------------------------------------------------- what is left as it was


@every_kind
@pytest.mark.parametrize("form", ["time first", "packed in any order"])
def test_computing_the_rows_changes_nothing_in_the_module(kind, form):
    ran = run(kind, form, num_layers=2, bidirectional=True)
    ran.module.register_forward_hook(lambda *_: pytest.fail("the module was called"))
    tensors = [data_of(ran.x), data_of(ran.output), *ran.module.parameters()]
    tensors += [grad for grad in (ran.grads.output, ran.grads.h, ran.grads.c) if grad is not None]
    tensors += ran.state if isinstance(ran.state, tuple) else [ran.state]
    before, random = [(tensor.clone(), tensor._version) for tensor in tensors], torch.get_rng_state()
    rows = gate_rows(ran.module, ran.x, ran.state, ran.grads, ran.output)
    assert torch.equal(random, torch.get_rng_state())
    for tensor, (value, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, value)
        assert tensor._version == version
    assert all(weight.grad is None for weight in ran.module.parameters())
    assert not any(tensor.requires_grad for row in rows for tensor in row)


# ---------------------------------------------------------------- precision


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # torch's own way round it
@every_kind
@pytest.mark.parametrize(
    ("dtype", "bar"), [(torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)], ids=str
)
def test_lower_precision_costs_digits_and_rows_have_float32(kind, dtype, bar):
    """The bar is some units in the last place of the gradients that torch itself computes in that precision."""
    ran = run(kind, dtype=dtype, num_layers=2, bidirectional=True)
    rows = gate_rows(ran.module, ran.x, ran.state, ran.grads, ran.output)
    assert {tensor.dtype for row in rows for tensor in row} == {torch.float32}
    assert farthest(ran, rows) <= bar


@pytest.mark.parametrize("kind", ["RNN of tanh", "LSTM", "GRU"])
def test_autocast_costs_the_digits_of_its_forward_only(kind):
    torch.manual_seed(0)
    module, x = KINDS[kind][0](3, 4), torch.randn(5, 3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ran = outcome(module, x.bfloat16() if kind == "LSTM" else x, None, ["output", "h"], [5] * 3)
        inside = ran.rows()
    assert farthest(ran, inside) <= 5e-2  # bfloat16 has 8 bits
    for row, same in zip(inside, ran.rows(), strict=True):
        assert all(torch.equal(a, b) and a.dtype is torch.float32 for a, b in zip(row, same, strict=True))


# ---------------------------------------------------------------- refusals


def test_dropout_between_layers_is_rejected_in_training_mode():
    module = nn.LSTM(3, 4, num_layers=2, dropout=0.25)
    message = refusal(module)
    assert message is not None
    for part in ("dropout=0.25", "dropout=0 ", "nn.Dropout"):
        assert part in message
    with pytest.raises(UnsupportedLayer, match=r"dropout=0\.25"):
        gate_inputs(module, torch.randn(5, 2, 3))
    assert refusal(module.eval()) is None
    assert len(gate_inputs(module, torch.randn(5, 2, 3))) == 2


@pytest.mark.filterwarnings("ignore:dropout option adds dropout after all but last")
def test_modules_without_active_dropout_are_not_rejected():
    for module in (nn.RNN(3, 4), nn.LSTM(3, 4, dropout=0.5), nn.GRU(3, 4, num_layers=2)):
        assert refusal(module) is None


class Own(nn.RNN):
    def forward(self, input: Any, hx: Any = None) -> Any:
        return super().forward(2 * input, hx)


def test_a_subclass_with_its_own_forward_is_rejected():
    patched = nn.GRU(3, 4)
    vars(patched)["forward"] = lambda x: x
    for module in (Own(3, 4), patched, nn.LSTMCell(3, 4), nn.Linear(3, 4)):
        message = refusal(module)
        assert message is not None
        assert type(module).__name__ in message
        assert "forward of its own" in message


# ---------------------------------------------------------------- negative controls


@every_kind
@pytest.mark.parametrize("form", ["time first", "packed in any order"])
def test_a_missing_gradient_or_a_shift_in_time_is_seen(kind, form):
    ran = run(kind, form, num_layers=2, bidirectional=True)
    for place in PLACES:
        if getattr(ran.grads, place) is not None:
            assert farthest(ran, ran.rows(**{place: None})) > 1e-3
    assert farthest(ran, [(keys.roll(1, 0), errors) for keys, errors in ran.rows()]) > 1e-3
    assert farthest(ran, [(keys.roll(1, 1), errors) for keys, errors in ran.rows()]) > 1e-3


def test_the_two_sides_of_a_gru_do_not_share_their_errors():
    ran = run("GRU")
    (x, outer), (h, inner) = ran.rows()
    assert farthest(ran, [(x, outer), (h, inner)]) <= EXACT
    assert farthest(ran, [(x, outer), (h, outer)]) > 1e-3
    assert farthest(ran, [(x, inner), (h, inner)]) > 1e-3
