"""Experiments after "Transformers as Support Vector Machines": all of them run, their results obey laws, and what is
kept of the long runs lies in the bands of the specification.
"""

import json
import math
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from written import written

from dualform.errors import DataNotFound
from dualform.show.commands.reproduce import paper, reproduce
from dualform.svm.dynamics.gradient_descent import KeyQueryFactors, descend, gradient

pytest.importorskip("numba")
pytest.importorskip("cvxpy")
pytest.importorskip("matplotlib")
paper("attention-svm")  # puts the source tree on the path

from experiments.attention_svm import outcomes, page, ranks, results, settings, trials, words  # noqa: E402
from experiments.attention_svm.bands import bands  # noqa: E402
from experiments.attention_svm.nonlinear import Trial, judged  # noqa: E402
from experiments.attention_svm.quadratic import nearest_on_simplex  # noqa: E402
from experiments.attention_svm.released import cancelling_gradient, descend_as_released  # noqa: E402
from experiments.results import Archive  # noqa: E402

FEW = {"outcomes": ["n-2", "n-6", "n-2-zero"], "ranks": ["n-5-T-5", "n-5-T-10"], "nonlinear": ["d-4", "d-4-stable"]}
"""Variants that are run here, where not all are."""


# ---------------------------------------------------------------- parts


def test_the_point_of_the_simplex_is_the_nearest():
    """Against many random points of it; the more tokens are mixed, the smaller g/(2λ) is."""
    g = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = nearest_on_simplex(g)
    assert float(found.min()) >= 0 and float(found.sum()) == pytest.approx(1)
    others = torch.distributions.Dirichlet(torch.full((6,), 0.4, dtype=torch.float64)).sample((2000,))
    assert float((found - g).norm()) <= float((others - g).norm(dim=1).min())
    counts = [int((nearest_on_simplex(g / (2 * weight)) > 0).sum()) for weight in (0.01, 0.1, 0.5, 2.0, 10.0)]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 6


def test_an_infeasible_trial_has_no_rank_but_the_published_way_counts_it_as_one():
    """Two samples with the same tokens and query, and different best tokens."""
    samples, _ = trials.linear_trials(trials.generator(0), 1, 2, 3, 3)
    samples = samples._replace(tokens=samples.tokens[:, [0, 0]], queries=samples.queries[:, [0, 0]])
    chosen = torch.tensor([[0, 1]])
    for norm in ("frobenius", "nuclear"):
        found = trials.separations(samples, chosen, norm)
        assert found[0].feasible is False
        assert ranks.ranks(found) == {"mean": None, "std": None, "trials": 0}
        assert bool(trials.matrices(found).isnan().all()) and not outcomes.all_support(found[0])
    assert ranks.published_rank(samples, chosen, 0) == 1


def test_best_tokens_are_locally_optimal_and_worst_ones_with_support_are_not():
    samples, head = trials.linear_trials(trials.generator(1), 8, 2, 4, 6)
    for chosen, holds in ((trials.best(samples, head), True), (trials.scores(samples, head).argmin(-1), False)):
        found = trials.separations(samples, chosen)
        assert outcomes.locally_optimal(samples, head, chosen, found).tolist() == [holds] * 8


def test_the_separating_matrix_itself_has_an_efficiency_of_one():
    samples, head = trials.linear_trials(trials.generator(2), 5, 3, 4, 6)
    chosen = trials.best(samples, head)
    for norm in ("frobenius", "nuclear"):
        found = trials.separations(samples, chosen, norm)
        own = trials.efficiency(samples, 7 * trials.matrices(found), chosen, found)
        torch.testing.assert_close(own, torch.ones(5, dtype=torch.float64), rtol=1e-6, atol=0)


def test_a_trial_is_left_out_where_it_is_not_clear_what_is_selected():
    """By the thresholds of the released code; a trial that is accepted is near to its own prediction."""
    samples, _ = trials.linear_trials(trials.generator(3), 1, 2, 3, 6)
    W = 40 * trials.matrices(trials.separations(samples, torch.tensor([[0, 1]])))
    floor = torch.tensor([[False, True]])
    for weights, fate in (([0.5, 0.499, 1e-4], "ambiguous"), ([0.5, 0.3, 0.2], "finite")):
        logs = torch.tensor(weights, dtype=torch.float64).log().expand(1, 2, 3)
        assert judged(samples, W, logs, floor, 0) == fate
    one = torch.tensor([[[1 - 2e-20, 1e-20, 1e-20], [1e-20, 1 - 2e-20, 1e-20]]], dtype=torch.float64).log()
    found = judged(samples, W, one, floor, 0)
    assert isinstance(found, Trial) and found.masked == pytest.approx(-20)
    assert [each.tokens for each in found.inputs] == [1, 1] and found.floor
    assert max(found.formula, found.direction, found.token) < 1e-6


def test_the_released_gradient_is_the_library_s_until_it_cancels():
    samples, head = trials.linear_trials(trials.generator(4), 3, 4, 5, 6)
    W = trials.uniform(trials.generator(5), 3, 6)
    G, log_scale = gradient(samples, head, W)
    torch.testing.assert_close(cancelling_gradient(samples, head, W), G * log_scale.exp()[:, None, None])
    for start in (W, KeyQueryFactors(W, trials.uniform(trials.generator(6), 3, 6))):
        ours = descend(samples, head, start, 50, decay=settings.DECAY if isinstance(start, KeyQueryFactors) else 0.0)
        torch.testing.assert_close(descend_as_released(samples, head, start, 50).W, ours.W, rtol=1e-8, atol=1e-8)


# ---------------------------------------------------------------- runs and their page


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """Every experiment for a few steps."""
    out = tmp_path_factory.mktemp("runs")
    for experiment in settings.EXPERIMENTS:
        with suppress(DataNotFound):  # transformers are trained on real data
            reproduce(f"attention-svm/{experiment}", FEW.get(experiment, []), seeds=1, out=out, quick=True, threads=1)
    return out / "attention-svm"


def found(out: Path, experiment: str, variant: str) -> dict:
    return json.loads((out / experiment / variant / "seed-0" / "found.json").read_text())


def test_correlations_and_shares_are_ones(out):
    for variant in settings.EXPERIMENTS["local"]:
        for trained in ("W", "KQ"):
            given = found(out, "local", variant)[trained]
            assert list(given["shown"]) == ["20", "40"]
            for seen in given["shown"].values():
                assert -1 <= seen["frobenius"]["mean"] <= 1 and -1 <= seen["nuclear"]["mean"] <= 1
                assert seen["efficiency_frobenius"]["mean"] <= 1 and seen["efficiency_nuclear"]["mean"] <= 1
                assert 0 <= seen["best"] <= 1 == seen["feasible"] and seen["worst_gap"] <= 1e-5
            assert all(1 / 8 <= softmax <= 1 for softmax in given["curve"]["softmax"])
    for variant in ("separation", "two-norms"):
        given = found(out, "paths", variant)
        assert given["feasible"] == 1 and set(given["correlations"]) == {"W", "KQ"}


def test_outcomes_sum_to_all_runs(out):
    for variant in FEW["outcomes"]:
        for row in found(out, "outcomes", variant)["widths"]:
            assert row["global"] + row["local"] + row["not_local"] == pytest.approx(1)
            assert row["locally_optimal"] <= row["feasible"] <= 1 and row["trials"] == 4
            assert -1 <= row["correlation"]["mean"] <= 1


def test_ranks_are_those_of_feasible_trials_only(out):
    for variant in FEW["ranks"]:
        for row in found(out, "ranks", variant)["widths"]:
            for norm in ("frobenius", "nuclear"):
                assert row[norm]["trials"] == round(row["feasible"] * row["trials"])
                assert row[norm]["trials"] == 0 or 1 <= row[norm]["mean"] <= min(3, row["d"])
            assert row["published"]["accurate"]["trials"] == 2 - row["published"]["infeasible"]
            assert 1 <= row["published"]["nuclear"]["mean"] <= row["d"]


def test_every_trial_of_a_nonlinear_head_has_one_fate(out):
    for variant in FEW["nonlinear"]:
        given = found(out, "nonlinear", variant)
        assert sum(given["fates"].values()) == given["tried"] and given["fates"].get("accepted", 0) <= 3
        assert len(given["scatter"]) == given["formula"]["trials"] == given["fates"].get("accepted", 0)
        assert given["mixing"]["inputs"] + given["single"]["inputs"] == 3 * len(given["scatter"])
        assert given["floor"]["trials"] + given["above"]["trials"] == len(given["scatter"])
        assert all(masked <= -6 and 0 <= apart <= 2 for masked, apart in given["scatter"])


def test_a_larger_weight_of_the_square_mixes_more_tokens(out):
    rows = found(out, "quadratic", "orthonormal")["weights"]
    assert [row["tokens_ideal"] for row in rows] == sorted(row["tokens_ideal"] for row in rows)
    assert rows[0]["tokens_ideal"] == 1 and all(1 <= row["tokens"] <= 5 for row in rows)
    for row in rows:
        assert sum(row[key]["trials"] for key in ("formula", "finite")) + row["infeasible"] == round(3 * row["near"])


@pytest.mark.parametrize("variant", settings.EXPERIMENTS["trained"])
def test_the_heads_of_a_recorded_transformer_are_an_exact_sum_over_its_training(out, variant):
    folder = out / "trained" / variant / "seed-0"
    if not (folder / "found.json").exists():
        pytest.skip(f"the data of {variant} are not on this machine")
    training, given = json.loads((folder / "training.json").read_text()), found(out, "trained", variant)
    assert training["certificate_of_attention"] < 1e-4 and not training["marks"] and not (folder / "memory").exists()
    assert [row["step"] for row in given["moments"]] == [0, 0, 4, 4]
    for row in given["last"]:
        origin = row["origin"]
        assert abs(origin["residual"]) < 1e-5 and 0 <= origin["above_zero"] <= 1
        assert -1 <= row["range"][0] <= row["range"][1] <= 1 and 0 <= row["efficiency"] <= 1
        if variant == "fables":
            assert 0 < sum(share for _, share in row["items"]) <= 1 + 1e-9


def test_a_run_gives_the_same_numbers_again(out, tmp_path):
    for experiment, variant in (("local", "cross"), ("nonlinear", "d-4"), ("quadratic", "orthonormal")):
        reproduce(f"attention-svm/{experiment}", [variant], seeds=1, out=tmp_path, quick=True, threads=1)
        once, again = (found(each, experiment, variant) for each in (out, tmp_path / "attention-svm"))
        for given in (once, again):
            del given["seconds"], given["peak_megabytes"]
        assert once == again


def test_the_page_is_made_of_the_runs_and_runs_can_be_made_of_what_is_kept(out, tmp_path, monkeypatch):
    text = written(page, out, tmp_path, monkeypatch)
    for heading in ("E1 and E2", "E3", "E4", "E5", "E6", "E7", "Bands", "Commands and times"):
        assert f"## {heading}" in text
    assert "**Not run yet:** outcomes (n-4)" in text
    for name in ("local", "outcomes", "ranks", "nonlinear", "quadratic"):
        assert (tmp_path / "images" / f"{name}.png").exists() and f"attention-svm/{name}.png" in text
    monkeypatch.setattr("sys.argv", ["page", "--runs", str(tmp_path / "again"), "--restore"])
    page.main()
    for file in (each for found in out.glob("*/*/*/found.json") for each in found.parent.glob("*.json")):
        assert json.loads((tmp_path / "again" / file.relative_to(out)).read_text()) == json.loads(file.read_text())


def test_an_experiment_that_has_found_nothing_yet_leaves_no_file(tmp_path):
    (tmp_path / "runs" / "local" / "cross" / "seed-0").mkdir(parents=True)
    archive = Archive(tmp_path / "results", tmp_path / "images")
    archive.collect(tmp_path / "runs")
    assert list(archive.kept("local")) == [] and not archive.results.exists()


# ---------------------------------------------------------------- what the kept results show

MISSED = {
    "cross: KQ with nuclear",
    "self: KQ with nuclear",
    *(f"saturated trials, mean, d-{d}-stable" for d in (4, 6, 8, 10)),
}
"""Bands that are known to be missed, all of them by runs that leave the arithmetic of the released code; the page says
so. Without decay K Qᵀ is slow; with the stable gradient a ReLU head of 0 spoils the formula.
"""


def test_the_kept_results_lie_in_the_bands_of_the_specification():
    given = bands()
    assert {band.check for band in given} == {11, 13, 14, 15, 18}
    assert {band.what for band in given if not band.met} == MISSED


@pytest.mark.parametrize("experiment", settings.EXPERIMENTS)
def test_every_variant_is_kept_as_the_settings_have_it(experiment):
    """So that no number on the page comes from other settings than those of the code."""
    kept = {result.variant: result.files["run"]["settings"] for result in results.ARCHIVE.kept(experiment)}
    variants = settings.EXPERIMENTS[experiment]
    assert kept == {name: json.loads(json.dumps(vars(each))) for name, each in variants.items()}


def test_enough_trials_are_accepted():
    """E6: at least 100 at d = 4 and 6, 50 at d = 8 and 10."""
    for d, least in ((4, 100), (6, 100), (8, 50), (10, 50)):
        given = results.found("nonlinear", f"d-{d}")
        assert given is not None and given["formula"]["trials"] >= least


def test_the_page_shows_what_is_kept():
    """The page was made of these results: made again it is the same."""
    given, text = results.found("local", "cross-decay"), page.PAGE.file.read_text()
    assert given is not None
    for trained in ("W", "KQ"):
        for norm in ("frobenius", "nuclear"):
            assert words.spread(given[trained]["shown"]["2000"][norm]) in text
    for part in (page.paths, page.local, page.outcomes, page.ranks, page.nonlinear, page.quadratic, page.acceptance):
        assert part() in text
    assert not math.isnan(sum(band.value for band in bands()))
