"""A recorded training that can be run again: what would have changed, predicted and really trained.

There are three answers to "what if this example had not been there?", in rising order of trust and cost:

- *direct*: what the example put into the weights, with everything else held fixed,
- *through training*: its influence carried through every later step of this run, to first order,
- *retrained*: the network really trained again without it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.errors import QueryError, warn
from dualform.progress import OnProgress, Progress, bar
from dualform.replay import (
    Data,
    InfluenceKind,
    Influences,
    Losses,
    MakeOptimizer,
    Rerun,
    copied,
    influences,
    load_first_weights,
    rebuild_optimizers,
    step_traces,
    taught_rules,
    untouched_generator,
)
from dualform.rules import Rule
from dualform.sizes import bytes_of
from dualform.store import Store, outside_inference_mode
from dualform.types import DType

from ..filters import Filter, matching, named
from ..notebook import Displayed, run_html
from ..query import Target, choose, examples_first, first_axis, labelled, logits_of, run_model
from .answers import Influence, RunCheck
from .comparison import Comparison
from .metasmoothness import Metasmoothness
from .reference import WORTH_A_BAR, ReferenceRun
from .replayed_slots import ReplayedSlots, replay_slots
from .retraining import Folder, Retraining, Trainer, renormalised, require_one_choice

if TYPE_CHECKING:
    from ..memory import Memory
    from ..spotlight import Spotlight


PARTS_OF_BUDGET = 3
"""Memory is for states on the way, for the steps of a stretch, and for the adjoints of queries."""


class ReplayedRun(Displayed):
    """A recorded training, run again on a copy of the model. Made by ``memory.replay(model, losses, data)``."""

    def __init__(
        self,
        store: Store,
        model: nn.Module,
        losses: Losses,
        data: Data,
        *,
        index: str = "index",
        optimizer: MakeOptimizer | None = None,
        budget: int | str = "4 GB",
        progress: Progress = True,
    ) -> None:
        self._budget = bytes_of("budget", budget) // PARTS_OF_BUDGET
        store.need_steps()
        store.need_training()
        self.store, self.index_column = store, index
        own = copied(model).train()
        load_first_weights(store, own)
        traces, optimizers = step_traces(store, index), rebuild_optimizers(store, own, optimizer)
        rerun = Rerun(own, optimizers, losses, data, traces, taught=taught_rules(store, optimizers, own))
        self._reference = ReferenceRun(store, rerun, self._budget, progress)
        self._slots: list[ReplayedSlots] = []

    def __repr__(self) -> str:
        return f"ReplayedRun({str(self.store.path)!r}, {len(self._reference.rerun.steps)} steps)"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return run_html(self)

    # ------------------------------------------------------------------------------------------- run again

    def check(self, steps: int | None = None, *, after: int = 0) -> RunCheck:
        """Run again from the first step (all of training, or ``steps`` of it), and compare with what was recorded.

        With ``after`` the stretch that follows this step, from the last whole state that was kept before it.
        """
        return self._reference.check(steps, after)

    def at(self, step: int) -> nn.Module:
        """The model as it was after a step."""
        return self._reference.at(step)

    def retrain(
        self,
        *,
        without: Filter | None = None,
        only: Filter | None = None,
        weights: Tensor | None = None,
        renormalise: bool = False,
        memory: Folder = None,
    ) -> nn.Module:
        """Train again with some visits at weight 0, same order and same normaliser, and give the trained model.

        ``weights`` gives each visit a weight of its own; without any argument training is only repeated. With
        ``renormalise`` the mean of a batch is taken over what is left of it (its shares are multiplied by its size over
        the sum of its weights): another counterfactual than the one that influence predicts. With ``memory`` the
        training is recorded in this folder, for every question that a memory answers, with the recipe of this run.
        """
        return self._trainer.model(self._visit_weights(without, only, weights, renormalise), memory)

    def retrain_many(
        self,
        *,
        without: Sequence[Filter] | None = None,
        only: Sequence[Filter] | None = None,
        weights: Sequence[Tensor] | None = None,
        renormalise: bool = False,
        folder: Folder = None,
        processes: int | None = None,
        progress: Progress = True,
    ) -> list[nn.Module]:
        """Train again for each of several choices, in parallel processes, and give the models in their order.

        A ``folder`` keeps each model under the key of its weights: running again only trains what is missing.
        """
        lines = self._lines(without, only, weights, renormalise)
        states = self._trainer.each(
            lines, lambda model: model.state_dict(), "model", folder=folder, processes=processes, progress=progress
        )
        trained = self._reference.exact.trained
        models = [copied(trained) for _ in states]
        for model, state in zip(models, states, strict=True):
            model.load_state_dict(state)
        return models

    def _lines(
        self,
        without: Sequence[Filter] | None,
        only: Sequence[Filter] | None,
        weights: Sequence[Tensor] | None,
        renormalise: bool = False,
    ) -> list[Tensor]:
        """Weights of the visits, one line for each of several choices."""
        require_one_choice(without, only, weights)
        for word, choices in (("without", without), ("only", only)):
            if isinstance(choices, str):
                raise QueryError(f"{word}={choices!r} is one choice; here give a list of them: {word}=[{choices!r}].")
        lines = [self._visit_weights(choice, None, None, renormalise) for choice in without or ()]
        lines += [self._visit_weights(None, choice, None, renormalise) for choice in only or ()]
        if weights is not None:
            lines += [self._visit_weights(None, None, line, renormalise) for line in weights]
        if not lines:
            raise QueryError("say what to leave out, as a list of choices: without=['label = 3', 'label = 4'].")
        return [line for line in lines if line is not None]

    def _visit_weights(
        self, without: Filter | None, only: Filter | None, weights: Tensor | None, renormalise: bool = False
    ) -> Tensor | None:
        require_one_choice(without, only, weights)
        if weights is not None and weights.shape != (len(self.visits),):
            raise QueryError(
                f"weights has shape {tuple(weights.shape)}; give one number for each of the {len(self.visits)} visits."
            )
        if without is not None:
            weights = torch.from_numpy(~matching(self.visits, without)).double()
        elif only is not None:
            weights = torch.from_numpy(matching(self.visits, only)).double()
        return weights if weights is None or not renormalise else renormalised(self._reference.rerun, weights)

    @cached_property
    def _trainer(self) -> Trainer:
        return Trainer(self._reference)

    # ------------------------------------------------------------------------------------------- slots

    def slots(
        self,
        budget: int | str = "4 GB",
        *,
        layers: Iterable[str] | None = None,
        dtype: DType | None = None,
        batch_dim: int | Mapping[str, int] | None = None,
        folder: str | Path | None = None,
        progress: Progress = True,
    ) -> "Memory":
        """Make a memory with slots of a run that kept none, by running it again: it answers all questions.

        At most ``budget`` bytes of slots ("500 MB") lie on disk at a time, in a temporary folder (inside ``folder``).
        Where that is less than all, questions run stretches of training again. The files are removed by
        :meth:`close`, or when neither the run nor the memory is used any more. ``layers``, ``dtype`` (by default that
        of the memory) and ``batch_dim`` are those of :func:`dualform.record`.
        """
        replayed = replay_slots(
            self._reference,
            budget=budget, layers=layers, dtype=dtype, batch_dim=batch_dim, folder=folder, progress=progress,
        )  # fmt: skip
        self._slots.append(replayed)
        replayed.warn()
        return replayed.memory

    def attend(self, inputs: Any, *, target: Target = None, labels: Any = None) -> "Spotlight":
        """Show what each layer of the trained network recalls from training: :meth:`slots`, made once, are asked."""
        if not self._slots:
            self.slots()
        else:
            self._slots[-1].warn()
        return self._slots[-1].memory.attend(self._slots[-1].trained, inputs, target=target, labels=labels)

    def close(self) -> None:
        """Remove the slots that were made from disk. The run itself can be used as before."""
        while self._slots:
            self._slots.pop().files.close()

    def __enter__(self) -> "ReplayedRun":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------- questions

    @property
    def rules(self) -> list[Rule]:
        """The rule of each optimiser."""
        return self._reference.rerun.rules

    @property
    def visits(self) -> pa.Table:
        return self.store.visits

    def influence(
        self, inputs: Any, *, target: Target = None, labels: Any = None, progress: Progress = True
    ) -> Influence:
        """The influence of every training example on a target of each input, through all of training.

        ``target`` is as in :class:`~dualform.explain.Spotlight`; ``"margin"`` and ``"loss"`` need the ``labels``.
        All inputs are carried back together as far as their adjoints fit into the budget of the run. What the answer
        holds fixed, or takes one branch of, is in its ``note``.
        """
        rules = self.rules
        if all(rule.signs_only for rule in rules):
            raise QueryError(
                f"{rules[0].name} steps by the signs of gradients, and a small change of a weight changes no sign: the "
                "influence of every example through training is 0. Ask run.direct(inputs) for what each example put "
                "into the weights, or run.retrain(without=…) for what really changes."
            )
        return self._influence(inputs, labelled(target, labels), "through training", progress)

    def direct(self, inputs: Any, *, target: Target = None, labels: Any = None, progress: Progress = True) -> Influence:
        """The direct contribution of every training example over all parameters, in the same units."""
        return self._influence(inputs, labelled(target, labels), "direct", progress)

    def compare(
        self,
        inputs: Any,
        *,
        without: Filter | Sequence[Filter] | None = None,
        only: Filter | Sequence[Filter] | None = None,
        target: Target = None,
        labels: Any = None,
        folder: Folder = None,
        processes: int | None = None,
        progress: Progress = True,
    ) -> Comparison:
        """What leaving out some visits changes: directly, predicted through training, and really retrained.

        Several choices in a list are trained in parallel processes, and each has lines of its own in the table.
        """
        require_one_choice(without, only)
        choices, word = (without, "without") if only is None else (only, "only")
        if choices is None:
            raise QueryError("say what to leave out: compare(inputs, without='label = 3').")
        several = isinstance(choices, list | tuple)
        subsets: list[Any] = list(choices) if several else [choices]
        lines = self._lines(subsets, None, None) if word == "without" else self._lines(None, subsets, None)
        function, name = self._target(inputs, labelled(target, labels))
        change = (torch.stack(lines) - 1.0).mT
        found = self._influences(function, ("direct", "through training"), progress)
        changes = [(each.values.double() @ change).to(each.values.dtype).mT for each in found]
        with torch.no_grad():
            before = function(self._trainer.model_to_compare).cpu()
        results = self._trainer.each(
            lines, lambda model: {"values": function(model).detach().cpu()}, self._trainer.subject_of(function, name),
            folder=folder, processes=processes, progress=progress,
        )  # fmt: skip
        outcomes = [result["values"] for result in results]
        names = tuple(f"{word} {named(subset)}" for subset in subsets)
        direct, predicted, retrained = (
            table if several else table[0] for table in (*changes, torch.stack(outcomes) - before)
        )
        return Comparison(name, before, direct, predicted, retrained, names, found[1].simplified.note)

    def retraining(
        self,
        inputs: Any,
        *,
        target: Target = None,
        labels: Any = None,
        renormalise: bool = False,
        folder: Folder = None,
        processes: int | None = None,
        progress: Progress = True,
    ) -> Retraining:
        """For :mod:`dualform.evaluate`: a function that trains again with a weight for each *example* (in the order of
        :attr:`examples`) and gives the targets of ``inputs``. Its ``many`` does so for many lines of weights, in
        parallel ``processes``; a ``folder`` keeps each result, so that running again only does what is missing.
        """
        function, name = self._target(inputs, labelled(target, labels))
        return Retraining(
            self._trainer, function, self._example_of_visit, name, folder, processes, progress, renormalise
        )

    def metasmoothness(
        self,
        inputs: Any,
        *,
        target: Target = None,
        labels: Any = None,
        share: float = 0.1,
        directions: int = 3,
        seed: int = 0,
        folder: Folder = None,
        processes: int | None = None,
        progress: Progress = True,
    ) -> Metasmoothness:
        """Whether influence can predict what happens without a random ``share`` of the examples.

        Two trainings for each of the ``directions`` tell: one with half the weight of these examples, one without them.
        """
        examples = len(self.examples)
        count = round(share * examples)
        if not 0 < count < examples or directions < 1:
            raise QueryError(
                f"share={share} of {examples} examples is {count}: it must be at least one example, and not all; "
                f"directions={directions} must be 1 or more."
            )
        lines = torch.ones(directions, 2, examples)
        generator = torch.Generator().manual_seed(seed)
        for line in lines:
            line[:, torch.randperm(examples, generator=generator)[:count]] = torch.tensor([[0.5], [0.0]])
        retraining = self.retraining(
            inputs, target=target, labels=labels, folder=folder, processes=processes, progress=progress
        )
        with torch.no_grad():
            before = retraining.function(self._trainer.model_to_compare).cpu()
        half, none = retraining.many(lines.flatten(0, 1)).unflatten(0, (directions, 2)).unbind(1)
        return Metasmoothness(share, half - before, none - half)

    @cached_property
    def examples(self) -> np.ndarray:
        """The index of every training example, in the order of the columns of ``Influence.values``."""
        return np.unique(self.visits[self.index_column].to_numpy())

    @cached_property
    def _example_of_visit(self) -> Tensor:
        return torch.from_numpy(np.searchsorted(self.examples, self.visits[self.index_column].to_numpy()))

    def _influence(self, inputs: Any, target: Target, kind: InfluenceKind, progress: Progress) -> Influence:
        function, name = self._target(inputs, target)
        (found,) = self._influences(function, (kind,), progress)
        values = found.values.new_zeros(len(found.values), len(self.examples))
        values.index_add_(1, self._example_of_visit, found.values)
        return Influence(
            kind, name, self.examples, values, self.visits, found.values,
            index_column=self.index_column, note=found.simplified.note, folder=str(self.store.path),
        )  # fmt: skip

    def _influences(
        self,
        function: Callable[[nn.Module], Float[Tensor, " queries"]],
        kinds: Sequence[InfluenceKind],
        progress: Progress,
    ) -> list[Influences]:
        reference = self._reference
        with untouched_generator(), ExitStack() as stack:

            def watch(steps: int) -> OnProgress | None:
                return stack.enter_context(bar("carrying influence back", steps, progress, WORTH_A_BAR))

            states = reference.exact.states
            found = influences(reference.rerun, function, states, kinds, budget=self._budget, watch=watch)
        for each in found:
            if not reference.exact.check.exact:
                each.simplified.factors.clear()  # what another loss or other data do to the gradients was said before
            if each.simplified.held:
                warn(each.simplified.held)
        return found

    def _target(self, inputs: Any, target: Target) -> tuple[Callable[[nn.Module], Float[Tensor, " queries"]], str]:
        """The target as a function of a model. The predicted class is that of the trained network, whoever is asked."""
        with torch.no_grad(), outside_inference_mode():
            output = run_model(self._reference.exact.trained, inputs)
        examples = first_axis(inputs)
        _, name = choose(output, target, examples)
        if target is None:
            target = examples_first(logits_of(output), {}).argmax(1)

        def function(model: nn.Module) -> Float[Tensor, " queries"]:
            return choose(run_model(model, inputs), target, examples)[0]

        return function, name
