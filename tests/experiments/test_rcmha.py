"""Experiments after RCMHA: every one runs for a few steps and makes its page; what is kept shows what is said."""

import json
import math
from pathlib import Path

import pytest
import torch
from written import written

from dualform.data import wikitext2
from dualform.errors import DataNotFound
from dualform.show.commands.reproduce import paper, reproduce

paper("rcmha")  # puts the source tree on the path

from experiments.rcmha import counts, page, results, settings  # noqa: E402
from experiments.rcmha.texts import by_characters, by_words, segments  # noqa: E402
from experiments.rcmha.training import Judged, rate  # noqa: E402


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """Every experiment for a few steps."""
    try:
        wikitext2("valid")
        wikitext2("train")
    except DataNotFound as error:
        pytest.skip(str(error))
    out = tmp_path_factory.mktemp("runs")
    for experiment in settings.EXPERIMENTS:
        reproduce(f"rcmha/{experiment}", [], seeds=1, out=out, quick=True, threads=1)
    return out / "rcmha"


def test_streams_go_on_where_they_were():
    ids = torch.arange(101)
    found = list(segments(ids, 4, 10, 4))
    assert [each.start.tolist() for each in found[:3]] == [[0, 25, 50, 75], [10, 35, 60, 85], [0, 25, 50, 75]]
    assert [each.again for each in found] == [True, False, True, False]
    for each in found:
        assert torch.equal(each.y, each.x + 1) and torch.equal(each.x[:, 0], each.start)


def test_texts_are_read_as_they_are_written():
    text = "abcabcab\n" * 50
    found = by_characters(text, "cab\nxa")
    assert found.symbols == ["�", "a", "b", "c"] and found.written(found.train[:9]) == "abcabcab�"
    assert found.written(found.valid) == "cab��a"
    found = by_words("the cat\n the dog \n", "dog cat\n")
    assert found.symbols == ["the", "cat", "<eos>", "dog"] and found.written(found.valid) == "dog cat <eos>"


def test_counts_are_those_of_the_training_text():
    """Frequencies with one more of each, and behind each symbol one more pair, shared out by these."""
    train, valid = torch.tensor([0, 1, 0, 1, 2]), torch.tensor([0, 1, 2, 2])
    single = torch.tensor([3, 3, 2]).double() / 8
    chances = [(2 + single[1]) / 3, (1 + single[2]) / 3, single[2] / 1]
    assert counts.times(train, torch.tensor([0, 2, 5])).tolist() == [2, 1, 0]
    found = counts.of(train, valid, 3)
    assert found["pairs"]["loss"] == pytest.approx(-sum(math.log(c) for c in chances) / 3)
    assert found["frequencies"]["bits"] == pytest.approx(-sum(math.log2(single[s]) for s in (1, 2, 2)) / 3)


def test_the_rate_has_its_peak_at_the_end_of_the_warm_up():
    some = settings.CHARACTERS
    assert rate(some, some.warmup) == pytest.approx(some.peak) == max(rate(some, t) for t in range(1, some.updates))
    assert rate(some, 4 * some.warmup) == pytest.approx(some.peak / 2)


def test_accuracy_is_a_mean_over_tokens():
    logits = torch.tensor([[[2.0, 1.0], [0.0, 3.0]]])
    found = Judged().plus(logits, torch.tensor([[0, 0]]), 1.0).plus(logits[:, :1], torch.tensor([[0]]), 4.0).about()
    assert found == pytest.approx(
        {"loss": 2.0, "bits": 2 / math.log(2), "perplexity": math.e**2, "accuracy": 2 / 3, "tokens": 3}
    )


def test_a_run_keeps_what_it_found(out):
    for experiment in ("characters", "words"):
        for variant in settings.EXPERIMENTS[experiment]:
            found = json.loads((out / experiment / variant / "seed-0/training.json").read_text())
            assert found["train"]["tokens"] == 3 * 2 * 8 and found["valid"]["tokens"] == 2 * 8 * 6
            assert found["valid"]["perplexity"] == pytest.approx(math.exp(found["valid"]["loss"]))
    for variant in settings.FOUR:
        found = json.loads((out / "recorded" / variant / "seed-0/training.json").read_text())
        assert page.certificates(variant, found["certificate"])[0] < 1e-3 and found["marks"] == 0
        asked = json.loads((out / "recorded" / variant / "seed-0/asked.json").read_text())
        assert all(len(hits) == 4 for hits in asked["layers"].values()) and len(asked["prompt"]) == 8
    costs = json.loads((out / "costs/all/seed-0/costs.json").read_text())
    for experiment in ("characters", "words"):
        assert set(costs[experiment]) == set(settings.EXPERIMENTS[experiment])
        assert all(each["milliseconds"] > 0 and each["kept_megabytes"] > 0 for each in costs[experiment].values())
    assert not list(out.glob("*/*/*/memory"))


def test_the_page_is_made_of_the_runs_and_runs_can_be_made_of_what_is_kept(out, tmp_path, monkeypatch):
    text = written(page, out, tmp_path, monkeypatch)
    for heading in (
        "Where we differ",
        "What is learned",
        "What an update costs",
        "Recorded and queried",
        "Commands and times",
    ):
        assert f"## {heading}" in text
    found = json.loads((out / "characters/mdha/seed-0/training.json").read_text())
    assert (
        f"{found['valid']['loss']:.3f}" in text
        and "0.572" in text
        and "Not run yet, or only in part:** characters" in text
    )
    monkeypatch.setattr("sys.argv", ["page", "--runs", str(tmp_path / "again"), "--restore"])
    page.main()
    for file in out.glob("characters/*/*/*.json"):
        assert json.loads((tmp_path / "again" / file.relative_to(out)).read_text()) == json.loads(file.read_text())


# ---------------------------------------------------------------- what the kept results show


@pytest.mark.parametrize("variant", settings.FOUR)
def test_certificates_of_recorded_networks_are_small(variant):
    """In float32, at most 1e-4, but for biases of keys that change no output."""
    for training in results.ARCHIVE.values("recorded", variant, "training"):
        assert page.certificates(variant, training["certificate"])[0] <= 1e-4 and training["marks"] == 0


@pytest.mark.parametrize("variant", settings.EXPERIMENTS["characters"])
def test_networks_have_learned_something_of_the_characters(variant):
    """More than pairs of neighbours tell, and all but the one that cannot tell places apart much more."""
    found = results.ARCHIVE.values("characters", variant, "training", "valid", "bits")
    counts = results.ARCHIVE.values("counts", "characters", "counts", "pairs", "bits")
    if not found or not counts:
        pytest.skip(f"characters with {variant}, or counts of them, were not run")
    assert max(found) < counts[0] - (0 if variant == "softmax" else 0.5)


@pytest.mark.parametrize("name", settings.FOUR)
def test_what_came_before_was_learned(name):
    """All but MHA, of which nothing is asked, and for MDHA one step back."""
    kept = results.ARCHIVE.values("copying", name, "training")
    if not kept:
        pytest.skip(f"copying with {name} was not run")
    for back in {"softmax": (), "mdha": ("1",)}.get(name, ("1", "3")):
        assert min(each[back]["accuracy"] for each in kept) > 0.95


@pytest.mark.parametrize("name", settings.FOUR)
@pytest.mark.parametrize(("ending", "rates"), [("", settings.PEAK), ("-alone", settings.ALONE)])
def test_the_rate_of_an_attention_is_the_best_that_was_tried(name, ending, rates):
    bits = {
        peak: results.ARCHIVE.values("peaks", f"{name}{ending}-{peak:g}", "training", "valid", "bits")
        for peak in settings.TRIED
    }  # fmt: skip
    if not all(bits.values()):
        pytest.skip("rcmha/peaks was not run")
    assert rates[name] == min(bits, key=lambda peak: bits[peak][0])
