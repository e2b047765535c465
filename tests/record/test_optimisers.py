"""Whatever the settings of the optimiser, the slots and their coefficients are the weights."""

import pytest
import torch
from helpers import (
    EXACT,
    Run,
    assert_clean,
    assert_rebuilt,
    batches,
    clip,
    close,
    mlp,
    seeds,
    setups,
    sgd,
    sgd_settings,
    state_of,
    trained,
    whole,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform.errors import QueryError, UnsupportedOptimizer
from dualform.rules import Rule
from dualform.types import Transition

IMPLEMENTATIONS = [{}, {"foreach": False}, {"foreach": True}, {"fused": True}]


def assert_exact(run: Run) -> None:
    memory = run.memory
    assert_clean(memory)
    assert_rebuilt(memory, run.model)
    assert memory.step == len(run.states) - 1


@given(setup=setups())
def test_the_slots_make_up_the_weights_of_any_network_under_any_sgd(setup, tmp_path_factory):
    assert_exact(setup.run(tmp_path_factory.mktemp("memory")))


@given(settings=sgd_settings(), clipped=st.booleans(), seed=seeds)
def test_the_slots_make_up_the_weights_of_a_whole_model(settings, clipped, seed, tmp_path_factory):
    model = whole(seed)
    before = clip(model, 0.2) if clipped else lambda step: None
    data = batches(4, 4, 5, 3, seed=seed)
    path = tmp_path_factory.mktemp("memory")
    assert_exact(trained(path, model, optim.SGD(model.parameters(), **settings), data, before_step=before))


@given(implementation=st.sampled_from(IMPLEMENTATIONS), settings=sgd_settings(), tensor_lr=st.booleans(), seed=seeds)
def test_every_implementation_of_sgd_is_recorded(implementation, settings, tensor_lr, seed, tmp_path_factory):
    model = mlp(5, 4, 3, seed=seed)
    if tensor_lr and not implementation.get("foreach"):  # torch does not take a tensor with foreach
        settings = {**settings, "lr": torch.tensor(settings["lr"], dtype=torch.float64)}
    optimizer = optim.SGD(model.parameters(), **settings, **implementation)
    assert_exact(trained(tmp_path_factory.mktemp("memory"), model, optimizer, batches(4, 3, 5, 3, seed=seed)))


@given(schedule=st.lists(sgd_settings(), min_size=2, max_size=6), tensor_lr=st.booleans(), seed=seeds)
def test_settings_may_change_from_step_to_step(schedule, tensor_lr, seed, tmp_path_factory):
    model = mlp(5, 4, 3, seed=seed)
    optimizer = optim.SGD(model.parameters(), **schedule[0])
    lr = torch.tensor(0.0, dtype=torch.float64)

    def change(step):
        optimizer.param_groups[0].update(schedule[step - 1])
        if tensor_lr:  # one tensor that is written to, as compiled training does
            optimizer.param_groups[0]["lr"] = lr.fill_(schedule[step - 1]["lr"])

    data = batches(len(schedule), 3, 5, 3, seed=seed)
    assert_exact(trained(tmp_path_factory.mktemp("memory"), model, optimizer, data, before_step=change))


@pytest.mark.parametrize("momenta", [(0, 0.9, 0.9, 0, 0, 0.9, 0.5), (0.9, 0, 0.9), (0, 0, 0.9)], ids=str)
def test_momentum_may_come_and_go(momenta, tmp_path):
    model = mlp(5, 4, 3)
    optimizer = sgd(model, momentum=momenta[0])

    def change(step):
        optimizer.param_groups[0]["momentum"] = momenta[step - 1]

    assert_exact(trained(tmp_path, model, optimizer, batches(len(momenta), 3, 5, 3), before_step=change))


@given(one=sgd_settings(), other=sgd_settings(), seed=seeds)
def test_biases_may_sit_in_a_parameter_group_of_their_own(one, other, seed, tmp_path_factory):
    model = mlp(5, 4, 3, seed=seed)
    groups = [[p for p in model.parameters() if p.ndim == n] for n in (2, 1)]
    optimizer = optim.SGD([{"params": groups[0], **one}, {"params": groups[1], **other}])
    assert_exact(trained(tmp_path_factory.mktemp("memory"), model, optimizer, batches(4, 3, 5, 3, seed=seed)))


SCHEDULERS = {
    "StepLR": lambda o: optim.lr_scheduler.StepLR(o, 2, 0.3),
    "CosineAnnealingLR": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "LinearLR": lambda o: optim.lr_scheduler.LinearLR(o),
    "OneCycleLR": lambda o: optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=9),  # turns momentum too
    "CyclicLR": lambda o: optim.lr_scheduler.CyclicLR(o, 0.01, 0.2, 2),
    "SequentialLR": lambda o: optim.lr_scheduler.SequentialLR(
        o, [optim.lr_scheduler.ConstantLR(o), optim.lr_scheduler.ExponentialLR(o, 0.7)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("outside", [True, False], ids=["made before recording", "made while recording"])
def test_schedules_are_recorded(name, outside, tmp_path):
    model = mlp(5, 4, 3)
    optimizer = sgd(model)
    scheduler = [SCHEDULERS[name](optimizer)] if outside else []

    def before(step):
        if not scheduler:
            scheduler.append(SCHEDULERS[name](optimizer))

    def after(step):
        scheduler[0].step()

    data = batches(7, 3, 5, 3)
    assert_exact(trained(tmp_path, model, optimizer, data, before_step=before, after_step=after))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_every_implementation_of_sgd_is_recorded_on_a_whole_model(implementation, tmp_path):
    model = whole()
    optimizer = sgd(model, nesterov=True, **implementation)
    assert_exact(trained(tmp_path, model, optimizer, batches(4, 4, 5, 3), before_step=clip(model)))


@given(settings=sgd_settings(), seed=seeds)
def test_a_loaded_momentum_counts(settings, seed, tmp_path_factory):
    settings = {**settings, "momentum": max(settings["momentum"], 0.5)}
    model = mlp(5, 4, 3, seed=seed)
    optimizer = optim.SGD(model.parameters(), **settings)
    for x, y in batches(3, 4, 5, 3, seed=seed):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    fresh = optim.SGD(model.parameters(), **settings)
    fresh.load_state_dict(optimizer.state_dict())
    run = trained(tmp_path_factory.mktemp("memory"), model, fresh, batches(4, 3, 5, 3, seed=seed + 1))
    assert_exact(run)
    assert run.memory.store.initial_state("0.weight", "buffer") is not None


class SGDW(optim.Optimizer):
    """Momentum with decoupled decay: W ← (1 − ηλ) W − η M, M ← μ M + g."""

    def __init__(self, params, lr: float = 0.1, momentum: float = 0.9, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    buffer.mul_(group["momentum"]).add_(p.grad)
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(buffer, alpha=group["lr"])
        return loss


def sgdw(s):
    lr, mu, decay = s["lr"], s["momentum"], s["weight_decay"]
    return Transition(ww=1 - lr * decay, wm=-lr * mu, mm=mu, wg=-lr, mg=1.0)


TAUGHT = {SGDW: Rule("SGDW", sgdw, buffer="momentum_buffer")}


@given(
    lr=st.floats(1e-3, 0.3), momentum=st.floats(0, 0.95), decay=st.floats(0, 1), whole_model=st.booleans(), seed=seeds
)
def test_an_optimiser_can_be_taught(lr, momentum, decay, whole_model, seed, tmp_path_factory):
    model = whole(seed) if whole_model else mlp(5, 4, 3, seed=seed)
    optimizer = SGDW(model.parameters(), lr, momentum, decay)
    path = tmp_path_factory.mktemp("memory")
    run = trained(path, model, optimizer, batches(4, 3, 5, 3, seed=seed), before_step=clip(model), rules=TAUGHT)
    assert_exact(run)
    close(
        run.memory.at(2).weights()["left.weight" if whole_model else "0.weight"],
        run.states[2]["left.weight" if whole_model else "0.weight"],
    )


def test_a_memory_under_a_taught_rule_opens_without_the_rule(tmp_path):
    model = mlp(5, 4, 3)
    run = trained(tmp_path, model, SGDW(model.parameters()), batches(3, 3, 5, 3), rules=TAUGHT)
    steps = run.memory.store.step_table
    assert {"opt_lr", "opt_momentum", "opt_weight_decay"} <= set(steps.column_names)
    assert run.memory.store.parameters["0.weight"].rule == "SGDW"


def test_an_untaught_optimiser_is_refused_before_anything_is_written(tmp_path):
    model = mlp(5, 4, 3)
    with pytest.raises(UnsupportedOptimizer, match="SGDW"):
        dualform.record(model, SGDW(model.parameters()), tmp_path / "memory", progress=False)
    assert not (tmp_path / "memory").exists()


@pytest.mark.parametrize("together", [True, False], ids=["stepping together", "stepping in turn"])
def test_several_optimisers_are_recorded(together, tmp_path):
    model = mlp(5, 4, 4, 3)
    parts = [optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), sgd(model[2:], nesterov=True)]
    states = [state_of(model)]
    with dualform.record(model, parts, tmp_path, dtype="float64", progress=False) as tape:
        for step, (x, y) in enumerate(batches(6, 3, 5, 3)):
            tape.note(label=y)
            F.cross_entropy(model(x), y).backward()
            for part in parts if together else parts[step % 2 :][:1]:
                part.step()
            states.append(state_of(model))
            for part in parts:
                part.zero_grad()
    memory = dualform.open(tmp_path)
    assert memory.step == 6
    assert_clean(memory)
    assert_rebuilt(memory, model)
    for step, state in enumerate(states):
        for name, tensor in memory.at(step).weights().items():
            close(tensor, state[name])


def weights_and_biases(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of a model, and all else."""
    return [p for p in model.parameters() if p.ndim == 2], [p for p in model.parameters() if p.ndim < 2]


SPLIT = {
    "SGD": (lambda some: optim.SGD(some, lr=0.1, momentum=0.9), EXACT),
    "AdamW": (lambda some: optim.AdamW(some, lr=1e-2), EXACT),
    "Muon": (lambda some: optim.Muon(some, lr=1e-2), 0.2),  # it steps in bfloat16
}


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("every", [1, 2], ids=["every step", "every second step"])
def test_weights_and_biases_of_one_layer_may_have_optimisers_of_their_own(name, every, tmp_path):
    model = mlp(20, 16, 10)
    weights, biases = weights_and_biases(model)
    make, bar = SPLIT[name]
    first, second = make(weights), optim.AdamW(biases, lr=1e-2)
    with dualform.record(model, [first, second], tmp_path, dtype="float64", progress=False) as tape:
        for step, (x, y) in enumerate(batches(6, 3, 20, 10), start=1):
            tape.note(label=y)
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(weights, 0.5)
            first.step()
            first.zero_grad()
            if step % every == 0:
                second.step()
                second.zero_grad()
    memory = dualform.open(tmp_path)
    assert memory.step == 6
    assert_clean(memory)
    for name, error in memory.check(model, progress=False).errors.items():
        assert error < (EXACT if name.endswith("bias") else bar), name
    assert memory.store.slots("0") == (18 if every == 1 else 27)  # a bias that comes a step later needs rows again


def test_optimisers_that_need_different_rules_are_recorded_together(tmp_path):
    model = mlp(5, 4, 3)
    parts = [optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), SGDW(model[2].parameters())]
    with dualform.record(model, parts, tmp_path, dtype="float64", progress=False, rules=TAUGHT):
        for x, y in batches(4, 3, 5, 3):
            F.cross_entropy(model(x), y).backward()
            for part in parts:
                part.step()
                part.zero_grad()
    memory = dualform.open(tmp_path)
    assert_clean(memory)
    assert_rebuilt(memory, model)


@pytest.fixture(scope="module")
def adam(tmp_path_factory) -> Run:
    model = whole()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    return trained(tmp_path_factory.mktemp("adam"), model, optimizer, batches(4, 3, 5, 3), rules=None)


def test_without_rules_the_weights_of_every_step_are_kept(adam):
    for step, state in enumerate(adam.states):
        for name, tensor in adam.memory.at(step).weights().items():
            assert torch.equal(tensor, state[name])


def test_without_rules_only_weights_can_be_asked(adam):
    x = adam.inputs[:2]
    spot = adam.memory.attend(adam.model, x)
    hits = spot.top(3, layer="twice", score="weight", per="slot")
    assert hits.weight.isfinite().all() and hits.contribution.isnan().all()
    assert spot.by("label", layer="inp", score="abs").values.shape == (2, 3)
    for ask in (
        lambda: spot.top(3, layer="twice", per="slot"),
        lambda: spot.by("label", layer="inp"),
        lambda: spot.timeline(layer="out"),
        lambda: spot.output("out"),
    ):
        with pytest.raises(QueryError, match="score='weight'"):
            ask()


def test_without_rules_nothing_is_certified(adam):
    assert len(adam.memory.certificate) == 0
    assert set(adam.memory.certificate.rest) >= {name for name, _ in adam.model.named_parameters()}


def test_lbfgs_is_refused_by_name(tmp_path):
    model = mlp(5, 4, 3)
    with pytest.raises(UnsupportedOptimizer, match=r"LBFGS .*several times"):
        dualform.record(model, optim.LBFGS(model.parameters()), tmp_path, progress=False)


# ---------------------------------------------------------------- frozen and thawed


@pytest.mark.parametrize(
    "frozen", ["0.weight", "0.bias", "2.weight", "0.weight 0.bias", "2.weight 2.bias", "0.weight 2.weight"]
)
@pytest.mark.parametrize("thaw", [None, 3], ids=["for good", "until step 3"])
def test_parameters_may_be_frozen(frozen, thaw, tmp_path):
    model = mlp(5, 4, 3)
    parameters = dict(model.named_parameters())
    for name in frozen.split():
        parameters[name].requires_grad_(False)

    def after(step):
        if step == thaw:
            for name in frozen.split():
                parameters[name].requires_grad_(True)

    run = trained(tmp_path, model, sgd(model), batches(6, 3, 5, 3), after_step=after)
    assert_exact(run)
    for name in frozen.split():
        assert torch.equal(run.states[3][name], run.states[0][name])
        assert torch.equal(run.states[6][name], run.states[0][name]) == (thaw is None)


def test_all_may_be_frozen_in_the_middle(tmp_path):
    model = mlp(5, 4, 3)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape:
        for step, (x, y) in enumerate(batches(9, 3, 5, 3)):
            model[2].requires_grad_(step not in (2, 3, 6))
            model[0].requires_grad_(step not in (3, 5, 6))
            tape.note(label=y)
            loss = F.cross_entropy(model(x), y)
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path)
    assert_clean(memory)
    assert_rebuilt(memory, model)
    assert memory.step == 9


def test_a_frozen_parameter_with_a_zero_gradient_goes_on_by_momentum_and_decay(tmp_path):
    model = mlp(5, 4, 3)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape:
        for step, (x, y) in enumerate(batches(6, 3, 5, 3)):
            model[0].requires_grad_(step < 3)
            tape.note(label=y)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    memory = dualform.open(tmp_path)
    assert_clean(memory)
    assert_rebuilt(memory, model)


@pytest.mark.parametrize("late", ["0", "0.weight", "0.bias", "2.weight"])
def test_a_parameter_group_may_be_added_later(late, tmp_path):
    model = mlp(5, 4, 3)
    parameters = dict(model.named_parameters())
    names = [name for name in parameters if name.startswith(late)]
    optimizer = optim.SGD([p for name, p in parameters.items() if name not in names], lr=0.1, momentum=0.9)

    def after(step):
        model.zero_grad()
        if step == 2:
            optimizer.add_param_group({"params": [parameters[name] for name in names], "lr": 0.05, "momentum": 0.5})

    layers = ["0", "2"] if late != "0" else ["2"]  # a layer that nothing trains yet is a part of the rest
    run = trained(tmp_path, model, optimizer, batches(5, 3, 5, 3), after_step=after, layers=layers)
    assert_exact(run)


def test_a_parameter_that_never_is_in_the_optimiser_stays_as_it_is(tmp_path):
    model = mlp(5, 4, 3)
    optimizer = optim.SGD([model.get_parameter("0.bias"), *model[2].parameters()], lr=0.1)
    run = trained(tmp_path, model, optimizer, batches(5, 3, 5, 3))  # its gradient grows: zero_grad does not know it
    assert_exact(run)
    assert torch.equal(run.memory.weights()["0.weight"], run.states[0]["0.weight"])


def test_a_weight_may_be_frozen_and_thawed_between_backward_and_step(tmp_path):
    model = mlp(5, 3)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False) as tape:
        for x, y in batches(4, 3, 5, 3):
            model[0].weight.requires_grad_(False)
            tape.note(label=y)
            F.cross_entropy(model(x), y).backward()
            model[0].weight.requires_grad_(True)
            optimizer.step()
            optimizer.zero_grad()
    assert dualform.open(tmp_path).check(model, full=True).worst <= EXACT


def test_a_gradient_that_waited_for_its_parameter_group_counts_once(tmp_path):
    model = nn.Sequential(nn.Linear(4, 3)).double()
    optimizer = optim.SGD([model.get_parameter("0.bias")], lr=0.1)

    def after(step):
        if step == 3:  # zero_grad never touched the gradient of the weight: all of it comes in now
            optimizer.add_param_group({"params": [model[0].weight]})

    run = trained(tmp_path, model, optimizer, batches(5, 3, 4, 3), after_step=after)
    assert_rebuilt(run.memory, model)
