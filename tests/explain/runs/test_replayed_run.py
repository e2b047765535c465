"""A replayed run: exact, and its predictions are what training again gives."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

import dualform
from dualform.errors import DualformWarning, HorizonError, QueryError
from dualform.evaluate import lds, removal_runs

N, D, C = 40, 6, 3


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none") / len(batch[0])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    torch.manual_seed(0)
    x, y = torch.randn(N, D).double(), torch.randint(C, (N,))
    model = nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.Linear(16, C)).double()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    path = tmp_path_factory.mktemp("run") / "memory"
    with dualform.record(model, optimizer, path, dtype="float64", progress=False) as tape:
        for _ in range(4):
            for index in torch.randperm(N).split(8):
                tape.note(index=index + 100, label=y[index])
                losses(model, (x[index], y[index])).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return dualform.open(path), model, (x, y), torch.randn(5, D).double()


@pytest.fixture(scope="module")
def run(recorded):
    memory, model, (x, y), _ = recorded
    return memory.replay(model, losses, lambda index: (x[index - 100], y[index - 100]))


def test_the_run_is_exact_and_says_so(run, recorded):
    check = run.check()
    assert check.exact and "bit for bit" in str(check)
    for again, trained in zip(run.retrain().parameters(), recorded[1].parameters(), strict=True):
        assert torch.equal(again, trained)


def test_other_data_are_named_at_the_first_step(recorded):
    memory, model, (x, y), _ = recorded
    other = memory.replay(model, losses, lambda index: (x[index - 100] * 2, y[index - 100]))
    check = other.check(steps=3)
    assert check.first_difference == 1 and "`data` gives other inputs" in str(check)


def test_influence_predicts_what_less_weight_changes(run, recorded):
    inputs = recorded[3]
    influence = run.influence(inputs, target=1)
    assert influence.values.shape == (5, N) and (influence.index == np.arange(N) + 100).all()
    torch.testing.assert_close(sum(influence.by("label").values()), influence.values.sum(1))
    example, value = influence.top(1, query=2)[0]
    weights = torch.ones(len(run.visits)).double()
    weights[torch.from_numpy(run.visits["index"].to_numpy() == example)] = 1 - 1e-6
    with torch.no_grad():
        change = run.retrain(weights=weights)(inputs)[2, 1] - run.retrain()(inputs)[2, 1]
    assert float(change) / 1e-6 == pytest.approx(-value, rel=1e-4)
    assert str(example) in str(influence) or influence.top(1)[0][0] != example


def test_through_training_ranks_removals_better_than_direct_contributions(run, recorded):
    inputs = recorded[3]
    runs = removal_runs(run.retraining(inputs, target=0), N, drop=0.1, runs=30)
    through, direct = lds(run.influence(inputs, target=0).values, runs), lds(run.direct(inputs, target=0).values, runs)
    assert through.mean > 0.95 > direct.mean


def test_a_comparison_gives_the_three_answers(run, recorded):
    inputs = recorded[3]
    comparison = run.compare(inputs, without="label = 2 and step <= 3")
    with torch.no_grad():
        kept = run.retrain(without="label = 2 and step <= 3")(inputs)
        chosen = recorded[1](inputs).argmax(1, keepdim=True)
        before = recorded[1](inputs).gather(1, chosen)
    torch.testing.assert_close(comparison.retrained, (kept.gather(1, chosen) - before)[:, 0])
    assert len(str(comparison).splitlines()) == 7 and len(comparison.to_pandas()) == 5


def test_a_question_changes_neither_the_model_nor_the_generator(run, recorded):
    before = torch.get_rng_state(), [p.clone() for p in recorded[1].parameters()]
    run.influence(recorded[3])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before[1], recorded[1].parameters(), strict=True))


def test_wrong_questions_are_answered_with_a_sentence(run, recorded):
    memory, model, (x, y), inputs = recorded
    with pytest.raises(QueryError, match="what to leave out"):
        run.compare(inputs)
    with pytest.raises(QueryError, match="one of without="):
        run.retrain(without="label = 1", only="label = 2")
    with pytest.raises(HorizonError, match="cannot run the steps 1 to 99"):
        run.check(steps=99)
    with pytest.raises(QueryError, match="no column 'number'"):
        memory.replay(model, losses, lambda index: (x, y), index="number")
    summed = memory.replay(model, lambda m, b: losses(m, b).sum(), lambda index: (x[index - 100], y[index - 100]))
    with pytest.raises(QueryError, match="one number an example"):
        summed.check()


def clipped_training(path, x, y, batches, weights=None, clip=0.6):
    """A recorded training that clips some of its steps; ``weights`` of the examples in the loss."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.Linear(16, C)).double()
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    norms = []
    with dualform.record(model, optimizer, path, dtype="float64", progress=False) as tape:
        for index in batches:
            tape.note(index=index)
            shares = losses(model, (x[index], y[index]))
            (shares if weights is None else shares * weights[index]).sum().backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            optimizer.zero_grad()
    return model, norms


def test_clipping_is_done_again_by_the_norm_when_other_weights_change_the_gradients(tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(N, D).double(), torch.randint(C, (N,))
    batches = [torch.randperm(N)[:8] for _ in range(12)]
    model, norms = clipped_training(tmp_path / "memory", x, y, batches)
    assert min(norms) < 0.6 < max(norms), "only some steps are clipped"
    run = dualform.open(tmp_path / "memory").replay(model, losses, lambda index: (x[index], y[index]))
    weights = torch.ones(N).double()
    weights[:10] = 3.0
    really, other_norms = clipped_training(tmp_path / "really", x, y, batches, weights)
    assert any((a < 0.6) != (b < 0.6) for a, b in zip(norms, other_norms, strict=True)), "other steps are clipped"
    again = run.retrain(weights=weights[torch.cat(batches)])
    for a, b in zip(again.parameters(), really.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_losses_may_use_parts_of_the_model(recorded, run):
    memory, model, (x, y), inputs = recorded

    def by_parts(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert isinstance(model, nn.Sequential)
        hidden = model[0](batch[0]).tanh()
        return F.cross_entropy(model[2](hidden), batch[1], reduction="none") / len(batch[0])

    other = memory.replay(model, by_parts, lambda index: (x[index - 100], y[index - 100]))
    torch.testing.assert_close(other.influence(inputs).values, run.influence(inputs).values)


def test_answers_of_a_run_that_is_not_the_recorded_one_come_with_a_warning(recorded):
    memory, model, (x, y), inputs = recorded
    other = memory.replay(model, losses, lambda index: (x[index - 100] * 2, y[index - 100]))
    with pytest.warns(DualformWarning, match="differs from the recorded one from step 1"):
        other.influence(inputs[:1])


def test_a_tight_budget_changes_no_answer(run, recorded):
    memory, model, (x, y), inputs = recorded
    wide = run.influence(inputs, target=1)
    for budget in (1, "40 kB"):  # a query at a time, stretches halved to single steps; and something in between
        tight = memory.replay(model, losses, lambda index: (x[index - 100], y[index - 100]), budget=budget)
        calls = []
        narrow = tight.influence(inputs, target=1, progress=lambda *call, calls=calls: calls.append(call))
        torch.testing.assert_close(narrow.values, wide.values, rtol=1e-9, atol=1e-12)
        assert calls[-1][1] == calls[-1][2] and calls[-1][2] % 20 == 0  # a way back of 20 steps for each chunk
    with pytest.raises(QueryError, match="is no number of bytes"):
        memory.replay(model, losses, lambda index: (x[index - 100], y[index - 100]), budget="much")


def test_a_question_that_was_broken_off_can_be_asked_again(recorded):
    memory, model, (x, y), inputs = recorded
    run = memory.replay(model, losses, lambda index: (x[index - 100], y[index - 100]))
    generator = torch.get_rng_state()

    def interrupt(task: str, done: int, total: int) -> None:
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.influence(inputs, target=1, progress=interrupt)
    assert torch.equal(torch.get_rng_state(), generator)
    again = memory.replay(model, losses, lambda index: (x[index - 100], y[index - 100])).influence(inputs, target=1)
    assert torch.equal(run.influence(inputs, target=1).values, again.values)
    assert run.check().exact
