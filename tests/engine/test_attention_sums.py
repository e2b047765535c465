"""Sums over groups that need no scan are those of the full matrix."""

from unittest import mock

import pytest
import torch
from helpers import Naive, close
from torch import nn, optim

import dualform
from dualform.engine import attention_sums as keysums
from dualform.explain.ask import contributions as parts
from dualform.types import DType

LAYERS = ("0", "2")


def trained(path, dtype: DType, embedded: bool = False):
    torch.manual_seed(0)
    first = nn.Embedding(9, 5) if embedded else nn.Linear(6, 5)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(5, 3), *([nn.Flatten()] if embedded else [])).double()
    optimizer = optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with dualform.record(model, optimizer, path, dtype=dtype, progress=False) as tape:
        for _ in range(7):
            y = torch.randint(3, (8,))
            tape.note(label=y, source=[f"s{i % 2}" for i in range(8)])
            model(inputs(8, embedded)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return dualform.open(path), model


def inputs(count: int, embedded: bool):
    return torch.randint(9, (count, 4)) if embedded else torch.randn(count, 6, dtype=torch.float64)


def no_scan():
    return mock.patch("dualform.explain.ask.one_layer.scan", side_effect=AssertionError("a scan"))


@pytest.mark.parametrize("embedded", [False, True], ids=["linear", "embedding"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_sums_of_weights_need_no_scan_and_are_those_of_one(dtype, embedded, tmp_path):
    memory, model = trained(tmp_path / "memory", dtype, embedded)
    for view in (memory, memory.at(4).without("source = 's1'")):
        spot = view.attend(model, inputs(5, embedded))
        for layer in LAYERS:
            with no_scan():
                fast = spot.by("label", layer=layer, score="weight", progress=False)
            with mock.patch.object(keysums, "LARGEST", 0):
                slow = spot.by("label", layer=layer, score="weight", progress=False)
            assert fast.names == slow.names
            close(fast.values, slow.values, 1e-12 if dtype == "float64" else 1e-5)


def test_total_attention_behind_a_relu_needs_no_scan(tmp_path):
    memory, model = trained(tmp_path / "memory", "float64")
    spot = memory.attend(model, inputs(5, False))
    with no_scan():
        fast = spot.by("label", layer="2", score="abs", progress=False)
        with pytest.raises(AssertionError, match="a scan"):  # the first layer sees negative numbers
            spot.by("label", layer="0", score="abs", progress=False)
    slots = Naive(memory.path).slots("2")
    labels = memory.store.visits["label"].to_numpy()[slots.visit]
    alpha = model[:2](spot.inputs).detach() @ slots.keys.mT
    for i, name in enumerate(fast.names):
        close(fast.values[:, i], alpha[:, torch.from_numpy(labels == name)].abs().sum(1))


def test_many_queries_take_contributions_from_the_parts_of_the_weights(tmp_path):
    memory, model = trained(tmp_path / "memory", "float64")
    spot = memory.attend(model, inputs(50, False))
    for layer in LAYERS:
        with no_scan(), mock.patch.object(parts, "A_GROUP", 0):
            fast = spot.by("label", layer=layer, progress=False)
        with mock.patch.object(parts, "prefers_parameter_sums", return_value=False):
            slow = spot.by("label", layer=layer, progress=False)
        close(fast.values, slow.values)
        assert fast.residual is not None
        close(fast.residual, torch.zeros(50))


def test_few_queries_are_not_worth_the_parts_of_the_weights(tmp_path):
    memory, _ = trained(tmp_path / "memory", "float64")
    layer, _ = memory.store.layer("0")
    groups = parts.group_slots(memory.store, ["0"], "label")
    with mock.patch.object(parts, "A_GROUP", 0):
        assert not parts.prefers_parameter_sums(
            memory.store, layer, 2, groups, alone=True
        )  # 30 weights, 11 numbers a slot
        assert parts.prefers_parameter_sums(memory.store, layer, 3, groups, alone=True)
        assert not parts.prefers_parameter_sums(memory.store, layer, 3, groups, alone=False)
    assert not parts.prefers_parameter_sums(
        memory.store, layer, 3, groups, alone=True
    )  # nor are many groups of few slots
