"""The demo runs, runs again, and shows a mistake where there is one."""

import shlex

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from dualform.explain import open_memory
from dualform.show.commands import cli, demo


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    out, console = tmp_path_factory.mktemp("demo"), Console(record=True, width=120)
    demo.run(out, 40, console)
    report = demo.run(out, 30, console)
    return out, report, " ".join(console.export_text().split())


def test_a_second_run_replaces_the_first(twice):
    out, report, _ = twice
    assert report == out / "report.html"
    assert open_memory(out / "memory").step == 30


def test_it_leaves_a_report_figures_and_what_is_needed_to_go_on(twice):
    out, _, _ = twice
    names = {file.name for file in out.iterdir()}
    assert {
        "report.html",
        "memory",
        "train.npz",
        "test.npz",
        "top.png",
        "spotlight.png",
        "totals-2.png",
        "timeline-2.png",
    } <= names


def test_the_memory_says_how_its_model_is_made_and_where_the_digits_are(twice):
    """So the commands that the demo prints need nothing but the path."""
    out, _, _ = twice
    words = next(shlex.split(line) for line in demo.commands(out) if " ask " in line)
    result = CliRunner().invoke(cli.app, words[words.index("ask") :])
    assert result.exit_code == 0 and "row 1:" in result.stdout, result.output
    assert not [word for line in demo.commands(out) for word in shlex.split(line) if word in ("--model", "--data")]


def test_it_says_how_exact_it_is_what_sums_to_what_and_what_a_mask_is(twice):
    _, report, text = twice
    for sentence in (
        "rounding floor",
        "The parts sum to the whole",
        "with everything else held fixed",
        "A mistake",
        str(report),
    ):
        assert sentence in text


def test_the_network_is_left_alone_by_the_threads_of_the_demo(twice):
    assert torch.get_num_threads() == 1  # as the tests set it


def test_three_images_are_chosen_and_one_is_wrong():
    probabilities = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.3, 0.7]])
    chosen = demo.choose(probabilities, torch.tensor([0, 0, 0, 0]))
    assert chosen == {"A sure prediction": 0, "A close call": 1, "A mistake": 2}


def test_where_none_is_wrong_the_least_sure_is_chosen_and_it_says_so():
    probabilities = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2]])
    chosen = demo.choose(probabilities, torch.tensor([0, 0, 0]))
    assert list(chosen.values()) == [0, 2, 1]
    assert "no test digit is wrong" in list(chosen)[-1]


@pytest.mark.parametrize("steps", [1, 70, 71, 142])
def test_there_are_as_many_batches_as_asked_for(steps):
    index = list(demo.batches(torch.arange(4500), steps))
    assert len(index) == steps
    assert len(torch.cat(index[:71]).unique()) == min(4500, 64 * steps)
