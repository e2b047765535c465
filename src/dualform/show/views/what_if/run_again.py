"""Training again: what leaving some visits out is predicted to change, and what it really changes.

The network is trained again as it was recorded, once to see that it comes out the same; then the influence of every
visit on the logits of an example is carried back through training, and training without the hidden visits is executed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dualform.errors import DualformError
from dualform.explain import Influence, ReplayedRun
from dualform.explain.query import logits_of, run_model
from dualform.progress import Progress
from dualform.store import outside_inference_mode
from dualform.tasks import classification

from ...text import need_logits
from ..explorer import ExamplePlace, Explorer
from ..work import PendingWork

AGAIN, BACK, MANY = 1.3, 3.0, 0.35
"""Time of training again, of carrying influence back, and of each further class, relative to the bare trainings."""

MOST_CLASSES = 20
"""Networks with more outputs are not asked for the influence on all of them."""


@dataclass(frozen=True)
class RepeatedRun:
    """A training that was run again, and whether it came out the same."""

    run: ReplayedRun
    exact: bool
    sentence: str


@dataclass(frozen=True)
class RunAgain:
    """The logits of one example without some visits: predicted through training, and really trained again.

    What is not known yet is pending work; where training cannot be run again, ``reason`` says why.
    """

    predicted: Float[Tensor, " classes"] | PendingWork | None = None
    retrained: Float[Tensor, " classes"] | PendingWork | None = None
    reason: str = ""
    caveat: str = ""
    """Why the numbers should be taken with care; empty if the run is repeated bit for bit."""


def run_again(explorer: Explorer, place: ExamplePlace, hidden: Bool[np.ndarray, " V"], key: Any) -> RunAgain:
    """What training again says about an example without the hidden visits; ``key`` names the mask."""
    if reason := cannot_run(explorer):
        return RunAgain(reason=reason)
    try:
        repeated = _repeated(explorer)
        if isinstance(repeated, PendingWork):
            return RunAgain(predicted=repeated)
        return RunAgain(
            _predicted(explorer, repeated.run, place, hidden),
            _retrained(explorer, repeated.run, place, hidden, key),
            caveat="" if repeated.exact else repeated.sentence,
        )
    except DualformError as error:
        return RunAgain(reason=str(error))


def cannot_run(explorer: Explorer) -> str:
    """Why training cannot be run again; empty if it can be tried."""
    if explorer.run is not None:
        return ""
    if explorer.index not in explorer.memory.store.visits.column_names:
        return (
            f"Training cannot be run again: no column '{explorer.index}' was noted, so it is not known which examples "
            "it saw."
        )
    train = explorer.train
    if train is None:
        return "Training cannot be run again without the training examples: give them with --data."
    if train.labels is None or train.is_stream or train.others or explorer.outputs < 2:
        return (
            "The explorer itself can only run a classifier’s training again. For another loss, write "
            "dualform.explore(memory, model, run=memory.replay(model, losses, data))."
        )
    return ""


def _repeated(explorer: Explorer) -> RepeatedRun | PendingWork:
    """The run, trained again once."""

    def work(progress: Progress) -> RepeatedRun:
        run = explorer.run if explorer.run is not None else _classifier(explorer, progress)
        check = run.check()
        return RepeatedRun(run, check.exact, str(check))

    return explorer.work_queue.result(
        ("run",), "training again, to see that it comes out the same", AGAIN * training_seconds(explorer), work
    )


def _classifier(explorer: Explorer, progress: Progress) -> ReplayedRun:
    train = explorer.train
    assert train is not None and train.labels is not None
    labels = torch.as_tensor([train.label(i) or 0 for i in range(len(train))])
    inputs = train.inputs if isinstance(train.inputs, Tensor) else train.rows(range(len(train)))
    fork = explorer.fork()
    return fork.memory.replay(fork.model, *classification(inputs, labels), index=explorer.index, progress=progress)


def _predicted(
    explorer: Explorer, run: ReplayedRun, place: ExamplePlace, hidden: Bool[np.ndarray, " V"]
) -> Float[Tensor, " classes"] | PendingWork | None:
    logits = need_logits(explorer.predict(place))[0].double()
    if len(logits) > MOST_CLASSES:
        return None
    influence = _influence(explorer, run, place, len(logits))
    if isinstance(influence, PendingWork):
        return influence
    return logits - influence.per_visit[:, torch.from_numpy(hidden)].double().sum(1)


def _influence(explorer: Explorer, run: ReplayedRun, place: ExamplePlace, classes: int) -> Influence | PendingWork:
    """The influence of every visit on all logits of an example."""
    x = explorer.inputs(place.set, [place.row] * classes)

    def work(progress: Progress) -> Influence:
        return run.influence(x, target=torch.arange(classes), progress=progress)

    own = explorer.own[place.row][0] if place.set == "own" else ""
    seconds = (BACK + MANY * classes) * training_seconds(explorer)
    return explorer.work_queue.result(("influence", place, own), "the influence through training", seconds, work)


def _retrained(
    explorer: Explorer, run: ReplayedRun, place: ExamplePlace, hidden: Bool[np.ndarray, " V"], key: Any
) -> Float[Tensor, " classes"] | PendingWork:
    weights = torch.from_numpy(~hidden).double()

    def work(progress: Progress) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in run.retrain(weights=weights).state_dict().items()}

    title = f"training again without {int(hidden.sum()):,} visits"
    trained = explorer.work_queue.result(("retrained", key), title, AGAIN * training_seconds(explorer), work)
    if isinstance(trained, PendingWork):
        return trained
    return need_logits(explorer.predict_with(trained, place))[0].double()


def training_seconds(explorer: Explorer) -> float:
    """The seconds that all steps of training take, from a few forward and backward passes."""
    memory = explorer.memory

    def work(progress: Progress) -> float:
        rows = max(1, memory.store.manifest.visits // max(1, memory.step))
        fork = explorer.fork()
        count = fork.count("train")
        if not count:
            return 1e-3 * memory.step
        x = fork.inputs("train", [i % count for i in range(rows)])
        times = []
        with outside_inference_mode(), torch.enable_grad():
            for _ in range(3):
                begin = perf_counter()
                logits_of(run_model(fork.model, x)).sum().backward()
                times.append(perf_counter() - begin)
        return min(times) * memory.step

    seconds = explorer.work_queue.result(("seconds of training",), "the time of a training step", 0.0, work)
    return seconds if isinstance(seconds, float) else 60.0


def named_logits(explorer: Explorer, logits: Tensor, shown: Sequence[int]) -> list[Any]:
    """Classes with their logits and probabilities, in a given order."""
    of_number = {score.number: score for score in explorer.says(logits)}
    return [of_number[number] for number in shown]
