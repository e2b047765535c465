"""Experiments after key-driven grouped-query attention: every variant runs, and the page is made of what they found."""

import json
from pathlib import Path

import pytest
from written import written

from dualform.data import cifar10, fashion_mnist
from dualform.errors import DataNotFound
from dualform.show.commands.reproduce import paper, reproduce

paper("key-driven-gqa")  # puts the source tree on the path

from experiments.key_driven_gqa import page, settings  # noqa: E402
from experiments.key_driven_gqa.results import ARCHIVE  # noqa: E402


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """Every experiment for a few steps; of the largest those with four groups."""
    try:
        fashion_mnist("test")
        cifar10("test", small=True)
    except DataNotFound as error:
        pytest.skip(str(error))
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("runs")
    for experiment in ("fashion-mnist", "cifar10", "recorded"):
        variants = [name for name in settings.EXPERIMENTS[experiment] if not name.endswith("-2")]
        reproduce(f"key-driven-gqa/{experiment}", variants, seeds=1, out=out, quick=True, threads=1)
    return out / "key-driven-gqa"


def test_a_run_keeps_what_it_found(out):
    start = json.loads((out / "checkpoints/fashion-mnist/seed-0/training.json").read_text())
    assert start["updates"] == 6 and (out / "checkpoints/fashion-mnist/seed-0/model.safetensors").exists()
    control = json.loads((out / "fashion-mnist/mha/seed-0/training.json").read_text())
    assert control["converted"] == start["accuracy"] and list(control["points"]) == ["0", "2", "4"]
    for variant in ("kdgqa-4", "dgqa-ema-4", "dgqa-reference-4"):
        found = json.loads((out / f"fashion-mnist/{variant}/seed-0/training.json").read_text())
        assert found["parameters"] < control["parameters"] and found["accuracy"] == found["points"]["4"]
        assert list(found["allocations"]) == ["blocks.0.attn", "blocks.1.attn"]
        for each in found["allocations"].values():
            assert len(each["heads"]) == 4 and all(sum(line) == pytest.approx(8, abs=0.01) for line in each["heads"])
        assert (out / f"fashion-mnist/{variant}/seed-0/figures/allocations.png").exists()
    assert not list(out.glob("*/*/*/memory"))


def test_recorded_networks_are_rebuilt(out):
    """In float32; a few steps move little, so rounding counts for more. Key biases change no output."""
    for variant in settings.EXPERIMENTS["recorded"]:
        found = json.loads((out / f"recorded/{variant}/seed-0/training.json").read_text())
        assert page.certificates(found["certificate"])[0] <= 1e-3 and found["marks"] == 0 and found["residual"] < 1e-3


def test_what_is_there_is_not_run_again_and_a_missing_checkpoint_is(out):
    file = out / "fashion-mnist/gqa-4/seed-0/training.json"
    before, checkpoint = file.stat().st_mtime_ns, out / "checkpoints/fashion-mnist/seed-0/model.safetensors"
    content = checkpoint.read_bytes()
    checkpoint.unlink()
    for variant in ("gqa-4", "gqa-2"):
        reproduce("key-driven-gqa/fashion-mnist", [variant], seeds=1, out=out.parent, quick=True, threads=1)
    assert file.stat().st_mtime_ns == before and checkpoint.read_bytes() == content


def test_the_page_is_made_of_the_runs(out, tmp_path, monkeypatch):
    text = written(page, out, tmp_path, monkeypatch)
    for heading in ("Converted checkpoints", "Uptraining on fashion-mnist", "Uptraining on cifar10", "Allocations on",
                    "Similarity of heads", "Cost of an update", "Recorded", "Commands and times"):  # fmt: skip
        assert f"## {heading}" in text
    assert "**Not run yet, or only in part:**" in text and "images/key-driven-gqa/fashion-mnist-curves.png" in text
    found = json.loads((out / "cifar10/kdgqa-4/seed-0/training.json").read_text())
    assert f"{100 * found['accuracy']:.1f}" in text


# ---------------------------------------------------------------- what the kept results show


def kept(experiment: str, variant: str, *path: str) -> list:
    found = ARCHIVE.values(experiment, variant, "training", *path)
    if len(found) < (1 if experiment in settings.ONCE else settings.NETWORKS):
        pytest.skip(f"{experiment} with {variant} was not run as often as it should be")
    return found


@pytest.mark.parametrize("variant", settings.EXPERIMENTS["recorded"])
def test_certificates_of_recorded_networks_are_small(variant):
    for found in kept("recorded", variant):
        assert page.certificates(found["certificate"])[0] <= 1e-4 and found["marks"] == 0


@pytest.mark.parametrize("task", page.TASKS)
def test_conversion_costs_accuracy_and_uptraining_gives_some_back(task):
    for variant in ("gqa-4", "mqa"):
        for before, after in zip(kept(task, variant, "converted"), kept(task, variant, "accuracy"), strict=True):
            assert after > before
