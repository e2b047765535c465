"""A run that does not come out as recorded says how far off it is, where, and why; odd models and loops are no trap."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_influence_slopes import ADAM, QUERIES, C, D, Loop, N, assert_slopes, by, mlp, slope
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointFunction, checkpoint

import dualform
from dualform.errors import DualformWarning, QueryError
from dualform.explain import ReplayedRun
from dualform.rules import Rule, Transition
from dualform.store import RecipeSource

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

torch.manual_seed(0)
X, Y = torch.randn(N, D).double(), torch.randint(C, (N,))
losses = Loop(ADAM).losses


@dataclass
class Recorded:
    """A training that is recorded once, and run again with whatever functions."""

    path: Any
    model: Callable[[], nn.Module] = mlp
    optimizer: Callable[[nn.Module], Any] = ADAM
    losses: Callable[[nn.Module, Any], Tensor] = losses
    keep: Any = "replay"
    replay: Any = True
    before_step: Callable[[nn.Module, int], None] = lambda model, step: None
    take_step: Callable[[optim.Optimizer, int], Any] = lambda optimizer, step: optimizer.step()
    batch: Callable[[int], Tensor] = lambda step: torch.randperm(N)[:5]
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.trained = self.model().to(self.dtype)
        optimizer, x = self.optimizer(self.trained), X.to(self.dtype)
        precision = "float64" if self.dtype == torch.float64 else "float32"
        with dualform.record(
            self.trained, optimizer, self.path, dtype=precision, keep=self.keep, replay=self.replay, progress=False
        ) as tape:
            for step in range(8):
                index = self.batch(step)
                tape.note(index=index)
                self.losses(self.trained, (x[index], Y[index])).sum().backward()
                self.before_step(self.trained, step)
                self.take_step(optimizer, step)
                optimizer.zero_grad()

    def run(self, losses: Any = None, data: Any = None, model: nn.Module | None = None) -> ReplayedRun:
        x = X.to(self.dtype)
        memory = dualform.open(self.path)
        return memory.replay(model or self.trained, losses or self.losses, data or (lambda i: (x[i], Y[i])))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("run") / "run")


# ------------------------------------------------------------------------------------------------------ the reason


@pytest.mark.parametrize("keep", ["replay", "slots"])
def test_other_losses_are_named_with_the_step_the_parameters_and_the_distance(keep, tmp_path):
    def other(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - F.one_hot(batch[1], C)).square().mean(1) / len(batch[1])

    check = Recorded(tmp_path / "run", keep=keep, replay=keep == "replay" or None).run(other).check()
    assert check.first_difference == 1 and check.difference is not None and check.difference.step == 1
    assert set(check.parameters) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert 0 < (check.difference.largest or 0.0) < 0.1 and f"by up to {check.difference.largest:.2g}" in str(check)
    assert "`losses` is not the loss of the loop" in check.reason


def test_losses_that_are_not_divided_are_named_with_the_factor_and_still_give_the_slope(recorded):
    run = recorded.run(lambda model, batch: 5 * losses(model, batch))
    check = run.check()
    assert not check.exact and "the gradients of the loop were 0.2 times those of `losses`" in check.reason
    with pytest.warns(DualformWarning, match=r"0\.2 times those"):
        influence = run.influence(QUERIES, target=0)
    torch.testing.assert_close(influence.values, recorded.run().influence(QUERIES, target=0).values)


def test_other_data_are_named(recorded):
    check = recorded.run(data=lambda i: (X[i].roll(1, 1), Y[i])).check()
    assert check.first_difference == 1 and "`data` gives other inputs than the loop saw" in check.reason


def test_an_example_that_changed_shows_at_the_step_that_saw_it(recorded):
    index = dualform.open(recorded.path).visits.to_pandas().groupby("index")["step"].min()
    example, step = int(index.idxmax()), int(index.max())
    check = recorded.run(data=lambda i: (X[i] + 0.1 * (i == example).double()[:, None], Y[i])).check()
    assert step > 1 and check.first_difference == step and "an example that changed since" in check.reason


@pytest.mark.parametrize("generator", ["python", "torch"])
def test_data_with_random_numbers_of_their_own_are_named(generator, recorded):
    def noise(shape: torch.Size) -> Any:
        return random.random() if generator == "python" else torch.randn(shape, dtype=torch.float64)

    check = recorded.run(data=lambda i: (X[i] + 0.1 * noise(X[i].shape), Y[i])).check()
    assert "`data` gives something else when it is called twice" in check.reason


def test_losses_with_random_numbers_of_their_own_are_named(recorded):
    check = recorded.run(lambda model, batch: losses(model, batch) * (1 + random.random())).check()
    assert "`losses` gives something else when it is called twice" in check.reason


def test_random_numbers_of_the_data_are_not_those_of_dropout(tmp_path):
    recorded = Recorded(tmp_path / "run", lambda: nn.Sequential(nn.Linear(D, 9), nn.Dropout(0.4), nn.Linear(9, C)))

    def drawing(index: Tensor) -> tuple[Tensor, Tensor]:
        torch.randn(3)
        return X[index], Y[index]

    assert recorded.run(data=drawing).check().exact


class Counting(nn.Module):
    """Grows with the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out, self.calls = nn.Linear(D, 6), nn.Linear(6, C), 0
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean += 0.1 * (x.detach().mean() - self.mean)
        return self.out(self.first(x).tanh() - self.mean) * (1 + 0.1 * self.calls)


@pytest.mark.filterwarnings("ignore:The model changes the buffer 'mean'")
def test_what_a_model_counts_itself_is_named_and_a_fresh_model_is_exact_each_time(tmp_path):
    recorded = Recorded(tmp_path / "run", Counting)
    assert "The model itself changes 'calls', 'mean' while it trains" in recorded.run().check().reason
    torch.manual_seed(1)
    run = recorded.run(model=Counting().double())
    assert run.check().exact
    assert all(torch.equal(a, b) for a, b in zip(run.at(8).parameters(), recorded.trained.parameters(), strict=True))
    weights = torch.ones(len(run.visits))
    for again in (run.retrain(weights=weights), run.retrain(weights=weights)):
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), recorded.trained.parameters(), strict=True))
        assert again.calls == 8
    wide = run.influence(QUERIES, target=0).values
    run._budget = 1  # graphs are made later, when the model has counted on
    torch.testing.assert_close(run.influence(QUERIES, target=0).values, wide, rtol=1e-9, atol=1e-13)


def test_a_guess_at_the_settings_of_a_parameter_is_named(tmp_path):
    """Without a log a memory holds the settings of layers; those of a LayerNorm are taken from another group."""

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(D, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, C))

    def in_groups(model: nn.Module) -> optim.Optimizer:
        norm = [*model.get_submodule("1").parameters()]
        rest = [p for p in model.parameters() if all(p is not other for other in norm)]
        return optim.SGD([{"params": rest}, {"params": norm, "lr": 0.5}], lr=0.1)

    kept = Recorded(tmp_path / "run", network, in_groups, keep="slots", replay=None).run().check()
    assert kept.first_difference is not None and kept.first_difference > 1
    assert "no settings of '1.weight', '1.bias'" in kept.reason and "record with replay=True" in kept.reason
    assert Recorded(tmp_path / "log", network, in_groups, keep="slots").run().check().exact


# ------------------------------------------------------------------------------------------- gradients in between


def test_gradients_that_a_loop_divides_are_not_taken_for_clipped_ones(tmp_path):
    """The first step alone looks as if clipped to its own norm."""

    def halve(model: nn.Module, step: int) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2 if step % 2 else 4

    run = Recorded(tmp_path / "run", optimizer=by(optim.SGD, lr=0.3), before_step=halve).run()
    assert run.check().exact
    with pytest.warns(
        DualformWarning, match=r"The gradients of 8 steps \(the first is step 1\) were scaled by a factor"
    ):
        influence = run.influence(QUERIES, target=0)
    example = int(influence.index[1])
    torch.testing.assert_close(influence.values[:, 1], slope(run, example), rtol=1e-6, atol=1e-9)
    assert "holds it fixed" in influence.note


def test_gradients_that_are_clipped_by_value_are_named(tmp_path):
    def clip(model: nn.Module, step: int) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.05)

    check = Recorded(tmp_path / "run", before_step=clip).run().check()
    assert not check.exact and "clipped by value" in check.reason


@pytest.mark.parametrize("keep", ["replay", "slots"])
def test_steps_with_gradients_of_0_are_run_again(keep, tmp_path):
    """Momentum goes on there: an empty batch, or gradients that were zeroed."""

    def losses_of_any(model: nn.Module, batch: Any) -> Tensor:
        return losses(model, batch) if len(batch[1]) else model(batch[0]).sum(1)

    def batch(step: int) -> Tensor:
        return torch.randperm(N)[: 0 if step == 4 else 5]

    momentum = by(optim.SGD, lr=0.1, momentum=0.9)
    empty = Recorded(tmp_path / "empty", losses=losses_of_any, batch=batch, optimizer=momentum, keep=keep).run()
    assert_slopes(empty)
    for set_to_none in (False, True):

        def twice(optimizer: optim.Optimizer, step: int, set_to_none: bool = set_to_none) -> None:
            optimizer.step()
            if step == 3:
                optimizer.zero_grad(set_to_none=set_to_none)
                optimizer.step()

        again = Recorded(tmp_path / f"twice {set_to_none}", take_step=twice, optimizer=momentum, keep=keep)
        assert_slopes(again.run())


def test_a_step_with_the_gradients_of_an_earlier_one_is_named(tmp_path):
    def twice(optimizer: optim.Optimizer, step: int) -> None:
        optimizer.step()
        if step == 3:
            optimizer.step()

    check = Recorded(tmp_path / "run", take_step=twice).run().check()
    assert check.first_difference == 5 and "No batch belongs to this step" in check.reason


# -------------------------------------------------------------------------------------------------- odd models


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.lock = nn.Linear(D, C), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


def test_a_model_that_cannot_be_copied_is_named(tmp_path):
    with pytest.raises(QueryError, match=r"this Locked cannot be copied .*lock.*Keep locks"):
        Recorded(tmp_path / "run", Locked).run()


class Checkpointed(nn.Module):
    """Computes activations again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.out, self.dropout = nn.Linear(D, 7), nn.Linear(7, C), nn.Dropout(0.3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant and torch.is_grad_enabled():
            x = x.clone().requires_grad_()
        hidden = checkpoint(lambda x: self.dropout(self.first(x).tanh()), x, use_reentrant=self.reentrant)
        assert isinstance(hidden, Tensor)
        return self.out(hidden)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # without gradients
@pytest.mark.parametrize("reentrant", [False, True])
def test_influence_is_the_slope_under_activation_checkpointing(reentrant, tmp_path):
    run = Recorded(tmp_path / "run", lambda: Checkpointed(reentrant)).run()
    assert_slopes(run)
    assert "apply" not in vars(CheckpointFunction), "torch is left as it was"


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (x,), (error,) = ctx.saved_tensors, grad_outputs
        return (error.detach() * (1 - x.tanh() ** 2)).detach()  # as torch's once_differentiable does


class OnceDifferentiable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(D, 7), nn.Linear(7, C)

    def forward(self, x: Tensor) -> Tensor:
        hidden = Once.apply(self.first(x))
        assert isinstance(hidden, Tensor)
        return self.out(hidden)


def test_an_operation_without_a_second_derivative_is_named(tmp_path):
    run = Recorded(tmp_path / "run", OnceDifferentiable).run()
    assert run.check().exact
    with pytest.raises(QueryError, match=r"has no second derivative .*of its own hides the rest"):
        run.influence(QUERIES, target=0)


class Words(nn.Module):
    """Embeds numbers of words; what a word adds is divided by how often it is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 6, scale_grad_by_freq=True), nn.Linear(6, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed((x * 2).abs().long().clamp(max=4)).tanh().mean(1))


def test_influence_is_the_slope_where_gradients_are_divided_by_frequency(tmp_path):
    run = Recorded(tmp_path / "run", Words, by(optim.SGD, lr=0.2)).run()
    assert_slopes(run)
    embed = run.retrain().get_submodule("embed")
    assert isinstance(embed, nn.Embedding) and embed.scale_grad_by_freq


class Named(nn.Module):
    """Takes keywords or a tuple, and gives a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(D, C)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"logits": self.out(x * scale)}


def test_inputs_may_be_a_mapping_or_a_tuple(tmp_path):
    def of_named(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0]
        return F.cross_entropy(model(x=x, scale=x[:, :1] * 0 + 2)["logits"], batch[1], reduction="none") / 5

    run = Recorded(tmp_path / "run", Named, losses=of_named).run()
    scale = torch.full((3, 1), 2.0).double()
    by_name = run.influence({"x": QUERIES, "scale": scale}, target=0)
    by_place = run.influence((QUERIES, scale), target=0)
    assert run.check().exact and by_name.values.shape == (3, len(run.examples))
    torch.testing.assert_close(by_name.values, by_place.values)


def test_losses_of_another_precision_or_shape(tmp_path):
    def in_double(model: nn.Module, batch: Any) -> Tensor:
        return losses(model, batch).double()

    run = Recorded(tmp_path / "run", losses=in_double, dtype=torch.float32).run()
    assert run.check().exact and bool(run.influence(QUERIES.float(), target=0).values.isfinite().all())
    for shape in ("(5, 1)", r"\(\)"):
        wrong = run.store
        other = dualform.open(wrong.path).replay(
            mlp(), (lambda m, b: losses(m, b)[:, None]) if shape == "(5, 1)" else (lambda m, b: losses(m, b).sum()),
            lambda i: (X[i].float(), Y[i]),
        )  # fmt: skip
        with pytest.raises(QueryError, match="one number an example"):
            other.check()


def test_a_target_that_gives_a_table_is_named(recorded):
    run = recorded.run()
    with pytest.raises(QueryError, match=r"one number for each of the 3 examples; it gave \(3, 3\)"):
        run.influence(QUERIES, target=lambda output: output)
    alone = run.influence(QUERIES, target=lambda output: output[:, 1])
    torch.testing.assert_close(alone.values, run.influence(QUERIES, target=1).values)


def test_losses_that_are_no_number_are_a_difference_and_no_answer(recorded):
    run = recorded.run(lambda model, batch: losses(model, batch) * float("nan"))
    assert run.check().first_difference == 1
    with pytest.warns(DualformWarning) as caught:
        influence = run.influence(QUERIES, target=0)
    assert "not a finite number" in influence.note and len(caught) == 2


def test_a_rule_that_was_taught_explains_the_optimiser_of_a_run(tmp_path):
    class Plain(optim.Optimizer):
        def __init__(self, params: Any, rate: float = 0.1) -> None:
            super().__init__(params, {"rate": rate})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["rate"])

    # whole numbers, as one writes them; the buffer is never used
    rule = Rule("Plain", lambda s: Transition(ww=1, wm=-1, mm=1, mw=0, wg=-s["rate"]), buffer="nothing")
    torch.manual_seed(0)
    model = mlp().double()
    optimizer = Plain(model.parameters())
    with dualform.record(model, optimizer, tmp_path / "run", rules={Plain: rule}, replay=True, progress=False) as tape:
        for _ in range(5):
            index = torch.randperm(N)[:5]
            tape.note(index=index)
            losses(model, (X[index], Y[index])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run", rules=[rule])
    with memory.replay(model, losses, lambda i: (X[i], Y[i]), optimizer=Plain) as run:
        assert_slopes(run)
        assert len(run.attend(QUERIES).top(2, layer="2", per="slot")) == 3
        run.retrain(without="step = 2", memory=tmp_path / "without")
    assert dualform.open(tmp_path / "without", rules=[rule]).store.steps == 5


class OfStep:
    """Data whose batches may depend on all passes of a step."""

    def __call__(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.in_step((index,), 0)

    def in_step(self, passes: Any, place: int) -> tuple[Tensor, Tensor]:
        return X[passes[place]], Y[passes[place]]


def test_a_retraining_with_data_of_steps_can_be_recorded(recorded, tmp_path):
    run = recorded.run(data=OfStep())
    model = run.retrain(without="step = 2", memory=tmp_path / "without")
    again = recorded.run().retrain(without="step = 2")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert dualform.open(tmp_path / "without").visits["index"].equals(run.visits["index"])


def test_a_run_that_is_trained_again_keeps_the_recipe(tmp_path):
    (tmp_path / "train.npz").touch()
    torch.manual_seed(0)
    model = mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    described = {"model": "train:make", "train": tmp_path / "train.npz", "test": "train:tests", "index": "index"}
    path = tmp_path / "deep" / "run"
    with dualform.record(model, optimizer, path, replay=True, progress=False, describe=described) as tape:
        for _ in range(3):
            index = torch.randperm(N)[:5]
            tape.note(index=index)
            losses(model, (X[index], Y[index])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    recipe = dualform.open(path).recipe
    assert recipe is not None and recipe.train is not None and recipe.train.file == "../../train.npz"
    with dualform.open(path).replay(model, losses, lambda i: (X[i], Y[i])) as run:
        (tmp_path / "train.npz").unlink()  # what is repeated does not need the files of the recipe
        run.retrain(without="step = 2", memory=tmp_path / "without")
        kept = dualform.open(tmp_path / "without").recipe
        assert kept == replace(recipe, train=RecipeSource(file="../train.npz"))
        slots = run.slots(folder=tmp_path / "slots")
        assert slots.recipe is not None and slots.recipe.train is not None
        assert Path(slots.recipe.train.at(slots.path)) == (tmp_path / "train.npz").resolve()
