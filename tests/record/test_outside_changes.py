"""What happens to the network outside of the recorded steps is marked, and is not taken for the memory's own."""

import warnings
from copy import deepcopy

import pytest
import torch
from helpers import assert_rebuilt, batches, mlp, state_of
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform.errors import DualformWarning, ModelMismatch

EXACT = 1e-12
DATA = batches(12, 4, 5, 3)
NAMES = {"0.weight", "0.bias", "2.weight", "2.bias"}
OPTIMISERS = {"SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9), "AdamW": lambda p: optim.AdamW(p, lr=1e-2)}


class Loop:
    """Twelve recorded steps; ``events[s]`` happens after step s, ``at_end`` when the loop is over, inside the with."""

    def __init__(self, path, optimiser="SGD", events=None, at_end=lambda loop: None, steps=12):
        self.model = mlp(5, 4, 3)
        self.optimizer = OPTIMISERS[optimiser](self.model.parameters())
        self.states = [state_of(self.model)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            recording = dualform.record(self.model, self.optimizer, path, dtype="float64", progress=False)
            with recording as self.tape:
                for step, (x, y) in enumerate(DATA[:steps], start=1):
                    F.cross_entropy(self.model(x), y).backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.states.append(state_of(self.model))
                    (events or {}).get(step, lambda loop: None)(self)
                at_end(self)
        assert all(issubclass(w.category, DualformWarning) for w in caught)
        self.memory = dualform.open(path)
        self.marks = {}
        for mark in self.memory.certificate.marks:
            self.marks.setdefault(mark.kind, {})[mark.name] = (mark.first_step, mark.times)

    def last(self) -> nn.Module:
        """The network as the last recorded step left it."""
        model = mlp(5, 4, 3)
        model.load_state_dict(self.states[self.memory.step])
        return model


# ---------------------------------------------------------------- modules and parameters


def replace_module(loop):
    torch.manual_seed(7)
    loop.model[2] = nn.Linear(4, 3, dtype=torch.float64)


def replace_module_and_train_it(loop):
    replace_module(loop)
    loop.optimizer.add_param_group({"params": list(loop.model[2].parameters())})


@pytest.mark.parametrize("event", [replace_module, replace_module_and_train_it])
def test_a_module_replaced_in_the_middle_is_marked_and_the_memory_does_not_pretend(event, tmp_path):
    loop = Loop(tmp_path, events={5: event})
    memory, x = loop.memory, DATA[0][0]
    assert loop.marks["replaced"] == {"2.weight": (6, 1), "2.bias": (6, 1)}
    assert memory.certificate["2.weight"] > 1 and memory.certificate["2.bias"] > 1
    assert not memory.is_of(loop.model)
    for ask in (memory.predict, memory.attend):
        with pytest.raises(ModelMismatch, match=r"'2\.weight' was replaced at step 6"):
            ask(loop.model, x)
    with pytest.raises(ModelMismatch, match=r"memory\.at\(5\)"):
        memory.weights()
    assert memory.check(loop.model, full=True, progress=False)["2.weight"] > 1e-3
    assert_close(memory.at(5).weights(progress=False), loop.states[5])


def test_a_module_replaced_after_the_last_step_is_marked(tmp_path):
    loop = Loop(tmp_path, at_end=replace_module)
    assert set(loop.marks["replaced"]) == {"2.weight", "2.bias"}
    assert not loop.memory.store.weights_kept_at(12)
    assert_close(loop.memory.at(11).weights(progress=False), loop.states[11])


def test_a_layer_that_joins_the_model_is_marked(tmp_path):
    def add(loop):
        loop.model.append(nn.Linear(3, 3, dtype=torch.float64))
        loop.optimizer.add_param_group({"params": list(loop.model[3].parameters())})

    loop = Loop(tmp_path, events={4: add})
    assert loop.marks["added"] == {"3.weight": (5, 2), "3.bias": (5, 2)}
    with pytest.raises(ModelMismatch, match=r"'3\.weight' was added at step 5"):
        loop.memory.predict(loop.model, DATA[0][0])
    assert_close(loop.memory.at(4).weights(progress=False), loop.states[4])


# ---------------------------------------------------------------- the optimiser


def clear(loop):
    loop.optimizer.state.clear()


def load_older(loop):
    loop.optimizer.load_state_dict(loop.kept)


def keep(loop):
    loop.kept = deepcopy(loop.optimizer.state_dict())


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("event", [clear, load_older])
def test_state_that_is_cleared_or_loaded_in_the_middle_is_marked(event, optimiser, tmp_path):
    loop = Loop(tmp_path, optimiser, events={3: keep, 6: event})
    assert loop.marks == {"state-changed": {name: (7, 1) for name in NAMES}}
    lost = event is load_older or optimiser == "AdamW"  # a step of SGD without momentum is as good as its first
    assert (loop.memory.certificate.worst > 1e-6) is lost


def test_state_that_is_loaded_as_it_was_is_no_change(tmp_path):
    loop = Loop(tmp_path, "AdamW", events={6: lambda loop: (keep(loop), load_older(loop))})
    assert not loop.marks
    assert_rebuilt(loop.memory, loop.model)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_an_optimiser_object_that_takes_over_is_marked_with_its_steps(optimiser, tmp_path):
    def take_over(loop):
        for group in loop.optimizer.param_groups:
            group["lr"] = group["lr"] / 2
        loop.recorded, loop.optimizer = loop.optimizer, OPTIMISERS[optimiser](loop.model.parameters())

    loop = Loop(tmp_path, optimiser, events={9: take_over})
    assert loop.memory.step == 9
    assert loop.marks == {"other-optimiser": {name: (10, 3) for name in NAMES}}
    (message, *_) = [mark.message for mark in loop.memory.certificate.marks]
    assert "Pass all optimisers to record" in message
    assert not loop.memory.store.weights_kept_at(9)
    assert_close(loop.memory.weights(progress=False), loop.states[9])
    assert loop.memory.certificate.worst < EXACT


def test_steps_that_are_no_optimisers_are_counted_by_their_backward_passes(tmp_path):
    def by_hand(loop):
        for x, y in DATA[:2]:
            F.cross_entropy(loop.model(x), y).backward()
            with torch.no_grad():
                for parameter in loop.model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None

    loop = Loop(tmp_path, at_end=by_hand)
    assert set(loop.marks["changed-at-end"]) == NAMES
    assert "2 backward passes since then" in loop.memory.certificate.marks[0].message


def test_a_wrapper_that_passes_steps_on_is_not_another_optimiser(tmp_path):
    class Wrapper(optim.Optimizer):
        def __init__(self, inner: optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
            return self.inner.step(closure)

    def wrap(loop):
        loop.optimizer = Wrapper(loop.optimizer)

    loop = Loop(tmp_path, events={3: wrap})
    assert loop.memory.step == 12 and not loop.marks


# ---------------------------------------------------------------- weights at the end


def load_best(loop):
    loop.model.load_state_dict(loop.states[4])


def load_average(loop):
    averaged = optim.swa_utils.AveragedModel(mlp(5, 4, 3))
    for state in loop.states:
        loop.model.load_state_dict(state)
        averaged.update_parameters(loop.model)
    loop.model.load_state_dict(averaged.module.state_dict())


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("event", [load_best, load_average])
def test_weights_that_are_loaded_at_the_end_are_no_part_of_the_memory(event, optimiser, tmp_path):
    loop = Loop(tmp_path, optimiser, at_end=event)
    assert loop.marks == {"changed-at-end": {name: (12, 1) for name in NAMES}}
    memory, x = loop.memory, DATA[0][0]
    assert not memory.store.weights_kept_at(12)
    assert not memory.is_of(loop.model)
    assert_close(memory.weights(progress=False), loop.states[12])
    last = loop.last()
    torch.testing.assert_close(memory.predict(loop.model, x, progress=False), last(x))
    torch.testing.assert_close(memory.attend(loop.model, x).output("2"), last(x))
    assert memory.check(last, full=True, progress=False).worst < EXACT
    assert memory.certificate.worst < EXACT
    assert memory.check(loop.model, full=True, progress=False).worst > 1e-2


def test_weights_that_are_swapped_in_while_the_tape_is_flushed_leave_no_trace(tmp_path):
    """As averaged weights are, for the time of an evaluation or a checkpoint."""

    def swap(loop):
        own = state_of(loop.model)
        loop.model.load_state_dict(loop.states[2])
        loop.tape.flush()
        loop.model.load_state_dict(own)

    loop = Loop(tmp_path, "AdamW", events={6: swap})
    assert not loop.marks
    assert_rebuilt(loop.memory, loop.model)
    assert_close(loop.memory.at(6).weights(progress=False), loop.states[6])


def assert_close(weights, state) -> None:
    for name, tensor in state.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-10, atol=1e-12)
