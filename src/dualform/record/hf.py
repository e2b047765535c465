"""Recording with Hugging Face: ``Trainer(…, callbacks=[RecordCallback("runs/gpt2", columns=("source", "index"))])``.

The events of a ``TrainerCallback`` include neither the batches nor a run that fails. The callback therefore finds its
trainer, and while ``train`` runs it wraps some of the trainer's methods, as a subclass would. The noted columns go from
the examples around the collator into the batch, and the training step takes them out again: collator and model get
the same inputs as without recording.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from dualform.errors import NoteError, RecordError, require
from dualform.tasks import of_trainer, optimizer_of

from .hooks import wrapped_method
from .plan import unwrapped
from .trainer_session import NotedColumns, TrainerSession, refuse_shared

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
else:
    transformers = require("transformers", "hf")
    require("accelerate", "hf")
    Trainer, TrainerCallback = transformers.Trainer, transformers.TrainerCallback
    TrainerControl = TrainerState = TrainingArguments = Any

KEY = "dualform"
"""The key of the noted columns in a batch, and of the memory's step in a checkpoint."""


class RecordCallback(TrainerCallback):
    """Records ``trainer.train()`` to a memory at ``path``.

    ``columns`` says what to note of each example: names of the data set's columns (also of those that the model never
    sees), or a function ``batch -> {name: values}``. All other options are those of :func:`dualform.record`.

    The memory is flushed before a checkpoint is saved, and the checkpoint contains the memory's step:
    ``train(resume_from_checkpoint=…)`` continues from there.
    """

    def __init__(self, path: str | os.PathLike, *, columns: NotedColumns = (), **options: Any) -> None:
        self.session = TrainerSession(path, columns, options)
        self._attached: WeakSet[Trainer] = WeakSet()
        self._training = False

    def attach(self, trainer: Trainer) -> None:
        """Record the training of this trainer. ``Trainer(callbacks=[…])`` does this by itself."""
        handler = trainer.callback_handler
        if self not in handler.callbacks:
            trainer.add_callback(self)
        if trainer in self._attached:
            return
        self._attached.add(trainer)
        train = trainer.train

        @wraps(train)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self not in handler.callbacks:  # it has been removed
                return train(*args, **kwargs)
            with self._around(trainer):
                return train(*args, **kwargs)

        trainer.train = recorded

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:  # fmt: skip
        """A trainer with this callback is being made: attach to it."""
        trainer = _trainer_on_the_stack(self)
        if trainer is not None:
            self.attach(trainer)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:  # fmt: skip
        """Start to record: model and optimiser are ready, and their checkpoint is loaded."""
        if not self._training:
            raise RecordError(
                "this callback is not attached to the trainer that calls it, because it was added after the trainer "
                "had been made. Pass it to Trainer(callbacks=[…]), or write callback.attach(trainer) in place of "
                "add_callback."
            )
        shared = {
            f"{args.n_gpu} devices in one process": args.n_gpu > 1,
            "FSDP": args.fsdp,
            "DeepSpeed": args.deepspeed,
        }
        for how in (how for how, used in shared.items() if used):
            refuse_shared(how)
        saved = _checkpointed(state).get(KEY, {}).get("step")
        self.session.begin(kwargs["model"], [unwrapped(kwargs["optimizer"])], saved, state.max_steps)

    def replay(self, memory: Any, model: nn.Module | None = None, *, index: str = "index") -> Any:
        """Run the training of the attached trainer again: ``callback.replay(dualform.open("runs/gpt2"))``.

        This is ``memory.replay(model, *dualform.tasks.of_trainer(trainer))`` with the trainer's optimiser. The
        ``model`` is the trainer's, unless you pass another one. It works before training too, so that a later process
        can run a memory again: make the same trainer.
        """
        if len(self._attached) != 1:
            raise RecordError(
                f"this callback has {len(self._attached)} trainers, so it is not known whose data and loss to take. "
                "Pass it to one Trainer(callbacks=[…]), or write "
                "memory.replay(model, *dualform.tasks.of_trainer(trainer))."
            )
        (trainer,) = self._attached
        task = of_trainer(trainer, index=index)
        network = trainer.model if model is None else model
        return memory.replay(network, *task, index=index, optimizer=optimizer_of(trainer))

    @contextmanager
    def _around(self, trainer: Trainer) -> Iterator[None]:
        """While a trainer trains, wrap the methods that make batches, take steps, and save or load weights."""
        with ExitStack() as stack:
            for name, function in {
                "get_train_dataloader": partial(self._get_train_dataloader, trainer, stack),
                "training_step": self._training_step,
                "save_model": partial(self._save_model, trainer),
                "_load_best_model": self._load_best_model,
            }.items():
                stack.enter_context(wrapped_method(trainer, name, function))
            self._training = True
            try:
                yield
            except BaseException as error:
                self.session.end(error)
                raise
            finally:
                self._training = False
            self.session.end()

    def _get_train_dataloader(self, trainer: Trainer, stack: ExitStack, method: Callable[..., Any]) -> Any:
        names, dropped, listed = self.session.names, set[str](), set[str]()
        if not names:
            return method()

        def remove_unused_columns(remove: Callable[..., Any], dataset: Any, *args: Any, **kwargs: Any) -> Any:
            """Keep the noted columns that the trainer would drop from a ``datasets.Dataset``; the collator does it."""
            remaining = remove(dataset, *args, **kwargs)
            listed.update(dataset.column_names)
            dropped.update(name for name in names if name in listed and name not in remaining.column_names)
            return dataset.select_columns([*remaining.column_names, *sorted(dropped)]) if dropped else remaining

        with wrapped_method(trainer, "_remove_unused_columns", remove_unused_columns):
            loader = method()
        inner = getattr(loader, "base_dataloader", loader)  # accelerate returns a wrapper
        collate = getattr(inner, "collate_fn", None)
        if collate is not None:
            inner.collate_fn = NotingCollator(collate, tuple(names), frozenset(dropped), frozenset(listed))
            stack.callback(setattr, inner, "collate_fn", collate)
        return loader

    def _training_step(
        self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:  # fmt: skip
        rows = inputs.pop(KEY, None) if isinstance(inputs, MutableMapping) else None
        self.session.note(inputs, None if rows is None else _unpacked(rows))
        return method(model, inputs, *args, **kwargs)

    def _save_model(self, trainer: Trainer, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.session.flush()
        if self.session.step is not None:
            _checkpointed(trainer.state)[KEY] = {"step": self.session.step}
        return method(*args, **kwargs)

    def _load_best_model(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.session.end()  # from here on the model has earlier weights
        return method(*args, **kwargs)


@dataclass(frozen=True)
class NotingCollator:
    """Calls the user's collator, and adds the named columns of the examples to the batch, under one key."""

    collate: Callable[[Any], Any]
    names: Sequence[str]
    dropped: frozenset[str]
    """Columns that the collator must not get: they are in the examples only to be noted."""
    listed: frozenset[str]
    """The columns of the data set, if it lists them."""

    def __call__(self, examples: Any) -> Any:
        if not (isinstance(examples, Sequence) and examples and all(isinstance(row, Mapping) for row in examples)):
            return self.collate(examples)
        shared = set(examples[0]).intersection(*examples)
        names = [name for name in self.names if name in shared]
        noted = [{name: example[name] for name in names} for example in examples]
        if self.dropped:
            examples = [{key: row[key] for key in row if key not in self.dropped} for row in examples]
        batch = self.collate(examples)
        if isinstance(batch, MutableMapping):
            for name in self.names:
                if name not in shared and name not in batch:
                    raise NoteError(
                        f"the training examples have no column '{name}' to note: their columns are "
                        f"{sorted(map(str, self.listed | shared))}. Pass some of these, or a function of the batch."
                    )
            batch[KEY] = _packed(noted)
        elif names:
            raise NoteError(
                f"the collator returns a {type(batch).__name__}, which has no place for the columns {names} of the "
                "examples. Let it return a dict, or pass columns as a function of the batch."
            )
        return batch


def _packed(examples: Sequence[Mapping[str, Any]]) -> UInt8[Tensor, "b n"]:
    """Encode the columns of each example as a row of bytes: trainers can move, slice and join tensors."""
    try:
        rows = [json.dumps(example, default=lambda value: value.item()).encode() for example in examples]
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise NoteError(f"columns must hold one number or one string for each example ({error}).") from error
    length = max(map(len, rows))
    flat = bytearray(b"".join(row.ljust(length) for row in rows))
    return torch.frombuffer(flat, dtype=torch.uint8).reshape(len(rows), length)


def _unpacked(rows: UInt8[Tensor, "b n"]) -> dict[str, list[Any]]:
    examples = [json.loads(row.tobytes()) for row in rows.cpu().numpy()]
    return {name: [example[name] for example in examples] for name in examples[0]}


def _checkpointed(state: TrainerState) -> dict[str, Any]:
    """The states of callbacks in a checkpoint, by name (the declared type is a list)."""
    states: Any = state.stateful_callbacks
    return states


def _trainer_on_the_stack(callback: TrainerCallback) -> Trainer | None:
    """The trainer that is being made with this callback, found among the callers of its event.

    No event passes the trainer: their keywords are the model, the optimiser, the scheduler, the data loaders and the
    processing class, and none of these refers to the trainer. So this looks for a method of a ``Trainer`` on the stack
    that has this callback. It fails if that method does not call its trainer ``self``, or if the event is sent from
    elsewhere than from the trainer's ``__init__``. Then nothing is attached, and ``on_train_begin`` raises an error
    that asks for ``callback.attach(trainer)``: a training is never left unrecorded in silence.
    """
    frame = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        handler = getattr(caller, "callback_handler", None) if isinstance(caller, Trainer) else None
        if handler is not None and callback in handler.callbacks:
            return caller
        frame = frame.f_back
    return None
