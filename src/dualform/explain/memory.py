"""The user's memory: a recorded training run that answers questions, at any step and through any mask."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from dualform.engine import Agreement, StoreView, certify, explained_layers
from dualform.errors import FilterError, HorizonError, ModelMismatch, QueryError
from dualform.progress import Progress, bar
from dualform.replay import Checkpoint, Data, Losses, MakeOptimizer, take_survey
from dualform.rules import Rule
from dualform.store import Recipe, Store, outside_inference_mode
from dualform.types import ClassNames, DType, Mark

from .filters import Filter, matching, named
from .linear_functional import LinearFunctional
from .notebook import Displayed, illustrate, memory_html
from .query import Target, labelled, run_model, shadow_of
from .runs import ReplayedRun
from .spotlight import Spotlight
from .surveys import Method, SurveyScores, survey_scores
from .suspects import SelfInfluence, Suspects, TrainingSet, find_suspects, self_influence, training_set
from .weights import (
    Certificate,
    Ledger,
    check_samples,
    explained,
    first_difference,
    first_names,
    foreign_frozen,
    is_network_of,
    kept_network,
    make_ledger,
    network,
    one_parameter,
    visit_sizes,
)


def open_memory(path: str | os.PathLike, *, rules: Iterable[Rule] = ()) -> "Memory":
    """Open a memory that was recorded with :func:`dualform.record`.

    ``rules`` are the rules of your own that it was recorded with, if they have a preconditioner.
    """
    store = Store(Path(path), rules=rules)
    return Memory(store, StoreView(store.steps))


KEEPS_NO_SLOTS = 'this memory keeps no slots (keep="replay"), but what training needs to run again:'


def survey(
    model: nn.Module,
    losses: Losses,
    data: Data,
    path: str | os.PathLike,
    *,
    examples: int | Sequence[int] | Tensor,
    batch_size: int = 64,
    checkpoints: Sequence[Checkpoint] | None = None,
    columns: Mapping[str, Any] | None = None,
    dtype: DType = "float32",
    layers: Iterable[str] | None = None,
    overwrite: bool = False,
    describe: Mapping[str, Any] | None = None,
    progress: Progress = True,
) -> "Memory":
    """Make a memory of a network that is trained already, by one pass over its training set.

    It holds slots without steps: ask it for :meth:`Memory.scores`, which are approximations, and for weights α. The
    network runs in evaluation mode, on a copy; yours is not touched.

    - ``losses(model, batch)``: each example's own loss, one number an example, not divided by the size of the batch
      (``reduction="none"``; for a language model the sum over the example's tokens).
    - ``data(indices)``: the batch with these examples.
    - ``examples``: how many there are, or the index of each.
    - ``checkpoints``: pairs (``state_dict`` or the file of one, learning rate), one pass for each; by default the model
      as it is, with the learning rate 1.
    - ``columns``: values of each example by the name of their column, as for ``tape.note``.
    - ``dtype``, ``layers``, ``overwrite``: as for :func:`dualform.record`, but in float32 if nothing is said: EK-FAC
      divides by small numbers.
    - ``describe``: how the model is made and where its examples are, as for :func:`dualform.record`.
    """
    take_survey(
        model, losses, data, path, examples=examples, batch_size=batch_size, checkpoints=checkpoints, columns=columns,
        dtype=dtype, layers=layers, overwrite=overwrite, describe=describe, progress=progress,
    )  # fmt: skip
    return open_memory(path)


@dataclass(frozen=True)
class Memory(Displayed):
    """A recorded training run, read at a horizon and through a mask. Made by :func:`dualform.open`.

    A masked memory (``without``, ``only``) leaves out direct contributions with everything else held fixed: it shows
    what the weights are made of, not what training without those examples would have given.
    """

    store: Store
    view: StoreView

    # ------------------------------------------------------------------------------------------- what is in it

    @property
    def path(self) -> Path:
        """The folder of the memory."""
        return self.store.path

    @property
    def recipe(self) -> Recipe | None:
        """How the model is made and where its examples are, as plain text, if ``tape.describe`` was told."""
        return self.store.manifest.recipe

    @property
    def class_names(self) -> ClassNames:
        """The names of the classes, if the recipe has them: tables show these in place of numbers."""
        return ClassNames() if self.recipe is None else self.recipe.class_names

    @property
    def step(self) -> int:
        """The step at which the memory is read."""
        return self.view.horizon

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the recorded layers."""
        return tuple(module.name for layer in self.store.manifest.layers for module in layer.modules)

    @property
    def visits(self) -> pa.Table:
        """The visits up to this step that the mask shows: visit, step, row, and the noted columns."""
        table, shown = self.store.visits, self._shown
        return table if shown.all() else table.filter(pa.array(shown))

    @property
    def certificate(self) -> Certificate:
        """How exactly the memory explains the weights.

        The certificate was written when recording closed; for other steps the weights are checked now.
        """
        self.store.need_training()
        written = self.store.manifest.certificate
        if written is None or written["step"] != self.step:
            return replace(self, view=StoreView(self.step)).check()
        agreements = {name: Agreement(v["error"], v["floor"]) for name, v in written["parameters"].items()}
        if missing := [name for name in explained(self.store) if name not in agreements]:
            agreements |= self._check_snapshots(missing)  # a killed recording, or one that ended with foreign weights
        return self._certificate(agreements)

    def __repr__(self) -> str:
        visible = self.view.visible
        if passes := self.store.manifest.survey:
            at = "the trained weights" if len(passes) == 1 else f"{len(passes)} checkpoints"
            survey = f"a survey of {len(self.visits):,} visits at {at}"
            return f"Memory({str(self.path)!r}, {survey}, layers {list(self.layers)})"
        mask = "" if visible is None else f", {int(visible.sum()):,} of {len(visible):,} visits"
        return f"Memory({str(self.path)!r}, step {self.step} of {self.store.steps}, layers {list(self.layers)}{mask})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return memory_html(self)

    def illustrate(self, *, pictures: Any = None, passages: Any = None, table: Any = None) -> "Memory":
        """Say what the training examples look like, for the displays of all answers in this process.

        Give ``pictures``, ``passages`` (texts) or a ``table`` (a DataFrame, or lines of numbers), indexed by what was
        noted as ``index``. Nothing is written into the memory.
        """
        illustrate(str(self.path), pictures=pictures, passages=passages, table=table)
        return self

    # ------------------------------------------------------------------------------------------- other views

    def at(self, step: int) -> "Memory":
        """The memory as it stood after a step."""
        self.store.need_training()
        try:
            is_integer = int(step) == step
        except (TypeError, ValueError, OverflowError):
            is_integer = False
        if not is_integer:
            raise HorizonError(
                f"the memory at {self.path} cannot be read at step {step!r}: it holds whole steps, "
                f"0 to {self.store.steps}."
            )
        return replace(self, view=replace(self.view, horizon=self.store.horizon(int(step))))

    def without(self, filter: Filter) -> "Memory":
        """The memory with the matching visits masked out: SQL (``"source = 'web'"``), an Arrow expression or a mask."""
        return self._masked(~self._matching(filter))

    def only(self, filter: Filter) -> "Memory":
        """The memory with all but the matching visits masked out. The first weights stay."""
        return self._masked(self._matching(filter))

    # ------------------------------------------------------------------------------------------- questions

    def attend(self, model: nn.Module, inputs: Any, *, target: Target = None, labels: Any = None) -> Spotlight:
        """Show what each layer recalls from training when the network sees some inputs.

        ``labels`` are the right answers to the inputs, for ``target="margin"`` or ``"loss"``, here or in a question.

        The queries are those of the network that this memory stands for: ``model`` itself if it is that network
        (:meth:`is_of`), else ``model`` with the memory's weights (it is not changed).
        """
        self.store.need_steps()
        if not self.store.manifest.layers:
            raise QueryError(
                f"{self.store.path}: {KEEPS_NO_SLOTS} run = memory.replay(model, losses, data); run.attend(inputs), or "
                "run.influence(inputs)."
            )
        return Spotlight(self, model, inputs, self.weights_for(model), target, labels)

    def along(self, layer: str | int, A: Tensor, a: Tensor | None = None) -> LinearFunctional:
        """Show what training put into ⟨W, A⟩ + ⟨b, a⟩, a number that is linear in one layer's weights (and bias).

        Ask it for the part of each example, group or time: ``memory.along("fc1", A).by("label", layer="fc1")``.
        """
        self.store.need_steps()
        self.store.need_training()
        return LinearFunctional(self, layer, A, a)

    def predict(self, model: nn.Module, inputs: Any, *, progress: Progress = True) -> Any:
        """The output of the network with the memory's weights, at its step and without what is masked."""
        self.fits(model)
        weights = self.held_weights(progress=progress)
        with outside_inference_mode(), torch.no_grad():
            return run_model(shadow_of(model, weights), inputs)

    def replay(
        self,
        model: nn.Module,
        losses: Losses,
        data: Data,
        *,
        index: str = "index",
        optimizer: MakeOptimizer | None = None,
        budget: int | str = "4 GB",
        progress: Progress = True,
    ) -> ReplayedRun:
        """Make the recorded training run again on a copy of the model: what would have changed without an example?

        ``losses(model, batch)`` gives each example's share of the loss that the loop backpropagated: the shares sum to
        it. ``data(indices)`` gives the batch with these noted indices as the loop saw it. ``run.check()`` says whether
        the run comes out bit for bit. ``optimizer`` builds an optimiser that a taught rule explains.
        ``budget`` bounds what the run holds in memory besides the model: a tight one makes influence slower, and
        changes nothing else. ``progress`` is for the runs through all of training.
        """
        return ReplayedRun(
            self.store, model, losses, data, index=index, optimizer=optimizer, budget=budget, progress=progress
        )

    def scores(
        self,
        model: nn.Module,
        inputs: Any,
        *,
        method: Method = "gradient",
        target: Target = None,
        labels: Any = None,
        damping: float | None = None,
        progress: Progress = True,
    ) -> SurveyScores:
        """Approximate scores of every surveyed example for a target of each input, positive where it speaks for it.

        ``"gradient"`` is TracIn: minus the learning rate times the product of the gradients of the example's loss and
        of the target, summed over the checkpoints. ``"ekfac"`` is an influence function at the last checkpoint, with
        EK-FAC of the empirical Fisher matrix; ``damping`` is added to its eigenvalues, by default 0.1 times their mean
        in each layer. Only a :func:`dualform.survey` can be asked.
        """
        if not self.store.manifest.survey:
            raise QueryError(
                f"the memory at {self.path} is a recorded training, not a survey, so it has no approximate scores. Ask "
                "memory.attend(model, inputs) for contributions, or memory.replay(…) for influence through training."
            )
        self.fits(model)
        return survey_scores(
            self.store,
            model,
            inputs,
            lambda step: replace(self, view=StoreView(step)).weights_for(model),
            self._shown,
            method=method,
            target=labelled(target, labels),
            damping=damping,
            progress=progress,
        )

    def suspects(
        self,
        model: nn.Module,
        x: Any,
        y: Any,
        *,
        index: Sequence[int] | Tensor | None = None,
        column: str = "index",
        classes: Sequence[str] = (),
        progress: Progress = True,
    ) -> Suspects:
        """Find training examples whose label looks wrong, with the label that the other examples suggest.

        ``x`` and ``y`` are the training examples and the labels that were trained on, a class each, in the order of the
        noted ``column`` of indices; or say the ``index`` of each row. The score asks for the label of an example
        without what the example itself put in, and before the network had learned it by heart (how: ``voices`` of the
        answer, and the guide on wrong labels). For networks that give one logit a class. ``classes`` are their names,
        for what is printed (default: those of the recipe).
        """
        training = self._training_set(x, y, index, column)
        self.fits(model)
        return find_suspects(
            self.store,
            self.view,
            training,
            model,
            self.weights_for(model),
            tuple(classes) or self.class_names.names,
            progress,
        )

    def self_influence(
        self,
        model: nn.Module,
        x: Any,
        y: Any,
        *,
        layer: str | int | None = None,
        target: Literal["margin", "loss"] = "margin",
        index: Sequence[int] | Tensor | None = None,
        column: str = "index",
        progress: Progress = True,
    ) -> SelfInfluence:
        """How much each training example adds to the margin (or loss) of its own label.

        Through one ``layer``, or to first order through all that have slots; without the biases. It is the diagonal of
        ``memory.attend(model, x, target="margin", labels=y).by("index", layer=…)``, at the cost of one pass over the
        slots.
        """
        training = self._training_set(x, y, index, column)
        self.store.need_training()
        return self_influence(self.store, self.view, training, model, self.weights_for(model), layer, target, progress)

    def ledger(self, column: str | Iterable[Any], *, progress: Progress = True) -> Ledger:
        """One set of weights for each group of a column: together with the initial part they add up to the weights.

        Instead of a column you can pass one value for each visit of the whole memory.
        """
        self.store.need_steps()
        self.store.need_training()
        return make_ledger(self.store, self.view, column, progress)

    def sizes(self, layer: str | int, *, progress: Progress = True) -> Tensor:
        """How much each visit put into a layer, for any query: Σ |c| ‖e‖ ‖x‖ over its slots, one number per visit."""
        self.store.need_steps()
        self.store.need_training()
        info, module = self.store.layer(layer)
        with bar(f"sizes in {module.name}", self.store.slots(info.name), progress) as watch:
            return visit_sizes(self.store, self.view, module.name, watch)

    # ------------------------------------------------------------------------------------------- weights

    def weights(self, model: nn.Module | None = None, *, progress: Progress = True) -> dict[str, Tensor]:
        """Every parameter and buffer of the network: rebuilt from the slots, the rest from its snapshots.

        Large frozen weights are not in a memory: they are taken from the ``model``, if it has the recorded ones.
        """
        missing = self.store.not_kept(self.step)
        if model is None:
            for name in missing:
                self.store.initial(name)  # raises an error that names it
            return self.held_weights(progress=progress)
        self.fits(model)
        return self.held_weights(progress=progress) | {name: model.get_parameter(name).detach() for name in missing}

    def held_weights(self, *, progress: Progress = True) -> dict[str, Tensor]:
        """The weights that the memory holds: all but large frozen ones."""
        self._require_explained_weights()
        self._require_whole_network()
        return self.store.cache.weights(self.view.key, lambda: network(self.store, self.view, progress))

    def parameter(self, name: str) -> Tensor:
        """One parameter in float64, rebuilt from the slots (or from its snapshot)."""
        self._require_explained_weights()
        if name not in self.store.parameters:
            raise QueryError(
                f"no parameter '{name}' in the memory at {self.path}: it has {first_names(self.store.parameters)}."
            )
        if name in explained(self.store):
            return one_parameter(self.store, self.view, name)
        return self.store.snapshot(name, self.step).double()

    def load_into(self, model: nn.Module, *, progress: Progress = True) -> nn.Module:
        """Copy the memory's weights into a model. Large frozen weights, which it does not hold, stay as they are."""
        self.fits(model)
        weights = self.held_weights(progress=progress)
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name in weights:
                    tensor.copy_(weights[name])
        return model

    def weights_for(self, model: nn.Module) -> Mapping[str, Tensor] | None:
        """The weights that make a model this memory's network; None if it is that already."""
        self.fits(model)
        if self.is_of(model):
            return None
        is_kept = self.view.visible is None and self.step > 0 and self.store.weights_kept_at(self.step)
        return kept_network(self.store, self.step) if is_kept or not explained(self.store) else self.held_weights()

    # ------------------------------------------------------------------------------------------- checks

    def check(self, model: nn.Module | None = None, *, full: bool = False, progress: Progress = True) -> Certificate:
        """Compare a model's weights with those that the memory rebuilds.

        Without a model, the entries kept at this step are compared. Random projections are compared, or every entry
        with ``full=True``.
        """
        self.store.need_steps()
        self.store.need_training()
        if model is None and not self.store.weights_kept_at(self.step):
            return self._certificate(check_samples(self.store, self.view))
        if model is None:
            actual = {name: self.store.snapshot(name, self.step) for name in explained(self.store)}
        else:
            self.has_parameters(model)
            actual = dict(model.named_parameters())
        total = sum(self.store.slots(layer.name) for layer in explained_layers(self.store))
        with bar("checking", total, progress) as watch:
            return self._certificate(certify(self.store, self.view, actual, full=full, watch=watch))

    def _check_snapshots(self, names: Iterable[str]) -> dict[str, Agreement]:
        """Compare what was kept of some parameters at this step with what the memory rebuilds."""
        names, view = list(names), StoreView(self.step)
        if not self.store.weights_kept_at(self.step):
            return check_samples(self.store, view, names)
        return certify(self.store, view, {name: self.store.snapshot(name, self.step) for name in names}, only=names)

    def is_of(self, model: nn.Module) -> bool:
        """Whether a model is known to be the network that this memory stands for, at its step and through its mask.

        What was kept is compared bit for bit: the rest, the explained weights of the last step, and 32 entries of each
        at each step in between. If those entries do not distinguish a step from the next one, the answer is False.
        """
        self.has_parameters(model)
        if self._rebuilt_marks or (self.view.visible is not None and explained(self.store)):
            return False
        return is_network_of(self.store, self.step, model)

    @property
    def _rebuilt_marks(self) -> list[Mark]:
        """Marks of parameters that were replaced or added up to this step, which the memory therefore does not hold."""
        marks = self.store.manifest.marks
        return [mark for mark in marks if mark.kind in ("replaced", "added") and mark.first_step <= self.step]

    def _require_whole_network(self) -> None:
        for mark in self._rebuilt_marks:
            raise ModelMismatch(
                f"the model was rebuilt while the memory at {self.path} was being recorded: '{mark.name}' was "
                f"{mark.kind} at step {mark.first_step}, and from there on the memory does not hold the whole network. "
                f"Ask for memory.at({mark.first_step - 1}) or before."
            )

    def fits(self, model: nn.Module) -> None:
        """Raise unless a model has the parameters of the recorded one, and the memory holds all of them."""
        self.has_parameters(model)
        self._require_whole_network()
        if name := foreign_frozen(self.store, self.step, model):
            raise ModelMismatch(
                f"the frozen weight '{name}' of this {type(model).__name__} is not the one that the memory at "
                f"{self.path} was recorded with; the memory holds only its fingerprint. Pass the model that was "
                "trained."
            )

    def has_parameters(self, model: nn.Module) -> None:
        """Raise unless a model has the parameters of the recorded one."""
        if difference := first_difference(self.store.manifest.parameters, model):
            raise ModelMismatch(
                f"this {type(model).__name__} does not fit the memory at {self.path}: {difference}. Pass the model "
                "that was trained."
            )

    # ------------------------------------------------------------------------------------------- inside

    @property
    def _shown(self) -> np.ndarray:
        """Whether each visit happened up to this step and is not masked."""
        shown = self.store.visits["step"].to_numpy() <= self.step
        return shown if self.view.visible is None else shown & self.view.visible

    def _training_set(self, x: Any, y: Any, index: Sequence[int] | Tensor | None, column: str) -> TrainingSet:
        self.store.need_steps()
        self.store.need_training()
        if not self.store.manifest.layers:
            raise QueryError(f"{self.store.path}: {KEEPS_NO_SLOTS} record with keep='slots' to find suspects.")
        if all(layer.keep == "ledger" for layer in self.store.manifest.layers):
            raise QueryError(
                f"the memory at {self.path} is a ledger and knows no single examples. Record with keep='slots' to find "
                "suspects."
            )
        return training_set(self.store, self._shown, x, y, index, column)

    def _matching(self, filter: Filter) -> np.ndarray:
        self.store.need_steps()
        matches = matching(self.store.visits, filter)
        if not (matches & self._shown).any():
            raise FilterError(
                f"the filter {named(filter)} matches none of the visits up to step {self.step} that are not masked "
                "already."
            )
        return matches

    def _masked(self, visible: np.ndarray) -> "Memory":
        before = self.view.visible
        return replace(self, view=replace(self.view, visible=visible if before is None else visible & before))

    def _require_explained_weights(self) -> None:
        if self.view.visible is not None and not explained(self.store):
            self.store.need_training()
            raise QueryError(
                "a mask cannot change the weights of this memory: they are snapshots, as only keys were kept or no "
                "rule explains the optimiser. Ask it for weights α with attend(…) and score='weight' or 'abs', or "
                "record with keep='slots' and an optimiser that has a rule."
            )

    def _certificate(self, agreements: Mapping[str, Agreement]) -> Certificate:
        errors = {name: agreement.error for name, agreement in agreements.items()}
        floor = {name: agreement.floor for name, agreement in agreements.items()}
        reasons = {p.name: p.reason for p in self.store.manifest.parameters if p.kind == "rest"}
        ending = self.store.manifest.ending if self.step == self.store.steps else ""
        if not self.store.manifest.layers:
            compares = "run = memory.replay(model, losses, data); run.check() compares."
            ending = f"{KEEPS_NO_SLOTS} {compares} {ending}".rstrip()
            reasons = {}
        return Certificate(self.step, errors, floor, tuple(reasons), self.store.manifest.marks, reasons, ending)
