"""Heads through training, and which training examples built what separates."""

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform import svm
from dualform.attention import build
from dualform.errors import ModelMismatch, QueryError
from dualform.explain import Memory
from dualform.models import TransformerLM

pytest.importorskip("numba")

TOKENS = torch.randint(12, (24, 9), generator=torch.Generator().manual_seed(0))
ASKED = TOKENS[:6, :-1]


class Torchs(nn.Module):
    """torch's own attention, recorded as one map."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attn = nn.Embedding(12, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embed(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.head(e + self.attn(e, e, e, attn_mask=mask, need_weights=False)[0])


MODELS = {
    "ours": lambda: TransformerLM(12, 8, width=16, heads=2, layers=1),
    "torchs": Torchs,
}
LAYERS = {"ours": "blocks.0.attn", "torchs": "attn"}


@pytest.fixture(scope="module", params=["ours-sgd", "ours-adamw", "torchs-sgd"])
def run(request, tmp_path_factory) -> tuple[Memory, nn.Module, str]:
    kind, optimiser = request.param.split("-")
    torch.manual_seed(0)
    model, path = MODELS[kind]().double(), tmp_path_factory.mktemp("memory")
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        if optimiser == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=0.02)
    )
    with dualform.record(model, optimizer, path, dtype="float64", overwrite=True) as tape:
        for step in range(12):
            index = torch.arange(6) + 6 * (step % 4)
            tape.note(index=index, label=TOKENS[index, 0] % 3)
            x = TOKENS[index]
            nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return dualform.open(path), model, LAYERS[kind]


def test_the_direction_of_a_head_is_a_sum_over_training(run):
    """Once through the queries, once through the keys: each way the parts and what is left of the start are all."""
    memory, model, layer = run
    for head in svm.reports(model, ASKED, progress=False, null=0, nuclear=False)[layer]:
        D = head.separation.W / head.separation.W.norm()
        whole = float((head.W * D).sum())
        found = svm.origin(memory, layer, head)
        assert found.total == pytest.approx(whole, abs=1e-12)
        for column in ("index", "label"):
            built = found.by(column, progress=False)
            for way in (built.queries, built.keys):
                assert way.total is not None and way.residual is not None
                assert float(way.total[0]) == pytest.approx(whole, abs=1e-9) and abs(float(way.residual[0])) < 1e-9
            assert sum(each.mean for each in built) + built.initial == pytest.approx(whole, abs=1e-9)
            best = built.largest(3)
            assert [each.mean for each in best] == sorted((each.mean for each in built), reverse=True)[:3]
            assert len(built.to_pandas()) == len(built)


def test_a_trajectory_is_the_report_of_each_step(run):
    memory, model, layer = run
    found = svm.trajectory(model, ASKED, memory, steps=3, progress=False, null=1, nuclear=False)
    assert found.steps == (0, 4, 8, 12) and found.layers == [layer]
    for step, reports in found:
        alone = svm.reports(
            model,
            ASKED,
            weights=memory.at(step).weights(progress=False),
            progress=False,
            null=1,
            nuclear=False,
        )[layer]
        for a, b in zip(reports[layer], alone, strict=True):
            assert a.row()["cosine"] == pytest.approx(b.row()["cosine"], abs=1e-9)
            assert torch.equal(a.selected, b.selected)
    now = svm.reports(model, ASKED, progress=False, null=1, nuclear=False)[layer]
    assert found.curve(layer, 0, "norm")[-1] == pytest.approx(now[0].row()["norm"], rel=1e-9)
    changed = found.curve(layer, 1, "changed")
    assert changed[0] != changed[0] and all(0 <= each <= 1 for each in changed[1:])
    assert len(found.to_pandas()) == 4 * 2
    first, last = found.head(layer, 0)[0].found, found.head(layer, 0)[-1].found
    assert first is not None and first.moved == 0.0 and last is not None and last.moved != 0.0


def test_checkpoints_do_as_well_as_a_memory(run):
    memory, model, layer = run
    states = {step: memory.at(step).weights(progress=False) for step in (12, 0)}
    found = svm.trajectory(model, ASKED, states, progress=False, null=0)
    again = svm.trajectory(model, ASKED, memory, steps=[0, 12], progress=False, null=0)
    assert found.steps == (0, 12) and found.curve(layer, 0, "cosine") == again.curve(layer, 0, "cosine")


def test_what_is_not_there_is_refused(run):
    memory, model, layer = run
    found = svm.trajectory(model, ASKED, memory, steps=[12], progress=False, null=0, nuclear=False)
    with pytest.raises(QueryError, match="no layer 'x'"):
        found.curve("x", 0, "norm")
    with pytest.raises(QueryError, match="no 'luck'"):
        found.curve(layer, 0, "luck")
    with pytest.raises(QueryError, match="nuclear norm"):
        svm.origin(memory, layer, found.head(layer, 0)[0], "nuclear")
    with pytest.raises(QueryError, match="no steps to report on"):
        svm.trajectory(model, TOKENS, {})


def test_a_report_of_other_weights_has_no_origin_here(run):
    """An earlier step is asked of the memory at that step; a mask leaves a part of the sum out."""
    memory, model, layer = run
    path = svm.trajectory(model, ASKED, memory, steps=[0, 12], progress=False, null=0, nuclear=False)
    first, last = path.head(layer, 0)
    for asked, head in ((memory, first), (memory.without("label = 1"), last)):
        with pytest.raises(ModelMismatch, match="other weights"):
            svm.origin(asked, layer, head)
    assert svm.origin(memory, layer, last).total != 0


def test_a_head_in_its_own_space_has_no_origin(run):
    memory, _, _ = run
    found = svm.report(build("bn", 16, 2), torch.randn(4, 8, 16), progress=False, null=0, nuclear=False)
    with pytest.raises(QueryError, match="its own space"):
        svm.origin(memory, "x", found[0])
