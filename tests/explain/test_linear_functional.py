"""A number that is linear in a layer's weights is an exact sum over training."""

import pytest
import torch
from torch import nn

import dualform
from dualform.errors import QueryError
from dualform.explain import Memory

OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


@pytest.fixture(scope="module", params=OPTIMISERS)
def run(request, tmp_path_factory) -> tuple[Memory, nn.Sequential]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer, path = OPTIMISERS[request.param](model.parameters()), tmp_path_factory.mktemp("memory")
    with dualform.record(model, optimizer, path, dtype="float64", overwrite=True) as tape:
        for step in range(8):
            tape.note(index=torch.arange(4) + 4 * (step % 3), label=torch.arange(4) % 2)
            model(torch.randn(4, 6).double()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return dualform.open(path), model


def test_the_parts_sum_to_the_number(run):
    memory, model = run
    linear, g = model[0], torch.Generator().manual_seed(1)
    A, a = torch.randn(5, 6, generator=g).double(), torch.randn(5, generator=g).double()
    for bias in (None, a):
        whole = (linear.weight * A).sum().item() + (0.0 if bias is None else (linear.bias * bias).sum().item())
        spot = memory.along("0", A, bias)
        for column in ("index", "label", "step"):
            found = spot.by(column, layer="0", progress=False)
            assert found.total is not None and found.residual is not None
            assert float(found.total[0]) == pytest.approx(whole, abs=1e-10) and abs(float(found.residual[0])) < 1e-10


def test_the_part_of_a_group_is_that_of_its_weights(run):
    memory, _ = run
    A = torch.randn(5, 6, generator=torch.Generator().manual_seed(2)).double()
    found = memory.along("0", A).by("label", layer="0", progress=False)
    ledger = memory.ledger("label", progress=False)
    parts = [float((ledger.groups[name]["0.weight"] * A).sum()) for name in found.names]
    assert found.values[0].tolist() == pytest.approx(parts, abs=1e-10)


def test_top_slots_and_times_add_up_to_the_same(run):
    memory, _ = run
    A = torch.randn(5, 6, generator=torch.Generator().manual_seed(3)).double()
    spot = memory.along("0", A)
    total = float(spot.by("label", layer="0", progress=False).values.sum())
    assert float(spot.top(1000, layer="0", progress=False, per="slot").contribution.sum()) == pytest.approx(
        total, abs=1e-10
    )
    assert float(spot.timeline(layer="0", progress=False).values.sum()) == pytest.approx(total, abs=1e-10)


def test_what_does_not_fit_is_refused(run):
    memory, _ = run
    A = torch.ones(5, 6)
    for layer, matrix, vector, said in (
        ("0", torch.ones(6, 5), None, r"its weights are \(5, 6\)"),
        ("0", A, torch.ones(6), "does not fit layer '0'"),
        ("0", A * torch.nan, None, "NaN"),
        ("0", A * 0, None, "A is zero"),
    ):
        with pytest.raises(QueryError, match=said):
            memory.along(layer, matrix, vector)
    with pytest.raises(QueryError, match="on layer '0'"):
        memory.along("0", A).by("label", layer="2")
    with pytest.raises(QueryError, match="contributions only"):
        memory.along("0", A).by("label", layer="0", score="weight")
    assert "Spotlight" in memory.along("0", A)._repr_html_()
    with pytest.raises(QueryError, match="no other target"):
        memory.along("0", A).by("label", layer="0", target=1)
