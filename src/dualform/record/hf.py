"""Recording with Hugging Face: ``Trainer(…, callbacks=[RecordCallback("runs/gpt2", columns=("source", "index"))])``.

The events of a ``TrainerCallback`` see neither the batches nor a run that fails. So the callback finds its trainer, and
while ``train`` runs it stands around some of the trainer's methods, as a subclass would. A column to be noted travels
from the examples past the collator to the training step, and there it is taken out again: collator and model get what
they get without recording.
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
from torch import Tensor

from dualform.errors import NoteError, RecordError, require

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
"""Under this name columns travel in a batch, and the memory's step in a checkpoint."""


class RecordCallback(TrainerCallback):
    """Records ``trainer.train()`` to a memory at ``path``.

    ``columns`` says what to note of each example: names of the data set's columns (also of those that the model never
    sees), or a function ``batch -> {name: values}``. All other options are those of :func:`dualform.record`.

    The memory is flushed before a checkpoint is saved, and the checkpoint knows the memory's step:
    ``train(resume_from_checkpoint=…)`` goes on from there.
    """

    def __init__(self, path: str | os.PathLike, *, columns: NotedColumns = (), **options: Any) -> None:
        self.session = TrainerSession(path, columns, options)
        self._attached: WeakSet[Trainer] = WeakSet()
        self._training = False

    def attach(self, trainer: Trainer) -> None:
        """Record what this trainer trains. ``Trainer(callbacks=[…])`` does this by itself."""
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
        """A trainer has been made, with this callback."""
        trainer = _trainer_with(self)
        if trainer is not None:
            self.attach(trainer)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:  # fmt: skip
        """Model and optimiser are as training will use them, and their checkpoint is loaded."""
        if not self._training:
            raise RecordError(
                "this callback was added to a trainer that had been made already, so the two do not know each other. "
                "Pass it to Trainer(callbacks=[…]), or write callback.attach(trainer) in place of add_callback."
            )
        shared = {
            f"{args.n_gpu} devices in one process": args.n_gpu > 1,
            "FSDP": args.fsdp,
            "DeepSpeed": args.deepspeed,
        }
        for how in (how for how, used in shared.items() if used):
            refuse_shared(how)
        saved = _kept(state).get(KEY, {}).get("step")
        self.session.begin(kwargs["model"], [unwrapped(kwargs["optimizer"])], saved, state.max_steps)

    @contextmanager
    def _around(self, trainer: Trainer) -> Iterator[None]:
        """While a trainer trains: see its batches, its checkpoints, and how it ends."""
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
            """What the trainer drops of a ``datasets.Dataset`` is kept until it has been noted."""
            kept = remove(dataset, *args, **kwargs)
            listed.update(dataset.column_names)
            dropped.update(name for name in names if name in listed and name not in kept.column_names)
            return dataset.select_columns([*kept.column_names, *sorted(dropped)]) if dropped else kept

        with wrapped_method(trainer, "_remove_unused_columns", remove_unused_columns):
            loader = method()
        inner = getattr(loader, "base_dataloader", loader)  # accelerate hands out a wrapper
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
            _kept(trainer.state)[KEY] = {"step": self.session.step}
        return method(*args, **kwargs)

    def _load_best_model(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.session.end()  # from here on the model is an earlier one
        return method(*args, **kwargs)


@dataclass(frozen=True)
class NotingCollator:
    """Collates as before, and puts the named columns of the examples into the batch, under one name."""

    collate: Callable[[Any], Any]
    names: Sequence[str]
    dropped: frozenset[str]
    """Columns that are only here to be noted."""
    listed: frozenset[str]
    """Columns of the data set, where it lists them."""

    def __call__(self, examples: Any) -> Any:
        """Make a batch."""
        if not (isinstance(examples, Sequence) and examples and all(isinstance(each, Mapping) for each in examples)):
            return self.collate(examples)
        shared = set(examples[0]).intersection(*examples)
        found = [name for name in self.names if name in shared]
        noted = [{name: each[name] for name in found} for each in examples]
        if self.dropped:
            examples = [{key: each[key] for key in each if key not in self.dropped} for each in examples]
        batch = self.collate(examples)
        if isinstance(batch, MutableMapping):
            for name in self.names:
                if name not in shared and name not in batch:
                    raise NoteError(
                        f"the training examples have no column '{name}' to note: they have "
                        f"{sorted(map(str, self.listed | shared))}. Pass some of these, or a function of the batch."
                    )
            batch[KEY] = _packed(noted)
        elif found:
            raise NoteError(
                f"the collator makes a {type(batch).__name__} of a batch, which has no place for the columns "
                f"{found} of the examples. Let it make a dict, or pass columns as a function of the batch."
            )
        return batch


def _packed(examples: Sequence[Mapping[str, Any]]) -> UInt8[Tensor, "b n"]:
    """A row of bytes for each example: tensors are what everybody on the way of a batch can move, slice and join."""
    try:
        rows = [json.dumps(each, default=lambda value: value.item()).encode() for each in examples]
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise NoteError(f"columns must hold one number or one string for each example ({error}).") from error
    length = max(map(len, rows))
    flat = bytearray(b"".join(row.ljust(length) for row in rows))
    return torch.frombuffer(flat, dtype=torch.uint8).reshape(len(rows), length)


def _unpacked(rows: UInt8[Tensor, "b n"]) -> dict[str, list[Any]]:
    examples = [json.loads(row.tobytes()) for row in rows.cpu().numpy()]
    return {name: [each[name] for each in examples] for name in examples[0]}


def _kept(state: TrainerState) -> dict[str, Any]:
    """What the checkpoints keep of callbacks, by name; by its type it would be a list."""
    kept: Any = state.stateful_callbacks
    return kept


def _trainer_with(callback: TrainerCallback) -> Trainer | None:
    """The trainer that is being made now, with this callback: events do not hand it over, but it is calling."""
    frame = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        handler = getattr(found, "callback_handler", None) if isinstance(found, Trainer) else None
        if handler is not None and callback in handler.callbacks:
            return found
        frame = frame.f_back
    return None
