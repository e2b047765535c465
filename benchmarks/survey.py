"""Scores of a survey beside captum's TracInCP and kronfluence's EK-FAC: the same networks, data and damping.

make peers, or: python benchmarks/survey.py --peers ENVIRONMENT/bin/python

The peers run in a process and an environment of their own (captum, kronfluence, torch). Needs scikit-learn.
"""

import argparse
import subprocess
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from paper_run import machine, save
from survey_networks import NETWORKS, RATES, losses, scored_layers

import dualform
from dualform.data import small_digits
from dualform.evaluate import spearman

DAMPINGS = (None, 1e-3, 1e-5, 1e-8)
"""None: 0.1 × the mean eigenvalue of the layer; 1e-8: what kronfluence takes by itself."""
STEPS, BATCH = (100, 200, 300), 50
FLOAT32, FLOAT64 = "torch.float32", "torch.float64"
PRECISIONS, BAR, SAME, NEWLINE = ("float64", "float32", "float16"), 0.99, 1e-6, "\n"


def trained(make, x, y):
    """The weights after each of STEPS."""
    torch.manual_seed(0)
    model, states = make(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, STEPS[-1] + 1):
        index = torch.randint(len(x), (BATCH,))
        losses(model(x[index]), y[index]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in STEPS:
            states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return states


def example_losses(model, batch):
    return losses(model(batch[0]), batch[1])


def surveyed(problem, rates, dtype, method, dampings=(None,), target=None):
    """Scores for each damping, and the CPU seconds of the survey and of the first and the last question."""
    kind = torch.float64 if dtype == "float64" else torch.float32
    model, x, labels = NETWORKS[problem.network]().to(kind), problem.train[0].to(kind), problem.train[1]
    checkpoints = list(zip(problem.states[-len(rates) :], rates, strict=True))
    model.load_state_dict(problem.states[-1])
    seconds = [time.process_time()]
    memory = dualform.survey(
        model, example_losses, lambda index: (x[index], labels[index]), problem.folder, examples=len(x), dtype=dtype,
        checkpoints=checkpoints, layers=scored_layers(model), overwrite=True, progress=False,
    )  # fmt: skip
    seconds.append(time.process_time())
    answers, inputs = {}, problem.queries[0].to(kind)
    for damping in dampings:
        answer = memory.scores(model, inputs, method=method, target=target, damping=damping, progress=False)
        answers[damping] = answer.values
        seconds.append(time.process_time())
    spans = [end - begin for begin, end in pairwise(seconds)]
    return answers, spans[0], spans[1], spans[-1]


def relative(ours, theirs):
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


def rank(ours, theirs):
    """The mean and the least rank correlation of a query."""
    correlations = spearman(ours, theirs)
    return f"{float(correlations.mean()):.6f} / {float(correlations.min()):.6f}"


def damping_name(damping):
    return "0.1 × mean eigenvalue" if damping is None else f"{damping:g}"


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--peers", required=True, help="the python of an environment with captum and kronfluence")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    images, labels = small_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = images.flatten(1)[order].float() / 16, labels[order]
    train, queries = (x[:1000], y[:1000]), (x[1000:1100], y[1000:1100])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        states = {network: trained(make, *train) for network, make in NETWORKS.items()}
        problem = {"states": states, "train": train, "queries": queries, "dampings": DAMPINGS}
        torch.save(problem, folder / "problem.pt")
        script = Path(__file__).with_name("survey_peers.py")
        environment = {"OMP_NUM_THREADS": "1", "HOME": str(folder), "PATH": "/usr/bin:/bin"}
        subprocess.run([options.peers, str(script), str(folder)], check=True, env=environment)
        peers = torch.load(folder / "peers.pt", weights_only=True)
        tables = Tables()
        for network in NETWORKS:
            problem = Problem(network, states[network], train, queries, folder / "memory", peers["answers"][network])
            compare_tracin(problem, tables)
            compare_ekfac(problem, tables)
    save("survey", page(peers["versions"], tables))


class Problem(NamedTuple):
    """A network with its checkpoints, the data, a place for memories, and the answers of the peers."""

    network: str
    states: list
    train: tuple
    queries: tuple
    folder: Path
    peers: dict


class Tables:
    """Lines of the three tables, and the least rank correlation with kronfluence by precision and damping."""

    def __init__(self):
        self.tracin, self.ekfac, self.costs = [], [], []
        self.least, self.in_float64 = {}, []


def compare_tracin(problem, tables):
    theirs, labels = problem.peers["tracin"], problem.queries[1]
    cells = []
    for dtype in ("float32", "float16"):
        scores, *seconds = surveyed(problem, RATES, dtype, "gradient", target=lambda logits: losses(logits, labels))
        cells += [f"{relative(-scores[None], theirs):.1e}", rank(-scores[None], theirs)]
        if dtype == "float32":
            tables.costs.append(
                f"| {problem.network}: TracIn, {len(RATES)} checkpoints | {seconds[0]:.2f} | {seconds[1]:.2f} | 0 | "
                f"{problem.peers['tracin_seconds']:.2f} |"
            )
    tables.tracin.append(f"| {problem.network} | {' | '.join(cells)} |")


def compare_ekfac(problem, tables):
    ours = {}
    for dtype in ("float64", "float32", "float16"):
        scores, survey_seconds, first, again = surveyed(problem, (1.0,), dtype, "ekfac", DAMPINGS, problem.queries[1])
        ours[dtype] = scores
        if dtype == "float32":
            fitted, scored = problem.peers[FLOAT32]["seconds"]
            tables.costs.append(
                f"| {problem.network}: EK-FAC | {survey_seconds + first - again:.2f} | {again:.2f} | {fitted:.2f} | "
                f"{scored:.2f} |"
            )
    for damping in DAMPINGS:
        single, double = (problem.peers[kind]["scores"][damping] for kind in (FLOAT32, FLOAT64))
        scaled = {dtype: -len(problem.train[0]) * scores[damping] for dtype, scores in ours.items()}
        tables.in_float64.append(relative(scaled["float64"], double))
        cells = [f"{tables.in_float64[-1]:.1e}"]
        cells += [rank(scores, double) for scores in [*scaled.values(), single]]
        tables.ekfac.append(f"| {problem.network} | {damping_name(damping)} | {' | '.join(cells)} |")
        for dtype, scores in scaled.items():
            least = float(spearman(scores, double).min())
            tables.least[dtype, damping] = min(least, tables.least.get((dtype, damping), 1.0))


def page(versions, tables):
    names = ", ".join(f"{package} {number}" for package, number in versions.items())
    reached = {dtype: [damping_name(d) for d in DAMPINGS if tables.least[dtype, d] >= BAR] for dtype in PRECISIONS}
    verdict = "; ".join(f"{dtype}: {', '.join(dampings) or 'none'}" for dtype, dampings in reached.items())
    largest = max(tables.in_float64)
    reason = (
        f"In float64 the two programs agree to {largest:.0e} at every damping, so what is left in float32 and float16 "
        "is rounding:\nwhere eigenvalues are smaller than the damping, rounding errors are divided by the damping."
        if largest < SAME
        else f"In float64 the two programs differ by up to {largest:.0e}: rounding is not the reason."
    )
    return f"""# Scores of a survey beside captum and kronfluence

Networks on the 8 × 8 digits of scikit-learn: 1,000 examples, 100 queries, SGD with learning rate 0.1 and batches
of {BATCH}. The same weights, data, layers (linear and convolutional) and damping go to both sides, each in an
environment of its own: {names}. Printed by `benchmarks/survey.py`; `make peers`
makes the environment of the peers and runs it.

A rank correlation is over the examples, mean / least of the 100 queries. A difference is the largest one, relative to
the largest score.

## Gradient similarity

Checkpoints after {", ".join(map(str, STEPS))} steps, learning rates {", ".join(map(str, RATES))}; the target is the
loss of the query. captum's `TracInCP` in float32.

| network | float32 slots: difference | rank | float16 slots: difference | rank |
|---|---|---|---|---|
{NEWLINE.join(tables.tracin)}

## EK-FAC

`use_empirical_fisher=True`, at the last weights; the target is the logit of the query's class. kronfluence takes the
eigenbases from all tokens (pixels) alike, and adds up the gradients of an example's tokens before it squares them for
the eigenvalues; so does a survey. kronfluence's scores are ours times minus the number of examples. It ran in float64,
which is the reference, and in float32. A damping of 1e-8 is its default.

| network | damping | ours, float64: difference | rank | ours, float32: rank | ours, float16: rank | its float32: rank |
|---|---|---|---|---|---|---|
{NEWLINE.join(tables.ekfac)}

Dampings for which every query of every network has a rank correlation of at least {BAR} with the reference:
{verdict}.
{reason}

## Cost

CPU seconds on one thread in float32. Once: ours is the survey, with the factors for EK-FAC; theirs the factors.
Scores: all 100 × 1,000.

| | ours: once | ours: scores | theirs: once | theirs: scores |
|---|---|---|---|---|
{NEWLINE.join(tables.costs)}

{machine()}"""


if __name__ == "__main__":
    main()
