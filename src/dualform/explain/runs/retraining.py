"""Training really done again with other weights of the examples: once, or many times in processes of their own.

The counterfactual is *this run* with other weights: the same order of batches, the same random numbers, the same
normaliser (an example that is left out still counts in the mean of its batch, with a loss of 0). :func:`renormalised`
offers the other one, where the mean of a batch is taken over what is left.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dualform.errors import QueryError
from dualform.progress import Progress
from dualform.record import Tape, record
from dualform.replay import KeptResults, PassTrace, Rerun, copied, hash_of, run_tasks
from dualform.store import Store

from .reference import ReferenceRun, untouched_generator

VisitWeights = Float[Tensor, " visits"]
Folder = str | os.PathLike | None
Function = Callable[[nn.Module], Float[Tensor, " queries"]]


class Trainer:
    """Trains the recorded run again with weights of the visits."""

    def __init__(self, reference: ReferenceRun) -> None:
        self.reference = reference

    def model(self, weights: VisitWeights | None, memory: Folder = None) -> nn.Module:
        """The model that these weights of the visits give; recorded into ``memory`` while it is trained, if asked."""
        if weights is None and memory is None:
            return copied(self.reference.exact.trained)
        return copied(self._train(weights, memory)).eval()

    @cached_property
    def model_to_compare(self) -> nn.Module:
        """The model of all weights 1, as others are trained: a run that differs is not put right at kept states."""
        exact = self.reference.exact
        return exact.trained if exact.check.exact else self.model(torch.ones(len(self.reference.store.visits)))

    def each(
        self,
        weights: Sequence[VisitWeights],
        read: Callable[[nn.Module], Mapping[str, Tensor]],
        subject: str,
        *,
        folder: Folder = None,
        processes: int | None = None,
        progress: Progress = True,
    ) -> list[Mapping[str, Tensor]]:
        """Train once for each line of weights, and give what ``read`` reads from each of the trained models, in order.

        What is in the ``folder`` is not trained again: a result is kept there under the hash of what the run is, of its
        weights, and of the ``subject``, which says what is read.
        """
        kept, keys = KeptResults(folder), [hash_of([self._identity, line.double(), subject]) for line in weights]
        results: dict[str, Mapping[str, Tensor]] = {}
        for key in dict.fromkeys(keys):
            if (result := kept.get(key)) is not None:
                results[key] = result
        places = {key: place for place, key in reversed(list(enumerate(keys))) if key not in results}

        def train(place: int) -> Mapping[str, Tensor]:
            with torch.no_grad():
                return read(self.model(weights[place]))

        seconds = 60 + 50 * self.reference.exact.seconds  # far more than one training takes, however busy the machine
        with self._threads():
            missing = sorted(places.values())
            outcomes = run_tasks(train, missing, processes=processes, seconds=seconds, progress=progress)
            with closing(outcomes):  # ends the workers at once, whatever happens here
                for place, result in outcomes:
                    kept.put(keys[place], result)
                    results[keys[place]] = result
        return [results[key] for key in keys]

    def subject_of(self, function: Function, name: str) -> str:
        """What a target is, for the key of a result: its name, and its values for three networks, bit for bit.

        Inputs and functions are told apart by what they give, so that nothing has to be said about them.
        """
        rerun, trained = self.reference.rerun, self.reference.exact.trained
        with untouched_generator(), torch.no_grad(), self._threads():
            rerun.load(self.reference.first)
            first, between = copied(rerun.model).eval(), copied(trained)
            for tensor, other in zip(between.parameters(), first.parameters(), strict=True):
                tensor.lerp_(other, 0.5)
            values = [function(network) for network in (first, between, trained)]
        return hash_of([name, *values])

    def _train(self, weights: VisitWeights | None, memory: Folder = None) -> nn.Module:
        """The model of the rerun, trained. The next training goes on with it: it must stay in training mode."""
        rerun = self.reference.rerun
        assert self.reference.exact  # the run with all weights 1 comes first: it finds the norm that clips
        with untouched_generator(), self._threads():
            rerun.weights = weights
            try:
                rerun.load(self.reference.first)
                if memory is None:
                    with self.reference.bar("training again", is_one_of_many=True) as watch:
                        for step in range(1, len(rerun.steps) + 1):
                            rerun.run(step)
                            if watch:
                                watch(1)
                else:
                    _run_recorded(rerun, memory, self.reference.store)
            finally:
                rerun.weights = None
        return rerun.model

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """As many threads as the run had with which the outcome is compared."""
        before, threads = torch.get_num_threads(), self.reference.exact.threads
        if threads != before:
            torch.set_num_threads(threads)
        try:
            yield
        finally:
            if threads != before:
                torch.set_num_threads(before)

    @cached_property
    def _identity(self) -> str:
        """What the run is: its visits, the shares of its first batch, and every bit of the network that it trains."""
        reference, rerun = self.reference, self.reference.rerun
        trained, first_pass = reference.exact.trained, rerun.steps[0].passes[0]
        with untouched_generator(), torch.no_grad(), self._threads():
            torch.manual_seed(0)
            rerun.load(reference.first)
            shares = rerun.losses(rerun.model, rerun.data(first_pass.index))
        index = torch.cat([one_pass.index for step in rerun.steps for one_pass in step.passes])
        tensors = [part for name, tensor in trained.state_dict().items() for part in (name, tensor)]
        return hash_of(["retrained", str(len(rerun.steps)), index, shares, *tensors])


@dataclass(frozen=True)
class Retraining:
    """Trains again with a weight for each example, and gives the targets of the trained network.

    Call it with one line of weights, or :meth:`many` with several. Made by :meth:`ReplayedRun.retraining`.
    """

    trainer: Trainer
    function: Function
    example_of_visit: Int[Tensor, " visits"]
    name: str
    folder: Folder = None
    processes: int | None = None
    progress: Progress = True
    renormalise: bool = False

    def __call__(self, weights: Float[Tensor, " examples"]) -> Float[Tensor, " queries"]:
        return replace(self, processes=1, progress=False).many(weights[None])[0]

    def many(self, weights: Float[Tensor, "runs examples"]) -> Float[Tensor, "runs queries"]:
        """The targets for each line of weights: in parallel processes, and without what the folder holds already."""
        examples = int(self.example_of_visit.max()) + 1
        if weights.ndim != 2 or weights.shape[1] != examples:
            raise QueryError(
                f"weights have shape {tuple(weights.shape)}: give one line a training, with one number for each of the "
                f"{examples} examples."
            )
        lines = [line[self.example_of_visit] for line in weights]
        if self.renormalise:
            lines = [renormalised(self.trainer.reference.rerun, line) for line in lines]
        subject = self.trainer.subject_of(self.function, self.name)
        results = self.trainer.each(
            lines, lambda model: {"values": self.function(model).detach().cpu()}, subject,
            folder=self.folder, processes=self.processes, progress=self.progress,
        )  # fmt: skip
        return torch.stack([result["values"] for result in results])


def renormalised(rerun: Rerun, weights: VisitWeights) -> VisitWeights:
    """Weights with which the mean of each batch is taken over what is left: times batch size / sum of its weights.

    This holds where the shares of a batch are divided by its number of examples. A batch of which nothing is left
    gives no gradient.
    """
    scaled = weights.double().clone()
    for step in rerun.steps:
        for one_pass in step.passes:
            part = slice(one_pass.first, one_pass.first + len(one_pass.index))
            left = scaled[part].sum()
            scaled[part] *= 0.0 if left == 0 else len(one_pass.index) / left
    return scaled


def _run_recorded(rerun: Rerun, path: str | os.PathLike, store: Store) -> None:
    """Run all steps, and record them as a memory of their own, with the columns and the recipe of the first one."""
    visits, dtype = store.visits, store.manifest.dtype
    noted = [name for name in visits.column_names if name not in ("visit", "step", "row", "rank")]
    tape = record(rerun.model, list(rerun.optimizers), path, dtype=dtype, rules=rerun.taught, progress=False)
    tape.describe_like(store.path, store.manifest.recipe)
    with tape:
        rerun.before_pass = lambda one_pass: _note(tape, one_pass, visits, noted)
        try:
            rerun.run(len(rerun.steps))
        finally:
            rerun.before_pass = None


def _note(tape: Tape, one_pass: PassTrace, visits: pa.Table, names: Sequence[str]) -> None:
    lines = visits.slice(one_pass.first, len(one_pass.index))
    tape.note(**{name: lines[name].to_numpy(zero_copy_only=False) for name in names})


def require_one_choice(*choices: Any) -> None:
    """Raise unless at most one way of choosing visits is used."""
    if sum(choice is not None for choice in choices) > 1:
        raise QueryError("pass one of without=, only= and weights=.")
