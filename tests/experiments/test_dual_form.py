"""Every experiment of the dual-form paper runs for a few steps, goes on where it was stopped, and makes its page."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import dualform
from dualform.data import aesop, cifar10, fashion_mnist, mnist, wikitext2
from dualform.errors import DataNotFound, QueryError
from dualform.show.commands import cli
from dualform.show.commands.reproduce import experiment_names, paper, reproduce

paper("dual-form")  # puts the source tree on the path

from experiments import runs  # noqa: E402
from experiments.dual_form import language, page, results, settings  # noqa: E402

EXPERIMENTS = list(settings.EXPERIMENTS)
LANGUAGE = list(settings.ON_REQUEST)


def need_data() -> None:
    try:
        mnist("test")
        fashion_mnist("test")
        cifar10("test", small=True)
        aesop()
        wikitext2("test")
    except DataNotFound as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """All experiments, for a few steps."""
    need_data()
    out = tmp_path_factory.mktemp("runs")
    for experiment in EXPERIMENTS:
        variant = next(iter(settings.EXPERIMENTS[experiment]))
        reproduce(f"dual-form/{experiment}", [variant], seeds=1, out=out, quick=True, threads=1)
    return out


def first(out: Path, experiment: str) -> Path:
    return out / "dual-form" / experiment / next(iter(settings.EXPERIMENTS[experiment])) / "seed-0"


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if name not in LANGUAGE])
def test_a_run_keeps_settings_versions_results_and_figures_and_no_memory(experiment, out):
    folder = first(out, experiment)
    about = json.loads((folder / "run.json").read_text())
    assert about["experiment"] == f"dual-form/{experiment}"
    assert about["settings"]["batch"] == 16
    assert set(about["versions"]) == {"python", *runs.PACKAGES}
    training = json.loads((folder / "training.json").read_text())
    assert training["certificate"] < 1e-2
    assert len(training["accuracy"]) == len(about["settings"]["phases"])
    if experiment != "kept":
        assert {file.suffix for file in (folder / "figures").iterdir()} == {".png", ".pdf"}
    assert not (folder / "memory").exists()


@pytest.mark.parametrize("experiment", LANGUAGE)
def test_a_language_model_is_explained_exactly_and_asked_about_prompts(experiment, out):
    folder = first(out, experiment)
    training, asked = (json.loads((folder / f"{stage}.json").read_text()) for stage in ("training", "prompts"))
    assert training["worst"] < 1e-4
    assert "output.weight" in training["certificate"]
    assert len(asked["prompts"]) == 4
    for prompt in asked["prompts"]:
        for layer, rankings in prompt["layers"].items():
            assert len(rankings["by slot"]) == len(rankings["by place"]) == 3
            assert len(rankings["by contribution"]) == (0 if (experiment, layer) == ("wikitext-2", "output") else 3)
    assert not (folder / "memory").exists()


def test_a_language_model_goes_on_from_its_checkpoint(out, tmp_path):
    """Stopped after its checkpoint it ends with the weights of the run that was never stopped."""
    variant = settings.tiny(settings.EXPERIMENTS["aesop"]["cpu"])
    assert isinstance(variant, settings.LanguageSettings)
    found = []
    for stopped in (False, True):
        run = runs.begin(tmp_path / str(stopped), "dual-form/aesop", variant)
        if stopped:
            language.train(run, replace(variant, updates=5))
        language.train(run, variant)
        found.append(dualform.open(run.memory))
    assert [memory.step for memory in found] == [6, 6]
    for name, tensor in found[0].weights(progress=False).items():
        assert torch.equal(tensor, found[1].weights(progress=False)[name]), name


def test_votes_are_shares_and_parts_sum_to_the_whole(out):
    votes = json.loads((first(out, "single") / "votes.json").read_text())
    assert list(votes["layers"]) == ["0", "1", "2"]
    for layer in votes["layers"].values():
        assert layer["residual"] < 1e-2
        for name, shares in layer.items():
            if isinstance(shares, dict):
                assert all(0 <= share <= 100 for share in shares.values()), name


def test_the_memory_at_the_switch_is_the_checkpoint_taken_there(out):
    masks = json.loads((first(out, "continual") / "masks.json").read_text())
    assert masks["switch"]["predictions changed"] <= 20  # of 10,000; after six steps many answers are close calls
    assert masks["switch"]["largest logit difference"] < 1e-2


def test_keeping_all_visits_is_the_trained_network(out):
    folder = first(out, "kept")
    kept, training = (json.loads((folder / f"{stage}.json").read_text()) for stage in ("kept", "training"))
    for accuracy in kept["accuracy"].values():
        assert accuracy[-1] == pytest.approx(training["accuracy"][-1]["mnist"], abs=2e-3)


def test_what_has_its_result_is_not_done_again_and_what_misses_the_memory_is(out):
    folder, variant = first(out, "joint"), next(iter(settings.EXPERIMENTS["joint"]))
    before = (folder / "training.json").stat().st_mtime_ns
    reproduce("dual-form/joint", [variant], seeds=1, out=out, quick=True, threads=1)
    assert (folder / "training.json").stat().st_mtime_ns == before
    (folder / "figures.json").unlink()
    reproduce("dual-form/joint", [variant], seeds=1, out=out, quick=True, threads=1)
    assert (folder / "figures.json").exists()
    assert (folder / "training.json").stat().st_mtime_ns > before


def test_a_folder_with_other_settings_is_refused(out):
    with pytest.raises(QueryError, match="with other settings"):
        reproduce("dual-form/joint", ["clipped"], out=out, quick=False)


def test_the_page_is_made_of_the_runs(out, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(results, "IMAGES", tmp_path / "images")
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr("sys.argv", ["page", "--runs", str(out / "dual-form")])
    page.main()
    text = (tmp_path / "page.md").read_text()
    for heading in (
        "Table 1",
        "Accuracies",
        "Masking one of two tasks",
        "Forgetting, explained",
        "Language models",
    ):
        assert f"## {heading}" in text
    votes = json.loads((first(out, "single") / "votes.json").read_text())
    assert f"{votes['layers']['2']['abs']['right']:.1f}" in text
    assert "## wikitext-2, cpu" in (tmp_path / "page-passages.md").read_text()


def test_the_page_in_the_documents_is_made_of_the_results_beside_the_experiments():
    text = page.PAGE.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| 2 | right |")]
    variants = [v for v in settings.EXPERIMENTS["single"] if page.seeds("single", v, "votes")]
    assert rows and variants
    for variant in variants:
        assert page.spread(page.cell(variant, "2", "right")) in rows[0]


# ---------------------------------------------------------------- the command


def call(*words: object):
    return CliRunner().invoke(cli.app, ["reproduce", *map(str, words)])


def test_without_a_name_all_experiments_are_listed():
    result = call()
    assert result.exit_code == 0
    assert result.stdout.split() == experiment_names()
    assert experiment_names()[: len(EXPERIMENTS)] == [f"dual-form/{experiment}" for experiment in EXPERIMENTS]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("other/single",), "no experiments of a paper 'other'"),
        (("dual-form/other",), "no experiment 'other'"),
        (("dual-form/single", "--variant", "other"), "no variant 'other'"),
    ],
)
def test_an_unknown_name_is_said_with_those_that_are_known(words, sentence):
    result = call(*words)
    assert result.exit_code == 1
    assert sentence in result.stderr
    with pytest.raises(QueryError):
        reproduce(words[0], words[2:], out=Path("unused"))
