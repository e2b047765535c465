"""Tasks of classifiers and regressions: shares sum to the loop's loss, and their gradient is the loop's bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import dualform
from dualform.errors import QueryError, SizeError
from dualform.tasks import classification, optimizer_of, regression

N, D, C = 60, 6, 5
SIZES = (1, 2, 3, 7, 13, 32, 50)

CROSS_ENTROPIES: list[dict[str, Any]] = [
    {},
    {"weight": torch.tensor([0.1, 1.3, 0.7, 2.9, 0.37])},
    {"label_smoothing": 0.1},
    {"weight": torch.tensor([0.1, 1.3, 0.7, 2.9, 0.37]), "label_smoothing": 0.1},
    {"ignore_index": 4},
    {"ignore_index": 4, "weight": torch.tensor([0.1, 1.3, 0.7, 2.9, 0.37]), "label_smoothing": 0.2},
]


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, D).to(dtype), torch.randint(C, (N,)), torch.randn(N, C).to(dtype)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.Linear(16, C)).to(dtype)


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))


def focal(out: Tensor, labels: Tensor) -> Tensor:
    return (1 - out.softmax(1).gather(1, labels[:, None])[:, 0]) ** 2


def cases(dtype: torch.dtype) -> list[Any]:
    """A task, and the loss of its loop for outputs and places."""
    x, y, z = data(dtype)
    out = []
    for settings in CROSS_ENTROPIES:
        options: dict[str, Any] = {name: v.to(dtype) if name == "weight" else v for name, v in settings.items()}
        for reduction in ("mean", "sum"):
            out.append(
                pytest.param(
                    classification(x, y, reduction=reduction, **options),
                    lambda out, i, r=reduction, o=options: F.cross_entropy(out, y[i], reduction=r, **o),
                    id=f"cross entropy {reduction} {sorted(options)}",
                )
            )
    soft, several, weight = z.softmax(1), (z > 0).to(dtype), torch.tensor([0.1, 1.3, 0.7, 2.9, 0.37]).to(dtype)
    positive = nn.BCEWithLogitsLoss(pos_weight=weight, reduction="sum")
    margin, huber = nn.MultiMarginLoss(), nn.HuberLoss(delta=0.5)
    others = {
        "soft labels": (
            classification(x, soft, weight=weight),
            lambda out, i: F.cross_entropy(out, soft[i], weight=weight),
        ),
        "several labels": (
            classification(x, several.long(), loss="binary_cross_entropy"),
            lambda out, i: F.binary_cross_entropy_with_logits(out, several[i]),
        ),
        "a module that sums": (classification(x, several, loss=positive), lambda out, i: positive(out, several[i])),
        "margin": (classification(x, y, loss=margin), lambda out, i: margin(out, y[i])),
        "a function": (classification(x, y, loss=focal), lambda out, i: focal(out, y[i]).mean()),
        "accumulated": (
            classification(x, y, accumulate=3, weight=weight),
            lambda out, i: F.cross_entropy(out, y[i], weight=weight) / 3,
        ),
        "squares": (regression(x, z), lambda out, i: F.mse_loss(out, z[i])),
        "summed squares": (regression(x, z, reduction="sum"), lambda out, i: F.mse_loss(out, z[i], reduction="sum")),
        "huber": (regression(x, z, loss=huber), lambda out, i: huber(out, z[i])),
    }
    return out + [pytest.param(*case, id=name) for name, case in others.items()]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("task", "loop"), cases(torch.float32))
def test_the_gradient_of_the_shares_is_the_loop_s_bit_for_bit(task, loop, threads):
    model, (x, *_) = network(), data()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for size in SIZES:
            index = torch.randperm(N)[:size]
            total = loop(model(x[index]), index)
            if not total.isnan():  # all labels of the batch are ignored
                shares = task.losses(model, task.data(index))
                torch.testing.assert_close(shares.sum(), total)
                for a, b in zip(gradients(model, shares.sum()), gradients(model, total), strict=True):
                    assert torch.equal(a, b)
    finally:
        torch.set_num_threads(before)


def test_a_plain_sum_of_shares_is_exact_for_plain_cross_entropy_alone():
    model, (x, y, _) = network(), data()
    unlike = {}
    for name, options in {"plain": {}, "smoothed": {"label_smoothing": 0.1}, "weighted": CROSS_ENTROPIES[1]}.items():
        counts = options.get("weight", torch.ones(C))[y]
        unlike[name] = 0
        for size in range(1, N):
            out, own = model(x[:size]), y[:size]
            summed = (F.cross_entropy(out, own, reduction="none", **options) / counts[:size].sum()).sum()
            pairs = zip(gradients(model, summed), gradients(model, F.cross_entropy(out, own, **options)), strict=True)
            unlike[name] += not all(torch.equal(a, b) for a, b in pairs)
    assert unlike["plain"] == 0 and unlike["smoothed"] > 10 and unlike["weighted"] > 10, unlike


@pytest.mark.parametrize(("task", "loop"), cases(torch.float64))
def test_each_share_is_of_its_own_example_and_together_they_have_the_gradient_of_the_loop(task, loop):
    model, (x, *_), index = network(torch.float64), data(torch.float64), torch.arange(12)
    inputs, labels = task.data(index)
    inputs.requires_grad_()
    shares = task.losses(model, (inputs, labels))
    summed = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for i in index:
        alone = torch.where(index == i, 1.0, 0.0).double()
        (moved,) = torch.autograd.grad(shares @ alone, inputs, retain_graph=True)
        assert not moved[index != i].any()
        summed = [a + b for a, b in zip(summed, gradients(model, shares @ alone), strict=True)]
    for a, b in zip(summed, gradients(model, loop(model(x[index]), index)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def test_shares_can_be_differentiated_twice_in_their_weights():
    model, task, index = network(torch.float64), cases(torch.float64)[3].values[0], torch.arange(9)
    shares = task.losses(model, task.data(index))
    weights = torch.ones(9).double().requires_grad_()
    parameters = list(model.parameters())
    gradient = torch.autograd.grad((shares * weights).sum(), parameters, create_graph=True)
    v = [torch.randn_like(parameter) for parameter in parameters]
    by_weight, *_ = torch.autograd.grad(gradient, [weights, *parameters], v)
    for i in range(9):
        alone = gradients(model, task.losses(model, task.data(index)) @ torch.eye(9).double()[i])
        naive = sum(float((a * b).sum()) for a, b in zip(alone, v, strict=True))
        assert float(by_weight[i]) == pytest.approx(naive, rel=1e-10)


# ------------------------------------------------------------------------------------------- runs


class Pairs(Dataset):
    """Examples (input, label) of different lengths."""

    def __init__(self) -> None:
        self.x, self.y, _ = data()

    def __len__(self) -> int:
        return N

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return self.x[place, : 3 + place % 4], self.y[place]


def padded(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Inputs padded to the longest of the batch, then to the width of the network; their mean depends on the first."""
    rows = nn.utils.rnn.pad_sequence([x for x, _ in examples], batch_first=True, padding_value=float("nan"))
    rows = F.pad(rows.nan_to_num(1.0 / rows.shape[1]), (0, D - rows.shape[1]))
    return rows, torch.stack([y for _, y in examples])


def recorded(path: Any, batch_of: Any, loss: Any, passes: int = 1) -> tuple[dualform.Memory, nn.Module]:
    model = network()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(2)
    with dualform.record(model, optimizer, path, progress=False) as tape:
        for _ in range(2):
            for number, index in enumerate(torch.randperm(N).split(7)):
                x, y = batch_of(index)
                tape.note(index=index)
                loss(model(x), y).backward()
                if number % passes == passes - 1:
                    optimizer.step()
                    optimizer.zero_grad()
    return dualform.open(path), model


def test_two_lines_run_a_recorded_training_on_tensors_again(tmp_path):
    x, y, _ = data()
    weight = torch.tensor([0.1, 1.3, 0.7, 2.9, 0.37])
    loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)
    memory, model = recorded(tmp_path / "m", lambda i: (x[i], y[i]), lambda out, own: loss(out, own) / 3, passes=3)
    run = memory.replay(model, *classification(x, y, weight=weight, label_smoothing=0.1, accumulate=3))
    assert run.check().exact
    for again, trained in zip(run.retrain().parameters(), model.parameters(), strict=True):
        assert torch.equal(again, trained)
    assert not memory.replay(model, *classification(x, y, weight=weight, accumulate=3)).check().exact


def test_examples_are_collated_together_as_in_the_loop(tmp_path):
    pairs = Pairs()
    memory, model = recorded(tmp_path / "m", lambda i: padded([pairs[j] for j in i]), F.cross_entropy)
    run = memory.replay(model, *classification(pairs, collate=padded))
    assert run.check().exact
    assert memory.replay(model, *classification(DataLoader(pairs, collate_fn=padded))).check().exact
    one_by_one = classification(
        pairs, collate=lambda rows: tuple(map(torch.cat, zip(*(padded([row]) for row in rows), strict=True)))
    )
    assert not memory.replay(model, *one_by_one).check().exact


def test_regression_on_a_data_set_runs_again(tmp_path):
    x, _, z = data()
    memory, model = recorded(tmp_path / "m", lambda i: (x[i], z[i]), F.mse_loss)
    assert memory.replay(model, *regression(TensorDataset(x, z, torch.arange(N)))).check().exact
    mapped = [{"in": row, "out": own} for row, own in zip(x, z, strict=True)]
    assert memory.replay(model, *regression(mapped, split=lambda b: (b["in"], b["out"]))).check().exact


def test_a_column_may_hold_the_indices(tmp_path):
    x, y, _ = data()
    memory, model = recorded(tmp_path / "m", lambda i: (x[i], y[i]), F.cross_entropy)
    order = torch.randperm(N)
    shuffled = [{"x": x[i], "y": y[i], "number": int(i)} for i in order]
    split = lambda batch: (batch["x"], batch["y"])  # noqa: E731
    assert memory.replay(model, *classification(shuffled, split=split, index="number")).check().exact
    assert not memory.replay(model, *classification(shuffled, split=split)).check().exact


def test_a_fused_optimiser_is_made_again_from_the_loop_s(tmp_path):
    x, y, _ = data()
    model = network()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with dualform.record(model, optimizer, tmp_path / "m", progress=False) as tape:
        for index in torch.randperm(N).split(7):
            tape.note(index=index)
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "m")
    assert memory.replay(model, *classification(x, y), optimizer=optimizer_of(optimizer)).check().exact
    assert not memory.replay(model, *classification(x, y)).check().exact


# ------------------------------------------------------------------------------------------- errors


class Endless(IterableDataset):
    def __iter__(self):
        return iter(zip(*data()[:2], strict=True))


def test_what_does_not_fit_is_answered_with_a_sentence():
    model, (x, y, z) = network(), data()
    with pytest.raises(QueryError, match="the labels are missing"):
        classification(x)
    with pytest.raises(QueryError, match="60 inputs and 59 labels"):
        classification(x, y[1:])
    with pytest.raises(QueryError, match="without a length"):
        classification(Endless())
    with pytest.raises(QueryError, match="index 60, but the data have 60 examples"):
        classification(x, y).data(torch.tensor([3, 60]))
    with pytest.raises(QueryError, match="index 77, but the data have 60"):
        classification(Pairs(), collate=padded).data(torch.tensor([77]))
    alone = classification(TensorDataset(x))
    with pytest.raises(QueryError, match="its labels are missing"):
        alone.losses(model, alone.data(torch.arange(3)))
    with pytest.raises(QueryError, match="has 2 numbers for 60 examples"):
        classification([{"x": row, "index": i % 2} for i, row in enumerate(x)], index="index")
    twenty = classification([{"x": row, "index": i + 20} for i, row in enumerate(x)], index="index")
    with pytest.raises(QueryError, match="noted index 3, and no example"):
        twenty.data(torch.tensor([3]))
    hinge: Any = "hinge"
    with pytest.raises(QueryError, match="'hinge' is not known"):
        classification(x, y, loss=hinge)
    with pytest.raises(QueryError, match="are options of loss='cross_entropy'"):
        classification(x, y, loss="binary_cross_entropy", label_smoothing=0.1)
    none: Any = "none"
    with pytest.raises(SizeError, match="reduction='none' is not known"):
        classification(x, y, reduction=none)
    one_number = classification(x, y, loss=F.cross_entropy)
    with pytest.raises(QueryError, match="one loss an example"):
        one_number.losses(model, one_number.data(torch.arange(3)))
    narrow = regression(x, z[:, 0])
    with pytest.raises(QueryError, match=r"\(3, 5\) and the labels \(3,\)"):
        narrow.losses(model, narrow.data(torch.arange(3)))
