"""What an influence answers: examples, single visits, groups, tables; and direct answers are those of the ledger."""

from typing import Any

import numpy as np
import pytest
import torch
from test_influence_slopes import ADAM, LOOPS, OPTIMIZERS, QUERIES, STEP, C, D, Loop, N, by, mlp
from torch import Tensor, nn, optim

import dualform
from dualform.errors import DualformWarning, QueryError, SizeError, UnknownColumn
from dualform.explain import ReplayedRun

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> ReplayedRun:
    return LOOPS["accumulation"].record(tmp_path_factory.mktemp("run") / "run")[0]


@pytest.mark.parametrize("name", ["accumulation", "an example twice in a batch", "two optimisers, schedule, clipping"])
def test_the_visits_of_an_example_sum_to_its_influence(name, tmp_path):
    run, _ = LOOPS[name].record(tmp_path / "run")
    for influence in (run.influence(QUERIES, target=0), run.direct(QUERIES, target=0)):
        for place, example in enumerate(influence.index.tolist()):
            for query in range(3):
                visits = influence.visits_of(example, query)
                total = sum(value for _, value in visits)
                assert total == pytest.approx(float(influence.values[query, place]), rel=1e-12, abs=1e-15)
                assert len(visits) == int((run.visits["index"].to_numpy() == example).sum())
                assert [step for step, _ in visits] == sorted(step for step, _ in visits)


@pytest.mark.parametrize("name", ["accumulation", "an example twice in a batch", "dropout"])
def test_a_visit_is_the_slope_of_leaving_it_out_at_this_step_only(name, tmp_path):
    run, _ = LOOPS[name].record(tmp_path / "run")
    influence, example = run.influence(QUERIES, target=0), 3
    index, steps = run.visits["index"].to_numpy(), run.visits["step"].to_numpy()
    by_step: dict[int, float] = {}
    for step, value in influence.visits_of(example, query=1):
        by_step[step] = by_step.get(step, 0.0) + value
    for step in list(by_step)[:2]:
        outputs = []
        for change in (STEP, -STEP):
            of_visit = torch.from_numpy((index == example) & (steps == step)).double()
            with torch.no_grad():
                outputs.append(float(run.retrain(weights=1.0 + change * of_visit)(QUERIES)[1, 0]))
        assert by_step[step] == pytest.approx((outputs[0] - outputs[1]) / (2 * STEP), rel=1e-6, abs=1e-9)
        comparison = run.compare(QUERIES, without=f"index = {example} and step = {step}", target=0, progress=False)
        assert float(comparison.predicted[1]) == pytest.approx(-by_step[step], rel=1e-6)


def test_a_table_has_a_line_for_each_example_or_for_each_visit(run):
    influence = run.influence(QUERIES, target=0)
    examples, visits = influence.to_pandas(), influence.to_pandas(per="visit")
    assert list(examples) == ["query", "index", "influence"] and len(examples) == 3 * len(influence.index)
    assert list(visits) == ["query", *run.visits.column_names, "influence"] and len(visits) == 3 * len(run.visits)
    summed = visits.groupby(["query", "index"], as_index=False)["influence"].sum()
    np.testing.assert_allclose(summed["influence"], examples["influence"], rtol=1e-12, atol=1e-15)
    of_three = visits[(visits["query"] == 2) & (visits["index"] == 3)]
    assert list(zip(of_three["step"], of_three["influence"], strict=True)) == influence.visits_of(3, query=2)
    wrong: Any = "step"
    with pytest.raises((SizeError, Exception), match="per"):
        influence.to_pandas(per=wrong)


def test_an_example_that_was_never_seen_is_named(run):
    influence = run.influence(QUERIES, target=0)
    with pytest.raises(QueryError, match=r"no visit of example 99: training saw 16 examples, from 0 to 15"):
        influence.visits_of(99)
    with pytest.raises(UnknownColumn, match="no column 'colour'"):
        influence.by("colour")


@pytest.mark.parametrize("column", ["source", "even", "label", "weight"])
def test_groups_are_those_of_a_memory(column, tmp_path):
    torch.manual_seed(0)
    x, y, model = torch.randn(N, D).double(), torch.randint(C, (N,)), mlp().double()
    loop, optimizer = Loop(ADAM), optim.Adam(model.parameters(), lr=0.02)
    with dualform.record(model, optimizer, tmp_path / "run", dtype="float64", replay=True, progress=False) as tape:
        for _ in range(4):
            index = torch.randperm(N)[:5]
            source = ["b" if int(i) % 2 else "a" for i in index]
            tape.note(index=index, label=y[index], source=source, even=index % 2 == 0, weight=index.double() / 2)
            loop.losses(model, (x[index], y[index])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "run")
    influence = memory.replay(model, loop.losses, lambda i: (x[i], y[i])).influence(QUERIES, target=0)
    groups = influence.by(column)
    assert tuple(groups) == memory.attend(model, QUERIES).by(column, layer="2").names
    torch.testing.assert_close(sum(groups.values()), influence.values.sum(1))
    for value, values in groups.items():
        mask = torch.tensor([noted == value for noted in influence.visits[column].to_pylist()])
        torch.testing.assert_close(values, influence.per_visit[:, mask].sum(1))


DIRECT = {name: Loop(optimizer, decay=0.9, keep="slots") for name, optimizer in OPTIMIZERS.items()} | {
    "clipping": Loop(by(optim.SGD, lr=0.1, momentum=0.5), clip=0.5, keep="slots"),
    "clipping, AdamW": Loop(by(optim.AdamW, lr=0.02), clip=0.5, keep="slots"),
    "accumulation": Loop(ADAM, accumulate=3, keep="slots"),
    "an example twice in a batch": Loop(ADAM, batch=lambda step: torch.tensor([1, 1, 2, 3, 1]), keep="slots"),
    "Rprop": Loop(by(optim.Rprop, lr=0.01), keep="slots"),
}


@pytest.mark.parametrize("name", DIRECT)
def test_a_direct_answer_is_the_sum_of_what_the_ledger_has(name, tmp_path):
    """Without the Hessian, with P and the factor of clipping held: Σ over parameters of ⟨∂φ/∂W, put into W⟩."""
    run, _ = DIRECT[name].record(tmp_path / "run")
    model = run.retrain()
    direct = run.direct(QUERIES, target=0)
    parameters = dict(model.named_parameters())
    slopes = [torch.autograd.grad(v, list(parameters.values()), retain_graph=True) for v in model(QUERIES)[:, 0]]
    ledger = dualform.open(tmp_path / "run").ledger("index")
    for place, example in enumerate(direct.index.tolist()):
        put = [ledger[example][parameter] for parameter in parameters]
        sums = [torch.stack([(a * b).sum() for a, b in zip(slope, put, strict=True)]).sum() for slope in slopes]
        torch.testing.assert_close(direct.values[:, place], torch.stack(sums), rtol=1e-6, atol=1e-12)


# --------------------------------------------------------------------------------------------- what is not the slope


class RunningMean(nn.Module):
    """Subtracts a running mean of its own, which the adjoint knows nothing of."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(D, 6), nn.Linear(6, C)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
        return self.out(hidden - self.mean)


def test_a_buffer_that_the_model_changes_itself_is_named(tmp_path):
    run, _ = Loop(ADAM, RunningMean).record(tmp_path / "run")
    assert run.check().exact
    with pytest.warns(DualformWarning, match="The model changes the buffer 'mean' while it trains"):
        influence = run.influence(QUERIES, target=0)
    assert "not exactly the slope" in influence.note and influence.note in str(influence)
    with pytest.warns(DualformWarning, match="the buffer 'mean'"):
        assert "Predicted: The model changes" in str(run.compare(QUERIES, without="step = 2", progress=False))
    assert run.direct(QUERIES, target=0).note == ""


def test_an_influence_beyond_the_range_of_numbers_is_named(tmp_path):
    """Steps of bounded size that multiply a small difference by 10,000, in float32."""
    torch.manual_seed(0)
    x, model = 1 + torch.rand(N, 1), nn.Linear(1, 1, bias=False)
    optimizer = optim.SGD(model.parameters(), lr=1.0)

    def losses(model: nn.Module, batch: Tensor) -> Tensor:
        return (1e4 * model(batch)).cos().flatten() / 1e4

    with dualform.record(model, optimizer, tmp_path / "run", keep="replay", progress=False) as tape:
        for index in torch.arange(N).split(1):
            tape.note(index=index)
            losses(model, x[index]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = dualform.open(tmp_path / "run").replay(model, losses, lambda index: x[index])
    with pytest.warns(DualformWarning, match=r"The influence of visits up to step \d+ is not a finite number"):
        influence = run.influence(x[:2], target=0)
    finite = [bool(np.isfinite(value)) for _, value in influence.visits_of(N - 1)]
    assert finite == [True] and "not a finite number" in influence.note
