"""docs/results/attention-svm.md, made of what is kept of the runs: every number of ours on it stands in their files.

python -m experiments.attention_svm.page [--runs runs/attention-svm] [--restore]

Results are first taken over from the run folders to experiments/attention_svm/results, so the page and its figures can be
made again without the runs. ``--restore`` goes the other way: it makes run folders of what is kept.
"""

from typing import Any

from experiments.page import Page
from experiments.results import DOCS, table

from . import references
from .bands import bands
from .figures import NAMES, draw_all
from .nonlinear import FAR
from .results import ARCHIVE, found
from .settings import EXPERIMENTS
from .trained_page import trained
from .words import figure, number, part, percent, spread

PAGE = Page(DOCS / "results" / "attention-svm.md", "attention-svm", ARCHIVE)
PREDICTIONS = {"formula": "both parts", "direction": "direction only", "token": "single token"}


# ------------------------------------------------------------------------------------------- parts of the page


def acceptance() -> str:
    """All bands, and which of them are missed."""
    given = bands()
    if not given:
        return ""
    missed = [band for band in given if not band.met]
    rows = [
        [band.check, band.what, f"{band.value:.4g}", band.range, "yes" if band.met else "**no**"] for band in given
    ]  # fmt: skip
    text = f"{len(given) - len(missed)} of {len(given)} bands are met."
    if missed:
        text += " Missed: " + "; ".join(f"{band.what} ({band.value:.3f}, asked: {band.range})" for band in missed) + "."
    return part("## Bands", text, table(["check", "what", "found", "band", "met"], rows))


def paths() -> str:
    """E1 and E2."""
    rows, told, fell = [], [], []
    for variant, name in (("separation", "E1"), ("two-norms", "E2")):
        if (given := found("paths", variant)) is None:
            continue
        for key in ("W", "KQ"):
            each = given["correlations"][key]
            rows.append([
                name, NAMES[key], percent(each["found"]), spread(each["frobenius"], 4), spread(each["nuclear"], 4), percent(each["close"]),
            ])  # fmt: skip
        short = given["correlations"]["KQ"]["short"]
        if short["trials"]:
            fell.append(
                f"{name}: {short['trials']} of them, {short['second']:.2f} where the separating matrix has {short['second_ideal']:.2f}"
            )
        if given["drawn"]:
            told.append(
                f"{name} shows trial {given['drawn']['trial']} ({percent(given['shows'])} % of the trials could be shown)"
            )
    if not rows:
        return ""
    return part(
        "## E1 and E2: paths in the plane",
        "**Claim.** W(k) z bends onto the ray W_mm z of the separating matrix: of the Frobenius norm where W is trained, of the nuclear norm where K and Q are.",
        "**Run.** Two inputs in the plane, labels +1, 2,000 steps of length 0.1 from W = 0 (or Q = 0 and K = 0.1·N(0, 1), with the decay of the released code). "
        "E1: 5 tokens 0.5·N(0, I), token 0 at (1, ±0.5), the others moved by (−1, 0). E2: 3 tokens 0.3·N(0, I), token 0 moved by (1, 0), the others by (−1, 0), which is our reading. "
        "Queries and head are random unit vectors. The seeds 3 and 1 of the released code belong to its own generator, so our data differ. We train 100 data sets "
        "and count all of them; drawn is the first in which token 0 is best for both inputs, all paths end within 4 degrees of their rays, and the rays to be told apart "
        "(of both inputs in E1, of both norms in E2) are at least 8 degrees apart: " + "; ".join(told) + ".",
        table(["", "trained", "best tokens found, % of trials", "correlation with Frobenius", "with nuclear", "0.99 with its own, % of those"], rows),
        figure("separation", "E1: paths, rays and half margins"),
        figure("two-norms", "E2: four paths and four rays"),
        "**Reading.** Both claims hold, not only in the trial that is drawn. Correlations are over the trials that select the best tokens. Few K Qᵀ have not come to 0.99; those of E1 are still too near to rank one, as they began "
        f"(second singular value as a part of the first, median: {'; '.join(fell) or 'none'}). "
        "The hooks at the ends of the paths of K Qᵀ are the decay: once the softmax is saturated the norm no longer grows, and only the direction moves.",
    )  # fmt: skip


def local() -> str:
    """E3."""
    given = {variant: each for variant in EXPERIMENTS["local"] if (each := found("local", variant))}
    names = {
        "released": "cross, released", "cross-decay": "cross, decay", "cross": "cross, no decay", "self-decay": "self, decay",
        "self": "self, no decay",
    }  # fmt: skip
    short = [variant for variant in names if variant in given]
    if not short:
        return ""
    pairs, others = [], []
    for key in ("W", "KQ"):
        for norm in ("frobenius", "nuclear"):
            told = references.LOCAL[key, norm]
            cells = [
                "; ".join(spread(seen[norm]) for seen in given[variant][key]["shown"].values()) for variant in short
            ]
            pairs.append([NAMES[key], NAMES[norm], *cells, told[references.PLOT], told[references.MEASURED]])
        for variant in short:
            seen = list(given[variant][key]["shown"].values())[-1]
            others.append([
                NAMES[key], names[variant], percent(seen["best"]), number(seen["softmax"]["mean"], 5), spread(seen["both"]),
                spread(seen["efficiency_frobenius"]), spread(seen["efficiency_nuclear"]), percent(seen["feasible"]),
            ])  # fmt: skip
    return part(
        "## E3: local convergence",
        "**Claim.** From random weights, W/‖W‖ goes to the separating matrix of the Frobenius norm at the tokens that training itself selects, K Qᵀ to that of the nuclear norm.",
        "**Run.** 100 trials of n = 6, T = 8, d = 10; 2,000 normalised steps; all variants see the same trials and starts. *Decay*: 2.2·10⁻¹⁶ times the squared norms is added to the "
        "loss. The released code does so for K and Q only; we also show W with it. *Self*: the first token is the query. The gradient is the one that does not cancel, but for *released*: as the released code forms it, with its ε (and its decay for K and Q). Correlations are means ± "
        "deviations over trials, at 1,000 steps; at 2,000 steps.",
        table(["trained", "with", *(names[v] for v in short), "stored plot, cross", "independent measurement, cross"], pairs),
        figure("local", "E3: saturation and correlations over the steps"),
        "At 2,000 steps (*both*: correlation of the two separating matrices with each other; *efficiency*: the smallest margin of W for its norm, as a part of the largest possible):",
        table(["trained", "variant", "best tokens, %", "largest softmax", "both", "efficiency, Frobenius", "efficiency, nuclear", "feasible, %"], others),
        f"Independent measurement: both {references.LOCAL_BOTH}; best tokens {references.LOCAL_BEST['W']} % (W) and {references.LOCAL_BEST['KQ']} % (K, Q).",
        saturation(given),
        reading_local(given),
        long(given),
    )  # fmt: skip


def saturation(given: dict[str, Any]) -> str:
    """When the softmax is saturated."""
    if "released" not in given:
        return ""
    curves = {key: given["released"][key]["curve"] for key in ("W", "KQ")}
    passed = {
        key: next((step for step, value in zip(curve["steps"], curve["softmax"], strict=True) if value >= 0.99), None)
        for key, curve in curves.items()
    }
    return (
        "In the released arithmetic the mean largest weight passes 0.99 within "
        + " and ".join(
            f"{passed[key]} steps ({NAMES[key]}; stored plot: near 1 by about {references.LOCAL_SATURATED[key]})"
            for key in ("W", "KQ")
        )
        + "."
    )


def reading_local(given: dict[str, Any]) -> str:
    """What the decay does."""
    if not {"cross", "cross-decay"} <= set(given):
        return ""
    ends = list(given["long"]["KQ"]["shown"].items()) if "long" in given else []
    later = "".join(f" ({number(seen['nuclear']['mean'], 4)} at {int(step):,} steps)" for step, seen in ends[-1:])
    (without, margin), (decayed, decayed_margin) = (
        [list(given[variant]["KQ"]["shown"].values())[-1][key]["mean"] for key in ("nuclear", "efficiency_nuclear")]
        for variant in ("cross", "cross-decay")
    )
    return (
        "**Reading.** The two matched pairs are near 1 and the two mismatched ones near the correlation of the two matrices themselves, so each parameterisation has its own norm. For K and Q the "
        f"correlation of the released code depends on its decay: with it {number(decayed, 4)} at 2,000 steps, without it {number(without, 4)}, below the band of 0.985. "
        f"Yet the margin is better without: efficiency {number(margin)} against {number(decayed_margin)}. The nuclear norm is flat around its minimum: a matrix can have nearly the largest margin "
        f"and still point a little elsewhere, and only slowly less so{later}. With the decay W ends at a finite norm, where margins are not all equal yet, but the direction is nearer. So correlation and margin are two gauges, and neither alone is enough. Self-attention behaves like cross-attention."
    )  # fmt: skip


def long(given: dict[str, Any]) -> str:
    """20,000 steps."""
    if "long" not in given:
        return ""
    rows = []
    for step, w in given["long"]["W"]["shown"].items():
        kq = given["long"]["KQ"]["shown"][step]
        told = references.LONG.get(int(step), ("–", "–"))
        rows.append([
            f"{int(step):,}", number(w["frobenius"]["mean"], 5), told[0], number(w["efficiency_frobenius"]["mean"]), told[1],
            number(kq["nuclear"]["mean"], 4), number(kq["efficiency_nuclear"]["mean"], 4),
        ])  # fmt: skip
    return part(
        "The same for longer, cross-attention without decay (independent measurement: 30 trials):",
        table(["steps", "W with Frobenius", "independent measurement", "efficiency", "independent measurement", "K Qᵀ with nuclear", "efficiency"], rows),
    )  # fmt: skip


def outcomes() -> str:
    """E4."""
    given = {n: each["widths"] for n in references.OUTCOMES if (each := found("outcomes", f"n-{n}"))}
    if not given:
        return ""
    first = next(iter(given.values()))
    head = ["n", *(f"d = {row['d']}" for row in first)]
    shares = [
        [n, *(f"{percent(row['global'])} ({told})" for row, told in zip(rows, references.OUTCOMES[n], strict=False))]
        for n, rows in given.items()
    ]
    kinds = [
        [n, *(f"{percent(row['local'])} / {percent(row['not_local'])}" for row in rows)] for n, rows in given.items()
    ]
    support = [
        [n, *(percent(row["all_support"]) + (f" ({references.ALL_SUPPORT[n, row['d']]})" if (n, row["d"]) in references.ALL_SUPPORT else "") for row in rows)]
        for n, rows in given.items()
    ]  # fmt: skip
    near = [[n, *(number(row["correlation"]["mean"], 4) for row in rows)] for n, rows in given.items()]
    beside = [
        (row, told / 100) for n, rows in given.items() for row, told in zip(rows, references.OUTCOMES[n], strict=False)
    ]
    apart, beyond = (
        max(100 * abs(row["global"] - told) for row, told in beside),
        sum(differ(row, told) for row, told in beside),
    )
    wide = [row for rows in given.values() for row in rows if row["d"] >= 5]
    zero = {n: each["widths"] for n in given if (each := found("outcomes", f"n-{n}-zero"))}
    moved = [
        100 * (z["global"] - row["global"]) for n, rows in zero.items() for z, row in zip(rows, given[n], strict=True)
    ]
    return part(
        "## E4: how often the best tokens are found",
        "**Claim.** With a larger width training more often selects the best token of every input, since more tokens hold the margin up and fewer selections are stable. The paper's own sizes "
        "are not known here, and the released code does not have this experiment: this is a stand-in.",
        f"**Run.** T = 5, {first[0]['trials']} trials ({first[-1]['trials']} from d = 20 on), 1,500 normalised steps of W from random weights. Per cent of the runs whose every selected token is the best; in brackets the independent measurement of the same stand-in:",
        table(head, shares),
        "Not all best, but locally optimal / not locally optimal, per cent of the runs:",
        table(head, kinds),
        "All other tokens are support tokens at the selection, per cent of the runs (in brackets the independent measurement):",
        table(head, support),
        "Mean correlation of W with the separating matrix at its selection:",
        table(head, near),
        figure("outcomes", "E4: outcomes by width"),
        f"**Reading.** The share rises with d and falls with n, as claimed; it is within {apart:.0f} points of the independent measurement everywhere, and in {beyond} of {len(beside)} cells further from it than two standard errors of the difference (chance alone makes one in twenty). From d = 5 on at least "
        f"{percent(min(row['locally_optimal'] for row in wide))} % of the runs end at a locally optimal selection. At every n and d {percent(min(row['feasible'] for rows in given.values() for row in rows))} % of the selections or more had a separating matrix. "
        "But all tokens are support only at small n and large d, far more rarely than the best tokens are found: that condition does not explain the rise by itself."
        + (f" From W = 0, on the same trials, the share changes by {min(moved):+.0f} to {max(moved):+.0f} points." if moved else ""),
    )  # fmt: skip


def differ(row: dict[str, Any], told: float) -> bool:
    """Whether two shares of as many trials each are further apart than two standard errors of their difference."""
    mean = (row["global"] + told) / 2
    return (row["global"] - told) ** 2 > 4 * 2 * mean * (1 - mean) / row["trials"]


def ranks() -> str:
    """E5."""
    given = {name: each["widths"] for name in EXPERIMENTS["ranks"] if (each := found("ranks", name))}
    if not given:
        return ""
    rows = []
    for name, widths in given.items():
        _, n, _, T = name.split("-")
        for row in widths:
            share, published = row["feasible"], row["published"]
            mixed = share * (row["frobenius"]["mean"] or 0) + (1 - share)
            rows.append([
                n, T, row["d"], percent(share), number(row["frobenius"]["mean"], 2), number(row["nuclear"]["mean"], 2),
                number(published["nuclear"]["mean"], 1), number(published["accurate"]["mean"], 1), published["infeasible"], number(mixed, 2),
            ])  # fmt: skip
    beside = [
        [n, d, number(row["frobenius"]["mean"], 1), a, number(row["published"]["nuclear"]["mean"], 1), b, number(row["nuclear"]["mean"], 1), c]
        for (n, d), (a, b, c) in references.RANKS.items()
        for row in given.get(f"n-{n}-T-5", [])
        if row["d"] == d
    ]  # fmt: skip
    plotted = [
        f"n = {n}, d = {d}: {number(row['feasible'] * row['frobenius']['mean'] + 1 - row['feasible'], 2)} (stored plot about {told})"
        for (n, d), told in references.RANK_PLOT.items()
        for row in given.get(f"n-{n}-T-5", [])
        if row["d"] == d and row["frobenius"]["mean"] is not None
    ]
    everything = [row for widths in given.values() for row in widths]
    gap = max(row["nuclear_worst_gap"] or 0 for row in everything)
    open_still = [row for row in everything if row["nuclear_unsolved"]]
    left = (
        f"{sum(row['nuclear_unsolved'] for row in open_still)} were not solved to their gap, all at d = {min(row['d'] for row in open_still)} to "
        f"{max(row['d'] for row in open_still)}, where many are nearly infeasible; the largest gap left is {gap:.0e}, and ranks there are less sure"
        if open_still
        else "all were solved to their gap"
    )
    return part(
        "## E5: ranks",
        "**Claim.** At the best tokens both separating matrices have a rank of at most min(n, d), and the nuclear norm gives a lower one.",
        f"**Run.** No training. {everything[0]['trials']} trials a point. *Frobenius* and *nuclear* are solved to gaps of 10⁻⁸ and 10⁻⁵, and singular values count from 10⁻⁶ of the largest on; trials without a separating matrix "
        "have no rank and are counted apart. *The published way*, as the released code does it: cvxpy's SCS with its own tolerance, singular values above 10⁻⁷, and 1 for an infeasible trial (which is what the rank of nothing comes to); it takes "
        f"long, so only the first {everything[0]['published']['trials']} trials of each point, with the accurate rank of these beside it. *Infeasible as 1*: the Frobenius mean, if infeasible trials were counted as rank 1.",
        table(["n", "T", "d", "feasible, %", "Frobenius", "nuclear", "the published way", "accurate, same trials", "infeasible of these", "Frobenius, infeasible as 1"], rows),
        figure("ranks", "E5: mean ranks by width"),
        "Beside the independent measurement (10 trials, T = 5; theirs right of ours):",
        table(["n", "d", "Frobenius", "theirs", "published way", "theirs", "nuclear, accurate", "theirs"], beside),
        "**Reading.** The low rank of the nuclear norm is real and much stronger than the published way shows: there, noise of the loose solver counts as rank, and the curve all but follows that of the Frobenius norm. At small d the "
        f"published points are mostly infeasible trials: {'; '.join(plotted)}. With n = 5 accurate ranks stop at 5 for every T. Of {sum(row['nuclear']['trials'] for row in everything):,} nuclear problems {left}.",
    )  # fmt: skip


def nonlinear() -> str:
    """E6."""
    given = {
        (d, gradient): each
        for d in references.NONLINEAR_PLOT
        for gradient, ending in (("released", ""), ("stable", "-stable"))
        if (each := found("nonlinear", f"d-{d}{ending}"))
    }
    if not given:
        return ""

    def told(values: dict[int, Any], d: int, gradient: str) -> str:
        value = values[d] if gradient == "released" else "–"
        return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)

    means = [
        [d, gradient, each["formula"]["trials"], *(number(each[key]["mean"]) for key in PREDICTIONS),
         told(references.NONLINEAR_PLOT, d, gradient), told(references.NONLINEAR_MEASURED, d, gradient)]
        for (d, gradient), each in given.items()
    ]  # fmt: skip
    medians = [
        [d, gradient, *(number(each[key]["median"], 4) for key in PREDICTIONS), told(references.NONLINEAR_MEDIANS, d, gradient),
         *(number(each[key]["trimmed"]) for key in PREDICTIONS)]
        for (d, gradient), each in given.items()
    ]  # fmt: skip
    fates = sorted({fate for each in given.values() for fate in each["fates"]})
    counts = [
        [d, gradient, each["tried"], *(each["fates"].get(fate, 0) for fate in fates),
         "{} of {}".format(*references.NONLINEAR_TRIED[d]) if gradient == "released" else "–", number(each["tokens"], 2)]
        for (d, gradient), each in given.items()
    ]  # fmt: skip
    kinds = [
        [d, gradient, *(cell for kind in ("saturated", "floor", "above") for cell in (each[kind]["trials"], number(each[kind]["mean"], 4), number(each[kind]["median"], 4))),
         f"{each['mixing']['floor']} of {each['mixing']['inputs']}", f"{each['single']['floor']} of {each['single']['inputs']}"]
        for (d, gradient), each in given.items()
    ]  # fmt: skip
    return part(
        "## E6: a nonlinear head",
        "**Claim.** With a head that likes mixtures of tokens, W goes to W_fin + R·W_dir: a finite part that fixes the weights of the selected tokens, and a direction that separates them from the others.",
        "**Run.** Head 1ᵀReLU(Vᵀx), V Gaussian, d × d (our choice), of unit Frobenius norm; n = 3, T = 4, 2,001 normalised steps; data with at least one label −1. As in the released code a token of weight 10⁻³ or more is selected, one of 10⁻⁶ or less masked; "
        "trials with a weight between, with nothing masked, or without a separating matrix are left out. Trials are trained by the thousand until enough are accepted. *Released*: the gradient as the released code forms it, with its ε, which brings training to a halt once the "
        "masked weights are near 10⁻¹⁶. *Stable*: the gradient of the library, which goes on. Mean 1 − correlation of the trained W:",
        table(["d", "gradient", "trials", *PREDICTIONS.values(), "all three, stored plot", "all three, independent measurement"], means),
        "Medians, and means without the largest 5 %:",
        table(["d", "gradient", *(f"{name}, median" for name in PREDICTIONS.values()), "both parts, median, independent measurement", *(f"{name}, trimmed" for name in PREDICTIONS.values())], medians),
        "What comes of the trials:",
        table(["d", "gradient", "tried", *fates, "accepted, independent measurement", "tokens selected, mean"], counts),
        "Both parts by kind of trial. *Saturated*: the largest masked weight is below 10⁻¹⁴. *Floor*: in the last quarter of training the head was at some time 0 on some input, where it has no gradient; *above*: never. The last columns count inputs on the floor, of those that select several tokens and of those that select one.",
        table(["d", "gradient", *(f"{kind}, {what}" for kind in ("saturated", "floor", "above") for what in ("trials", "mean", "median")), "inputs on the floor, several tokens", "one token"], kinds),
        figure("nonlinear", "E6: three predictions, and the formula against the largest masked weight"),
        reading_nonlinear(given),
    )  # fmt: skip


def reading_nonlinear(given: dict[tuple[int, str], Any]) -> str:
    """The order, and what a head of 0 does."""
    ordered = {
        gradient: [str(d) for (d, which), each in given.items() if which == gradient and each["formula"]["trials"] and each["formula"]["mean"] < each["direction"]["mean"] < each["token"]["mean"]]
        for gradient in ("released", "stable")
    }  # fmt: skip
    inputs, floor, minus = (
        sum(each["mixing"][key] for each in given.values()) for key in ("inputs", "floor", "floor_of_minus")
    )
    far, far_floor = (sum(each["far"][key] for each in given.values()) for key in ("trials", "floor"))
    return (
        f"**Reading.** Both parts < direction only < single token holds in the means at d = {', '.join(ordered['released']) or 'none'} with the released gradient, and at d = {', '.join(ordered['stable']) or 'none'} with the stable one. The means are made up of few trials "
        "that fit badly, so medians stand beside them. Where the mixtures come from: the head is never below 0, and an input of label −1 that reaches this floor has nothing left to gain. "
        f"Of {inputs:,} inputs that select several tokens {floor:,} were on the floor late in training, {minus:,} of these with label −1: they rest at whatever mixture reached it, or step in and out of it. The formula only sees attention weights, and takes their tokens for selected or "
        f"masked like any other. Of {far:,} trials with 1 − correlation above {FAR:g}, {far_floor:,} have such an input. With the stable gradient, where training does not halt and W goes on growing, there are more of these; trials that stay above the floor fit the better the further they go, "
        "and in the median so do wide ones on it. So the formula holds where the head has a gradient, and part of the good fit of this experiment seems to rest on where its arithmetic stops."
    )  # fmt: skip


def quadratic() -> str:
    """E7."""
    if (given := found("quadratic", "orthonormal")) is None:
        return ""
    rows = [
        [f"{row['lambda']:g}", number(row["tokens"], 2), number(row["tokens_ideal"], 2), f"{row['weights_apart']:.0e}", percent(row["near"]), percent(row["far"]),
         *(number(row[key]["mean"], 4) for key in PREDICTIONS), row["finite"]["trials"],
         "–" if row["finite"]["mean"] is None else f"{max(row['finite']['mean'], 0.0):.0e}", row["infeasible"]]
        for row in given["weights"]
    ]  # fmt: skip
    first, last = given["weights"][0], given["weights"][-1]
    most = max(abs(row["tokens"] - row["tokens_ideal"]) for row in given["weights"])
    return part(
        "## E7: a quadratic head",
        "**Claim.** With h(x) = vᵀx − λ‖x‖² and orthonormal tokens a larger λ selects more tokens. (The released code has a stub of this that cannot run, and no numbers; what follows is ours.)",
        "**Run.** On orthonormal tokens the best attention weights are known: the point of the simplex nearest to g/(2λ), with g the scores vᵀx of the tokens. From it alone, before any training, follow the selected tokens, W_fin and W_dir; only the length R is taken from the trained W. "
        f"{first['trials']} trials of n = 3, T = 5, d = 8, labels +1, W from zero, 2,000 normalised steps at each of the rates 0.1, 0.03, 0.01, 0.003, 0.001. *Weights apart*: the largest difference of a trained attention weight from the best one, median over trials; *there*: all within 0.01; *elsewhere*: one is more than 0.1 off. "
        "1 − correlations are over these trials; where no token is masked W stays finite and is held against W_fin.",
        table(["λ", "tokens selected", "predicted", "weights apart", "there, %", "elsewhere, %", *PREDICTIONS.values(), "finite trials", "W_fin", "infeasible"], rows),
        figure("quadratic", "E7: selected tokens over λ"),
        f"**Reading.** From λ = {first['lambda']:g} to {last['lambda']:g} an input selects {number(first['tokens'], 2)} to {number(last['tokens'], 2)} tokens, everywhere within {most:.2f} of the prediction. Trials that are elsewhere have kept another token than a best one; those that are neither have lost a token whose best weight is small, a few per cent. "
        "The finite part matters more and more as more tokens are mixed; where all are, W is W_fin to the last step's length, and no direction is left.",
    )  # fmt: skip


def missing() -> str:
    """What is not run yet."""
    short = [
        f"{experiment} ({name})"
        for experiment, variants in EXPERIMENTS.items()
        for name in variants
        if found(experiment, name) is None
    ]
    return f"**Not run yet:** {', '.join(short)}." if short else ""


def times() -> str:
    """How long it takes."""
    rows = []
    for experiment in EXPERIMENTS:
        if seconds := [
            sum(file.get("seconds", 0) for file in result.files.values()) for result in ARCHIVE.kept(experiment)
        ]:
            rows.append([f"`dualform reproduce attention-svm/{experiment}`", len(seconds), f"{sum(seconds) / 60:.1f}"])
    text = "Minutes are of one thread beside other work."
    return part("## Commands and times", table(["command", "runs", "minutes"], rows), text) if rows else ""


HEAD = """# Transformers as support vector machines

After Tarzanagh, Li, Thrampoulidis, Oymak (2023), *Transformers as Support Vector Machines*, arXiv 2308.16898. This page is made by
`python -m experiments.attention_svm.page` from the run folders of

    dualform reproduce attention-svm

**Claim of the paper.** Training one attention layer with a fixed head drives its query-key matrix W to infinity, along the direction that separates
the tokens it selects from the others by the largest margin: a support vector machine over tokens. Training W comes to the smallest Frobenius norm,
training keys and queries apart to the smallest nuclear norm. The solvers and the training are part of the library: [docs/svm.md](../svm.md).

## Where we differ

1. The text of the paper was not at hand. What stands beside our numbers is either read off the figures stored with the authors' released code (*stored plot*: about so much), or was measured by a
   re-implementation in NumPy of its own (*independent measurement*). None of it is quoted from the paper.
2. Our random numbers are not those of the released code, so no single data set is the same.
3. The gradient here does not cancel when the softmax saturates, so descent goes on where the released code follows rounding noise. E3 and E6 are also run in the arithmetic of the released code.
4. Separating matrices are solved by our own solvers to a certified gap instead of cvxpy's defaults; infeasible trials have no rank and no correlation, and are counted apart. E5 also shows the published way.
5. E4 is a stand-in of sizes of our own, and E7 a setting of our own.
6. All data of E1 to E7 are synthetic and small, as in the released code. The last part, on trained transformers, is ours."""


def main() -> None:
    """Collect results, draw figures and write the page, or restore run folders."""
    PAGE.main(
        HEAD, [missing, paths, local, outcomes, ranks, nonlinear, quadratic, trained, acceptance, times], draw_all
    )


if __name__ == "__main__":
    main()
