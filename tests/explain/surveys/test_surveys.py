"""A survey of a trained network: its scores are what autograd gives, and it does not pretend to have steps."""

from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch
from helpers import unchecked
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
from dualform.errors import DualformWarning, MemoryExists, NoSteps, NotAMemory, QueryError
from dualform.explain import Memory
from dualform.store import Recipe, RecipeSource

N, C, QUERIES = 14, 3, 4


class Tokens(nn.Module):
    """An embedding tied to the output, a transformer block, a layer that is called twice, and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(9, 6), nn.Linear(6, 9)
        self.out.weight = self.embedding.weight
        self.block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True)
        self.twice = nn.Linear(6, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.head = nn.Linear(9, C)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.block(self.embedding(x))
        hidden, _ = self.lstm(self.twice(torch.tanh(self.twice(hidden))))
        return self.head(self.out(hidden).mean(1))


class Shared(nn.Module):
    """Two layers with one weight and a bias each, and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)
        self.right.weight = self.left.weight
        self.norm, self.out = nn.BatchNorm1d(5), nn.Linear(5, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(torch.tanh(self.right(torch.tanh(self.left(x))))))


class Sequence(nn.Module):
    """A layer that is called twice, an LSTM with its two biases, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 3, batch_first=True)
        self.attention, self.head = nn.MultiheadAttention(3, 1, batch_first=True), nn.Linear(3, C)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.twice(torch.tanh(self.twice(x))))
        mixed, _ = self.attention(hidden, hidden, hidden)
        return self.head(mixed.mean(1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, C)), lambda n: torch.randn(n, 5).double()),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 2, groups=2, stride=2), nn.Flatten(),
            nn.Dropout(0.5), nn.Linear(16, C),
        ),
        lambda n: torch.randn(n, 2, 4, 4).double(),
    ),
    "tokens": (Tokens, lambda n: torch.randint(9, (n, 5))),
    "sequence": (Sequence, lambda n: torch.randn(n, 5, 4).double()),
    "shared": (Shared, lambda n: torch.randn(n, 5).double()),
}  # fmt: skip


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Case:
    """A network that was trained for a while, its examples and its survey."""

    def __init__(self, name: str, path, **options) -> None:
        torch.manual_seed(1)
        make, inputs = NETWORKS[name]
        self.model = make().double()
        self.x, self.y, self.queries = inputs(N), torch.randint(C, (N,)), inputs(QUERIES)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for _ in range(5):
            losses(self.model, (self.x, self.y)).mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        self.memory = self.survey(path, **options)

    def survey(self, path, **options) -> Memory:
        chosen = {"examples": N, "batch_size": 5, "dtype": "float64", "progress": False} | options
        return dualform.survey(self.model, losses, self.data, path, **chosen)

    def data(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


@pytest.fixture(scope="module", params=list(NETWORKS))
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp("survey") / "memory")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return Case("mlp", tmp_path_factory.mktemp("survey") / "memory", columns={"label": list("abcabcabcabcab")})


def gradients(model: nn.Module, values: Tensor, names: list[str]) -> dict[str, Tensor]:
    """By parameter the gradient of each value: (value, *shape)."""
    parameters = dict(model.named_parameters())
    leaves = [parameters[name] for name in names]
    rows = [torch.autograd.grad(value, leaves, retain_graph=True, materialize_grads=True) for value in values]
    return {name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def naive_products(case: Case, model: nn.Module, target: int) -> Tensor:
    """⟨∇φ, ∇ℓ_i⟩ over the parameters of recorded layers, by autograd."""
    model.eval()
    names = list(dict.fromkeys(name for layer in case.memory.store.manifest.layers for name in layer.parameters))
    of_losses = gradients(model, losses(model, (case.x, case.y)), names)
    of_targets = gradients(model, model(case.queries)[:, target], names)
    return sum(
        (of_targets[name].flatten(1) @ of_losses[name].flatten(1).mT for name in names),
        torch.zeros(QUERIES, N).double(),
    )


def test_gradient_scores_are_minus_the_products_of_autograd(case):
    scores = case.memory.scores(case.model, case.queries, target=1)
    torch.testing.assert_close(scores.values, -naive_products(case, case.model, 1), rtol=1e-10, atol=1e-12)
    assert (scores.index == np.arange(N)).all()


def test_what_has_no_slots_is_left_out_by_name(case):
    scores = case.memory.scores(case.model, case.queries)
    norms = {name for name, _ in case.model.named_parameters() if "norm" in name}
    assert set(scores.left_out) == norms
    assert all(f"'{name}'" in str(scores) for name in norms)


def test_a_survey_changes_nothing(tmp_path):
    case = Case("shared", tmp_path / "memory")
    case.model.train()
    losses(case.model, (case.x, case.y)).sum().backward()
    before = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    grads = [torch.zeros(0) if p.grad is None else p.grad.clone() for p in case.model.parameters()]
    state = torch.get_rng_state()
    memory = case.survey(tmp_path / "again")
    memory.scores(case.model, case.queries)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in case.model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in case.model.state_dict().items())
    after = [torch.zeros(0) if p.grad is None else p.grad for p in case.model.parameters()]
    assert all(torch.equal(grad, same) for grad, same in zip(after, grads, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in case.model.modules())


def test_several_checkpoints_add_up_with_their_learning_rates(small, tmp_path):
    other = NETWORKS["mlp"][0]().double()
    torch.save(small.model.state_dict(), tmp_path / "last.pt")
    checkpoints = [(other.state_dict(), 0.5), (tmp_path / "last.pt", 0.25)]
    memory = small.survey(tmp_path / "two", checkpoints=checkpoints)
    expected = -(0.5 * naive_products(small, other, 2) + 0.25 * naive_products(small, small.model, 2))
    for model in (small.model, NETWORKS["mlp"][0]().double()):  # the weights are in the survey
        scores = memory.scores(model, small.queries, target=2)
        torch.testing.assert_close(scores.values, expected, rtol=1e-10, atol=1e-12)
    assert "2 checkpoints" in str(scores) and scores.learning_rates == (0.5, 0.25)
    first = memory.only("checkpoint = 0").scores(small.model, small.queries, target=2)
    torch.testing.assert_close(first.values, -0.5 * naive_products(small, other, 2), rtol=1e-10, atol=1e-12)
    ours, alone = (m.scores(small.model, small.queries, method="ekfac", target=2) for m in (memory, small.memory))
    torch.testing.assert_close(ours.values, alone.values)  # at the last checkpoint


@pytest.mark.parametrize("damping", [None, 1e-3])
@pytest.mark.parametrize("name", ["mlp", "cnn", "sequence"])
def test_ekfac_is_the_formula_with_full_matrices(name, damping, tmp_path):
    """(F + δ)⁻¹ with F = (U_E ⊗ U_K) diag(Λ) (U_E ⊗ U_K)ᵀ written out, from gradients by autograd."""
    case = Case(name, tmp_path / "memory")
    scores = case.memory.scores(case.model, case.queries, method="ekfac", target=0, damping=damping)
    model = case.model.eval()
    expected = torch.zeros(QUERIES, N, dtype=torch.float64)
    for layer in case.memory.store.manifest.layers:
        if layer.name in scores.left_out:
            assert layer.indexed or layer.parts > 1
            continue
        names = list(layer.parameters)
        weights = [
            torch.cat([tensors[n].reshape(len(tensors[n]), layer.d_out, -1) for n in names], 2)
            for tensors in (
                gradients(model, losses(model, (case.x, case.y)), names),
                gradients(model, model(case.queries)[:, 0], names),
            )
        ]
        rows = [rows_of(case, layer.name, "key"), rows_of(case, layer.name, "error")]
        keys = torch.cat([rows[0], torch.ones(len(rows[0]), len(layer.biases), dtype=torch.float64)], 1)
        input_basis, error_basis = (torch.linalg.eigh(m.mT @ m / len(m))[1] for m in (keys, rows[1]))
        joint = torch.kron(error_basis, input_basis)  # of matrices flattened row by row
        fisher = joint @ torch.diag((weights[0].flatten(1) @ joint).square().mean(0)) @ joint.mT
        added = 0.1 * fisher.trace() / len(fisher) if damping is None else damping
        inverse = torch.linalg.inv(fisher + added * torch.eye(len(fisher), dtype=torch.float64))
        expected -= weights[1].flatten(1) @ inverse @ weights[0].flatten(1).mT / N
    torch.testing.assert_close(scores.values, expected, rtol=1e-8, atol=1e-12)


def rows_of(case: Case, layer: str, kind: Literal["key", "error"]) -> Tensor:
    store = case.memory.store
    return store.gather(layer, np.arange(store.slots(layer)), kind)


def test_an_example_speaks_against_its_own_loss_and_for_its_label(small):
    def own_loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, small.y, reduction="none")

    for method in ("gradient", "ekfac"):
        loss = small.memory.scores(small.model, small.x, target=own_loss, method=method)
        label = small.memory.scores(small.model, small.x, target=small.y, method=method)
        assert (loss.values.diagonal() < 0).all()
        assert (label.values.diagonal() > 0).double().mean() > 0.8


def test_answers_are_tables_that_say_that_they_are_approximations(small):
    for method, words in (("gradient", "gradient similarity"), ("ekfac", "EK-FAC")):
        scores = small.memory.scores(small.model, small.queries, method=method)
        assert words in str(scores) and "An approximation" in str(scores)
        assert "not what would have happened" in str(scores)
        frame = scores.to_pandas()
        assert len(frame) == QUERIES * N
        index, value = scores.top(1)[0]
        assert value == scores.values[0].max() and scores.values[0, index] == value
        groups = scores.by("label")
        assert set(groups) == {"a", "b", "c"}
        torch.testing.assert_close(torch.stack(list(groups.values())).sum(0), scores.values.sum(1))


def test_a_mask_chooses_examples(small):
    scores = small.memory.only("label = 'a'").scores(small.model, small.queries, method="ekfac")
    everything = small.memory.scores(small.model, small.queries, method="ekfac")
    torch.testing.assert_close(scores.values, everything.values[:, torch.from_numpy(scores.index)])
    assert len(scores.index) == 5


@pytest.mark.parametrize(
    "question",
    [
        lambda memory, case: memory.certificate,
        lambda memory, case: memory.check(case.model),
        lambda memory, case: memory.at(1),
        lambda memory, case: memory.ledger("label"),
        lambda memory, case: memory.sizes("0"),
        lambda memory, case: memory.along("0", torch.ones(7, 5)),
        lambda memory, case: memory.replay(case.model, losses, case.data),
        lambda memory, case: memory.without("label = 'a'").predict(case.model, case.queries),
        lambda memory, case: memory.attend(case.model, case.queries).output("0"),
        lambda memory, case: memory.attend(case.model, case.queries).top(layer="0", per="slot"),
        lambda memory, case: memory.attend(case.model, case.queries).by("label", layer="0"),
        lambda memory, case: memory.attend(case.model, case.queries).timeline(layer="0", score="weight"),
    ],
)
def test_questions_about_training_are_refused_by_a_sentence(small, question):
    with pytest.raises(NoSteps, match="slots without steps"):
        question(small.memory, small)


def test_weights_alpha_and_the_network_itself_can_be_asked(small):
    hits = small.memory.attend(small.model, small.queries).top(3, layer="0", score="weight", per="slot")
    torch.testing.assert_close(hits.weight, (small.queries @ small.x.mT).topk(3).values)
    torch.testing.assert_close(small.memory.predict(small.model, small.queries), small.model(small.queries))
    assert "a survey of 14 visits at the trained weights" in repr(small.memory)


def test_examples_have_the_indices_that_were_given(small, tmp_path):
    memory = small.survey(
        tmp_path / "some", examples=torch.tensor([9, 2, 5]), columns={"name": ["nine", "two", "five"]}
    )
    scores = memory.scores(small.model, small.queries, target=1)
    assert scores.index.tolist() == [2, 5, 9]
    torch.testing.assert_close(scores.values, -naive_products(small, small.model, 1)[:, [2, 5, 9]])
    torch.testing.assert_close(scores.by("name")["nine"], scores.values[:, 2])


def test_a_wide_layer_has_no_ekfac_factors_and_is_named(tmp_path, monkeypatch):
    case = Case("mlp", tmp_path / "memory")
    monkeypatch.setattr("dualform.explain.surveys.scores.WIDEST", 6)
    with pytest.raises(QueryError, match="'2': its EK-FAC factors of 8 × 8 and 3 × 3 would take"):
        case.memory.scores(case.model, case.queries, method="ekfac")


def test_a_frozen_layer_takes_no_part(tmp_path):
    case = Case("mlp", tmp_path / "memory")
    for name in ("0.weight", "0.bias", "2.bias"):
        case.model.get_parameter(name).requires_grad_(False)
    memory = case.survey(tmp_path / "frozen")
    scores = memory.scores(case.model, case.queries, target=1)
    of_losses, of_targets = (
        gradients(case.model, values, ["2.weight"])["2.weight"].flatten(1)
        for values in (losses(case.model, (case.x, case.y)), case.model(case.queries)[:, 1])
    )
    torch.testing.assert_close(scores.values, -(of_targets @ of_losses.mT))
    assert not scores.left_out


def test_bad_input_is_answered_by_a_sentence(small, tmp_path):
    for options, words in [
        ({"examples": 0}, "examples=0"),
        ({"examples": [1, 1]}, "once"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"columns": {"index": range(N)}}, "writes the column 'index' itself"),
        ({"columns": {"label": [1, 2]}}, "one value for each of the 14 examples"),
        ({"checkpoints": []}, "holds none"),
    ]:
        with pytest.raises(QueryError, match=words):
            small.survey(tmp_path / "bad", **options)
    with pytest.raises(QueryError, match="each example's own loss"):
        dualform.survey(small.model, lambda m, b: losses(m, b).mean(), small.data, tmp_path / "bad", examples=N)
    with pytest.raises(QueryError, match="damping=0"):
        small.memory.scores(small.model, small.queries, method="ekfac", damping=0.0)
    with unchecked(), pytest.raises(QueryError, match="method='tracin'"):
        small.memory.scores(small.model, small.queries, method="tracin")  # pyright: ignore[reportArgumentType]
    with pytest.raises(MemoryExists):
        small.survey(small.memory.path)
    small.model.requires_grad_(False)
    try:
        with pytest.raises(QueryError, match="frozen"):
            small.survey(tmp_path / "bad")
    finally:
        small.model.requires_grad_(True)


def test_a_pass_that_is_broken_off_leaves_nothing(small, tmp_path):
    def interrupted(index: Tensor) -> tuple[Tensor, Tensor]:
        if 10 in index:
            raise KeyboardInterrupt
        return small.data(index)

    options = {"examples": N, "batch_size": 5, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        dualform.survey(small.model, losses, interrupted, tmp_path / "m", **options)
    with pytest.raises(NotAMemory):
        dualform.open(tmp_path / "m")
    dualform.survey(small.model, losses, small.data, tmp_path / "m", **options)
    with pytest.raises(MemoryExists):  # and that one stays
        dualform.survey(small.model, losses, interrupted, tmp_path / "m", **options)
    assert len(dualform.open(tmp_path / "m").visits) == N


def test_losses_that_are_shares_of_a_mean_give_a_warning(small, tmp_path):
    shares = lambda model, batch: losses(model, batch) / len(batch[1])  # noqa: E731
    with pytest.warns(DualformWarning, match="do not divide by the batch size"):
        dualform.survey(small.model, shares, small.data, tmp_path / "shares", examples=N, progress=False)


def test_a_recorded_training_has_no_approximate_scores(small, tmp_path):
    model = NETWORKS["mlp"][0]().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", progress=False):
        losses(model, (small.x, small.y)).mean().backward()
        optimizer.step()
    with pytest.raises(QueryError, match="not a survey"):
        dualform.open(tmp_path / "run").scores(model, small.queries)


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-5), ("float16", 5e-3)])
def test_smaller_slots_give_nearly_the_same(small, tmp_path, dtype, close):
    scores = small.survey(tmp_path / dtype, dtype=dtype).scores(small.model, small.queries, target=1)
    expected = -naive_products(small, small.model, 1)
    assert (scores.values.double() - expected).abs().max() < close * expected.abs().max()


def test_a_survey_can_be_described(tmp_path):
    np.savez(tmp_path / "train.npz", inputs=np.zeros((N, 5), np.float32))
    model, x, y = Shared(), torch.randn(N, 5), torch.arange(N) % C

    def surveyed(**described) -> Memory:
        return dualform.survey(
            model, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1], reduction="none"), lambda i: (x[i], y[i]),
            tmp_path / "survey", examples=N, describe=described, overwrite=True, progress=False,
        )  # fmt: skip

    recipe = surveyed(model="train:make", train=tmp_path / "train.npz", classes=["a", "b", "c"]).recipe
    assert recipe == Recipe("train:make", RecipeSource(file="../train.npz"), classes=("a", "b", "c"))
    with pytest.raises(QueryError, match="names 4 classes"):
        surveyed(classes=["a", "b", "c", "d"])
