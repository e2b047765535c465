"""The identity itself: a trained layer is attention over its training. And that it fails without any of its parts."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    EXACT,
    Naive,
    Run,
    batches,
    clip,
    close,
    mlp,
    seeds,
    setups,
    sgd,
    trained,
    watched,
    weight_of,
    whole,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional as F

import dualform
from dualform.engine import coefficients, dual_forward
from dualform.explain import SlotHits
from dualform.store import load_manifest, write_tensors


@st.composite
def duals(draw):
    """(x, W₀, keys, errors, coefficients, ρ), all random."""
    n, m, d_in, d_out = (draw(st.integers(low, 6)) for low in (1, 0, 1, 1))
    random = torch.Generator().manual_seed(draw(seeds))

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    return normal(n, d_in), normal(d_out, d_in), normal(m, d_in), normal(m, d_out), normal(m), draw(st.floats(-1, 1))


@given(dual=duals())
def test_attention_over_the_slots_is_multiplication_with_the_summed_weights(dual):
    x, w0, keys, errors, coefficients, rho = dual
    weight = rho * w0
    for key, error, c in zip(keys, errors, coefficients, strict=True):
        weight = weight + c * torch.outer(error, key)
    close(dual_forward(x, w0, keys, errors, coefficients, rho), x @ weight.T)


@given(dual=duals(), a=st.floats(0.01, 100), negative=st.booleans())
def test_rescaled_keys_and_errors_give_the_same_output_with_other_weights(dual, a, negative):
    x, w0, keys, errors, coefficients, rho = dual
    a = -a if negative else a
    close(
        dual_forward(x, w0, a * keys, errors / a, coefficients, rho),
        dual_forward(x, w0, keys, errors, coefficients, rho),
    )
    close((x @ (a * keys).T), a * (x @ keys.T))


@given(dual=duals(), seed=seeds)
def test_rotated_slots_give_the_same_output(dual, seed):
    """The attention form is not unique (spec/dual-form.md §2.3)."""
    x, w0, keys, errors, _, rho = dual
    random = torch.Generator().manual_seed(seed)
    rotation, _ = torch.linalg.qr(torch.randn(len(keys), len(keys), generator=random, dtype=torch.float64))
    one = torch.ones(len(keys), dtype=torch.float64)
    close(
        dual_forward(x, w0, rotation @ keys, rotation @ errors, one, rho), dual_forward(x, w0, keys, errors, one, rho)
    )


@given(dual=duals(), seed=seeds)
def test_the_output_is_the_sum_over_any_partition_of_the_slots(dual, seed):
    x, w0, keys, errors, coefficients, rho = dual
    group = torch.randint(3, (len(keys),), generator=torch.Generator().manual_seed(seed))
    parts = [dual_forward(x, w0, keys[group == g], errors[group == g], coefficients[group == g], 0.0) for g in range(3)]
    whole_output = dual_forward(x, w0, keys, errors, coefficients, rho)
    close(torch.stack([rho * x @ w0.T, *parts]).sum(0), whole_output)


# ---------------------------------------------------------------- on a recorded memory


def everything_on(path: Path, model: torch.nn.Module | None = None) -> Run:
    """A run that uses all that enters a coefficient: momentum, Nesterov, clip, decay, a schedule, a loaded buffer."""
    model = model or mlp(5, 6, 3)
    optimizer = sgd(model, nesterov=True, weight_decay=0.1)
    for x, y in batches(3, 4, 5, 3, seed=9):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def before(step):
        clip(model, 0.1)(step)
        optimizer.param_groups[0]["lr"] = 0.1 * 0.9**step

    return trained(path, model, optimizer, batches(12, 4, 5, 3), before_step=before)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Run:
    return everything_on(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Run:
    return everything_on(tmp_path_factory.mktemp("complete"), whole())


def naive_output(naive: Naive, layer: str, module: str, x: torch.Tensor) -> torch.Tensor:
    """The dual form of one layer, from the files alone."""
    info = next(info for info in naive.manifest["layers"] if info["name"] == layer)
    biases = next(m["biases"] for m in info["modules"] if m["name"] == module)
    slots, horizon = naive.slots(layer), naive.manifest["steps"]
    values = torch.from_numpy(naive.values(layer, weight_of(info), horizon))
    assert slots.errors is not None
    out = dual_forward(x, naive.initial(weight_of(info), horizon), slots.keys, slots.errors, values, 1.0)
    return out + sum(naive.parameter(bias) for bias in biases)


@given(setup=setups())
def test_the_dual_form_equals_the_trained_layer(setup, tmp_path_factory):
    run = setup.run(tmp_path_factory.mktemp("memory"))
    x, naive = setup.queries(), Naive(run.path)
    for name, (inputs, outputs, _) in watched(run.model, x).items():
        close(naive_output(naive, name, name, inputs[0]), outputs[0])


def test_the_dual_form_equals_every_layer_of_a_whole_model(complete):
    naive = Naive(complete.path)
    layers = {m["name"]: info["name"] for info in naive.manifest["layers"] for m in info["modules"]}
    assert set(layers) == {"inp", "twice", "left", "right", "out"}
    for name, (inputs, outputs, _) in watched(complete.model, complete.inputs[:5]).items():
        for x, z in zip(inputs, outputs, strict=True):
            close(naive_output(naive, layers[name], name, x), z)


# ---------------------------------------------------------------- negative controls

Line = dict[str, Any]


def without_momentum(line: Line) -> Line:
    lr = line["opt_lr"]
    return {**line, "ww": 1 - lr * line["opt_weight_decay"], "wm": 0.0, "mw": 0.0, "mm": 0.0, "wg": -lr, "mg": 0.0}


def without_clip(line: Line) -> Line:
    return {**line, "scale": 1.0}


def without_decay(line: Line) -> Line:
    return {**line, "ww": 1.0, "mw": 0.0}


def without_nesterov(line: Line) -> Line:
    lr, mu, decay = line["opt_lr"], line["opt_momentum"], line["opt_weight_decay"]
    return {**line, "ww": 1 - lr * decay, "wm": -lr * mu, "mw": decay, "mm": mu, "wg": -lr, "mg": 1.0}


def without_schedule(line: Line) -> Line:
    change = 0.1 / line["opt_lr"]
    return {**line, "wm": line["wm"] * change, "wg": line["wg"] * change, "ww": 1 - (1 - line["ww"]) * change}


def error_of(run: Run, change: Callable[[Naive], None]) -> dict[str, float]:
    """‖W − rebuilt‖ / ‖W − W₀‖ of every explained parameter, after a change to what the memory says."""
    naive = Naive(run.path)
    change(naive)
    names = [p["name"] for p in naive.manifest["parameters"] if p["kind"] != "rest"]
    final = {name: p.detach() for name, p in run.model.named_parameters()}
    return {
        name: float((naive.parameter(name) - final[name]).norm() / (final[name] - run.states[0][name]).norm())
        for name in names
    }


def lines(change: Callable[[Line], Line]) -> Callable[[Naive], None]:
    def apply(naive: Naive) -> None:
        naive.steps = [change(line) for line in naive.steps]

    return apply


def without_loaded_buffer(naive: Naive) -> None:
    naive.first = {name: tensor for name, tensor in naive.first.items() if not name.endswith("#buffer")}


def without_one_step(naive: Naive) -> None:
    for call in naive.calls:
        call["factor"] *= call["step"] != 5


def with_slots_one_step_late(naive: Naive) -> None:
    for call in naive.calls:
        call["step"] = min(call["step"] + 1, 12)


def with_coefficients_of_another_horizon(naive: Naive) -> None:
    naive.steps = [line for line in naive.steps if line["step"] < 12]


CONTROLS = {
    "momentum": lines(without_momentum),
    "clip": lines(without_clip),
    "decay": lines(without_decay),
    "nesterov": lines(without_nesterov),
    "schedule": lines(without_schedule),
    "loaded momentum": without_loaded_buffer,
    "a step": without_one_step,
    "the order of steps": with_slots_one_step_late,
    "the horizon": with_coefficients_of_another_horizon,
}


@pytest.mark.parametrize("left_out", CONTROLS)
@pytest.mark.parametrize("kind", ["small", "complete"])
def test_nothing_can_be_left_out_of_the_coefficients(kind, left_out, request):
    """Every part matters, by many orders of magnitude: so the exact result is no accident."""
    run = request.getfixturevalue(kind)
    right, wrong = error_of(run, lambda naive: None), error_of(run, CONTROLS[left_out])
    assert max(right.values()) <= EXACT
    for name, error in wrong.items():
        assert error > 1e-3 and error > 1e9 * right[name], f"{name}: {error:.1e}"


# ---------------------------------------------------------------- gauge


def rescaled(run: Run, path: Path, layer: str, a: float) -> dualform.Memory:
    """A copy of a memory in which the keys of a layer are multiplied by a, its errors by 1/a."""
    shutil.copytree(run.path, path)
    manifest = load_manifest(path)
    shards = []
    for shard in manifest.shards:
        name = f"shards/{shard.number:06d}.safetensors"
        tensors = load_file(path / name)
        tensors[f"{layer}.keys"] *= a
        tensors[f"{layer}.errors"] /= a
        entry = write_tensors(path / name, {key: [tensor] for key, tensor in tensors.items()})
        shards.append(dataclasses.replace(shard, files={**shard.files, name: entry}))
    dataclasses.replace(manifest, shards=tuple(shards)).save(path)
    return dualform.open(path)


@pytest.mark.parametrize("a", [-1.0, 0.25, 3.0])
@pytest.mark.parametrize("kind", ["small", "complete"])
def test_contributions_do_not_depend_on_the_scale_of_keys_and_weights_do(kind, a, request, tmp_path):
    run = request.getfixturevalue(kind)
    layer = "2" if kind == "small" else "twice"
    memory, other = run.memory, rescaled(run, tmp_path / "copy", layer, a)
    x = run.inputs[:3]
    before, after = memory.attend(run.model, x), other.attend(run.model, x)
    hits, same = (by_slot(spot.top(100, layer=layer, per="slot")) for spot in (before, after))
    close(same["contribution"], hits["contribution"])
    close(same["weight"], a * hits["weight"])
    assert not torch.allclose(same["weight"], hits["weight"])
    close(after.by("label", layer=layer).values, before.by("label", layer=layer).values)
    close(
        after.by("label", layer=layer, score="weight").values,
        a * before.by("label", layer=layer, score="weight").values,
    )
    bias = f"{layer}.bias"  # the key of a bias is 1 and stays: rescaled errors are another bias
    close(after.output(layer) - other.parameter(bias), before.output(layer) - memory.parameter(bias))
    close(other.parameter(f"{layer}.weight"), memory.parameter(f"{layer}.weight"))


def by_slot(hits: SlotHits) -> dict[str, torch.Tensor]:
    """All hits in the order of training."""
    order = hits.slots.argsort(1)
    return {"weight": hits.weight.gather(1, order), "contribution": hits.contribution.gather(1, order)}


def test_the_naive_reader_and_the_library_agree_on_coefficients(small):
    naive, memory = Naive(small.path), small.memory
    for name in memory.certificate:
        for horizon in range(memory.step + 1):
            c, rho, gamma = naive.coefficients(name, horizon)
            found = coefficients(memory.store, name, horizon)
            np.testing.assert_allclose(found.of_step, c, rtol=1e-12, atol=1e-15)
            np.testing.assert_allclose([found.rho, found.gamma], [rho, gamma], rtol=1e-12, atol=1e-15)
