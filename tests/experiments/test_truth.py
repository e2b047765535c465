"""Predictions beside the truth: every experiment runs for a few steps and makes its page; the problems are as said."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from written import written

from dualform.data import mnist, wikitext2
from dualform.errors import DataNotFound
from dualform.show.commands.reproduce import paper, reproduce

paper("truth")  # puts the source tree on the path

from experiments.truth import networks, page, problems, scores, settings  # noqa: E402

DIGITS = settings.EXPERIMENTS["digits"]["sgd"]


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """Every experiment for a few steps, without the packages of others."""
    try:
        wikitext2("valid")
        mnist("test")
    except DataNotFound as error:
        pytest.skip(str(error))
    out = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "ROOT", out)
        for experiment, seeds in {"digits": 3, "language": 1, "wrong-labels": 1, "flips": 1}.items():
            first = next(iter(settings.EXPERIMENTS[experiment]))
            reproduce(f"truth/{experiment}", [first], seeds=seeds, out=out, quick=True, threads=1)
    return out / "truth"


def test_the_margin_is_the_log_odds_and_a_passage_counts_its_words():
    logits = torch.randn(4, 10, dtype=torch.float64)
    labels = torch.randint(10, (4,))
    p = logits.softmax(1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(networks.targets(logits, labels), (p / (1 - p)).log())
    outputs, words = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    expected = -torch.stack([networks.loss(outputs[i : i + 1], words[i : i + 1]) for i in (0, 1)])
    torch.testing.assert_close(networks.targets(outputs, words), expected)


def test_shares_add_up_to_the_loss_of_the_loop():
    outputs, words = torch.randn(4, 5, 7), torch.randint(7, (4, 5))
    shares = problems.losses(torch.nn.Identity(), (outputs, words))
    torch.testing.assert_close(shares.sum(), networks.loss(outputs, words))


def test_networks_share_their_examples_and_differ_in_order_and_first_weights():
    other = replace(DIGITS, seed=1)
    assert problems.examples_of(DIGITS) is problems.examples_of(other)
    assert not torch.equal(problems.order_of(DIGITS)[0], problems.order_of(other)[0])
    a, b = (next(problems.network_of(one).parameters()) for one in (DIGITS, other))
    assert not torch.equal(a, b)


def test_a_tenth_of_the_labels_is_wrong():
    wrong = settings.EXPERIMENTS["wrong-labels"]["sgd"]
    right, changed = problems.examples_of(DIGITS), problems.examples_of(wrong)
    assert torch.equal(right.inputs, changed.inputs) and int(changed.wrong.sum()) == 100
    assert torch.equal(right.labels != changed.labels, changed.wrong)


def test_the_problem_that_peers_read_is_the_training_that_was_recorded():
    small = settings.tiny(DIGITS)
    problem = scores.problem_of(small)
    model = networks.NETWORKS[problem["network"]]()
    model.load_state_dict(problem["first"])
    options = dict(problem["optimizer"])
    optimizer = networks.OPTIMIZERS[options.pop("kind")](model.parameters(), **options)
    for batch in problem["order"]:
        optimizer.zero_grad()
        networks.loss(model(problem["inputs"][batch]), problem["labels"][batch]).backward()
        optimizer.step()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, problem["last"][name])
    assert problem["checkpoints"][-1]["step"] == len(problem["order"])


def test_the_page_is_made_of_the_runs(out, tmp_path, monkeypatch):
    text = written(page, out, tmp_path, monkeypatch)
    for heading in ("At a glance", "digits", "language", "Wrong labels", "How many examples flip a prediction?"):
        assert f"## {heading}" in text
    judged = json.loads((out / "digits/sgd/seed-0/judged.json").read_text())
    assert set(judged["lds"]) == {"0.02", "0.1", "0.5"}
    averaged = json.loads((out / "digits/sgd/seed-2/averaged.json").read_text())
    assert f"{averaged['lds']['0.1']['through training']['mean']:.3f}" in text
    assert json.loads((out / "language/adamw/seed-0/ours.json").read_text())["exact"]
    assert "Not run yet, or only in part:** digits, mnist, cnn, language" in text
    assert not list(out.glob("*/*/*/memory")) and not list(out.glob("*/*/*/trainings"))
