"""Experiments after visual query tuning: every one runs for a few steps, and the page is made of what they found."""

import json
import os
from pathlib import Path

import pytest
import torch
from written import written

from dualform.data import cifar10, mnist
from dualform.errors import DataNotFound
from dualform.show.commands.reproduce import paper, reproduce
from dualform.tuning import VisualQueryTuning

paper("vqt")  # puts the source tree on the path

from experiments import measure  # noqa: E402
from experiments.page import gain  # noqa: E402
from experiments.vqt import cost, methods, page, results, settings  # noqa: E402
from experiments.vqt.pictures import labelled, pictures  # noqa: E402

QUICK = ("linear", "intermediate-select", "vqt-5", "vqt-5-select", "vqt-5+lora", "full")


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """Every experiment for a few steps."""
    try:
        mnist("train", "fashion-mnist")
        mnist("test")
        cifar10("test", small=True)
    except DataNotFound as error:
        pytest.skip(str(error))
    pytest.importorskip("sklearn")
    out = tmp_path_factory.mktemp("runs")
    with pytest.raises(DataNotFound, match="run 'dualform reproduce vqt/backbone' first"):
        reproduce("vqt/mnist", ["linear"], seeds=1, out=out, quick=True, threads=1)
    for experiment in ("backbone", "cost"):
        reproduce(f"vqt/{experiment}", [], seeds=1, out=out, quick=True, threads=1)
    reproduce("vqt/mnist", QUICK, seeds=2, out=out, quick=True, threads=1)
    reproduce("vqt/recorded", ["small-digits"], seeds=1, out=out, quick=True, threads=1)
    return out / "vqt"


def found(out: Path, run: str, stage: str = "training") -> dict:
    return json.loads((out / run / f"{stage}.json").read_text())


def test_a_rate_is_chosen_once_and_the_backbone_is_left_as_it_was(out):
    first, second = (found(out, f"mnist/vqt-5/seed-{seed}") for seed in (0, 1))
    assert len(first["validation"]) == 2 and not second["validation"] and first["rate"] == second["rate"]
    assert first["rate"][1] == 0 < found(out, "mnist/vqt-5+lora/seed-0")["rate"][1]
    assert first["tested_on"] == 20 and 0 <= first["accuracy"] <= 1
    counts = {name: found(out, f"mnist/{name}/seed-0")["learned_parameters"] for name in QUICK}
    whole = found(out, f"backbone/{settings.SOURCE}/seed-0")["parameters"]
    assert counts["linear"] == 10 * 17 < counts["vqt-5"] == 2 * 5 * 16 + 10 * (16 * 11 + 1) < counts["full"]
    assert counts["full"] == whole and counts["vqt-5+lora"] > counts["vqt-5"]
    assert counts["vqt-5-select"] == 2 * 5 * 16 + 10 * (int(0.2 * 16 * 11) + 1)


def test_what_is_recorded_sums_up(out):
    training = found(out, "recorded/small-digits/seed-0")
    assert max(training["certificate"].values()) < 1e-4 and training["marks"] == 0 and "queries" in training["rest"]
    asked = found(out, "recorded/small-digits/seed-0", "asked")
    assert asked["off"] < 1e-4 and asked["residual"] < 1e-3 and len(asked["training"]) == 4
    _, index = labelled("small-digits", 40, 0)
    assert {hit["index"] for line in asked["training"] for hit in line} <= set(index.tolist())


def test_the_page_is_made_of_the_runs(out, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "NETWORKS", 2)
    text = written(page, out, tmp_path, monkeypatch)
    for heading in (
        "The backbone",
        "Transfer with 1,000",
        "What an update costs",
        "Recorded and explained",
        "Commands",
    ):
        assert f"## {heading}" in text
    assert "Not run yet, or only in part:** mnist, cifar10, small-digits, recorded" in text
    assert (tmp_path / "images" / "recorded-small-digits-asked.png").exists()
    cell = 100 * sum(found(out, f"mnist/full/seed-{seed}")["accuracy"] for seed in (0, 1)) / 2
    assert f"| full | full fine-tuning | {cell:.1f} ±" in text


def test_weights_that_were_not_kept_are_trained_again(out):
    """Results can be restored without the backbone; the same one is then trained."""
    weights = out / "backbone" / settings.SOURCE / "seed-0" / "model.safetensors"
    before = weights.read_bytes()
    weights.unlink()
    reproduce("vqt/backbone", [], seeds=1, out=out.parent, quick=True, threads=1)
    assert weights.read_bytes() == before


def test_growth_that_cannot_be_measured_is_told():
    def ends() -> None:
        os._exit(1)

    with pytest.raises(RuntimeError, match="ended early"):
        measure.peak_bytes(lambda: ends)


def test_a_gain_is_that_of_networks_with_the_same_seed():
    assert page.gain_over([10.0, 20.0, 30.0], [11.0, 21.2, 30.9]) == "**+1.0 ± 0.4**"
    assert page.gain_over([10.0, 20.0, 30.0], [12.0, 19.0, 31.0]) == "+0.7 ± 3.8"
    assert page.gain_over([1.0], [2.0]) == "–"


def test_pictures_are_of_one_shape():
    pytest.importorskip("sklearn")
    digits = pictures("small-digits", "test")
    assert digits.x.shape == (360, 3, 32, 32) and digits.x.min() == -1 and digits.x.max() == 1
    assert torch.equal(digits.x[:, 0, ::4, ::4], digits.x[:, 2, 3::4, 3::4])


def test_methods_learn_what_they_say():
    """The released way gives what ours does, and a frozen backbone's features are read once."""
    from dualform.models import ViT

    torch.manual_seed(0)
    vit, x = ViT(16, 8, classes=3, width=16, heads=2, layers=2).eval(), torch.randn(3, 3, 16, 16)
    model = methods.make(vit, "vqt-5", 5, 4).eval()
    assert isinstance(model, VisualQueryTuning)
    torch.testing.assert_close(cost.together(model, x), model(x))
    for name in settings.METHODS:
        way = methods.reading(methods.make(vit, name, settings.METHODS[name].get("tokens", 0), 4).eval())
        torch.testing.assert_close(way.logits(way.once(x)), way.model(x))
        if name in ("full", "lora", "prompts") or "+" in name:
            assert way.model.backbone is not vit, "what learns is a copy"


# ---------------------------------------------------------------- what the kept results show


def test_visual_query_tuning_needs_at_most_a_third_of_the_memory_of_fine_tuning():
    kept = results.ARCHIVE.values("cost", "vit-small", "cost", "methods")
    if not kept:
        pytest.skip("vqt/cost was not run")
    (costs,) = kept
    for key in ("kept_megabytes", "grown_megabytes"):
        assert costs["vqt-1"][key] <= costs["full"][key] / 3
        assert costs["vqt-10, released"][key] > costs["full"][key] / 2


def test_queries_are_above_the_linear_probe_on_two_transfers_of_three():
    """By more than chance, draw by draw, whether the class token is normalised or not."""
    if len(page.complete()) < len(settings.TARGETS):
        pytest.skip("not all transfers were run")
    above = 0
    for target in settings.TARGETS:
        gains = [
            gain(*(page.accuracies(target, each) for each in (base, "vqt-5"))) for base in ("linear", "linear-unit")
        ]
        above += all(found is not None and found[0] > found[1] for found in gains)
    assert above >= 2


@pytest.mark.parametrize("target", settings.TARGETS)
def test_certificates_of_recorded_heads_are_small(target):
    """Of weights; biases begin at −4.6 and hardly move, so what training in float32 rounds them by may be more."""
    for found in results.ARCHIVE.values("recorded", target, "training"):
        error, floor = found["certificate"], found["floor"]
        assert error["head.weight"] <= 1e-5 and error["head.bias"] <= max(1e-4, 2 * floor["head.bias"])
