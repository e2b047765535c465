"""Recording with Lightning: ``Trainer(callbacks=[RecordCallback("runs/images", columns=…)])``."""

import math
import os
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dualform.errors import require

from .hooks import wrapped_method
from .trainer_session import NotedColumns, TrainerSession, refuse_shared

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""Lightning goes by two names, each with classes of its own."""

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    loaded = [name for name in PACKAGES if name in sys.modules]
    installed = [name for name in PACKAGES if find_spec(name.partition(".")[0]) is not None]
    Callback = require([*loaded, *installed, *PACKAGES][0], "lightning").Callback
    Trainer = LightningModule = Any


class RecordCallback(Callback):
    """Records ``trainer.fit`` to a memory at ``path``.

    ``columns`` says what to note of each batch: a function ``batch -> {name: values}`` or, where batches are dicts, the
    names of some of their entries. All other options are those of :func:`dualform.record`.

    The memory is flushed before a checkpoint is saved, and the checkpoint contains the memory's step:
    ``fit(ckpt_path=…)`` continues from there.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "RecordCallback":
        """Make a callback of every Lightning package that is loaded: until version 2.6 a trainer takes only its own."""
        loaded = [sys.modules[name].Callback for name in PACKAGES if name in sys.modules]
        bases = tuple(base for base in loaded if not issubclass(cls, base))
        kind: Any = type(cls.__name__, (cls, *bases), {}) if bases else cls
        return super().__new__(kind)

    def __init__(self, path: str | os.PathLike, *, columns: NotedColumns = (), **options: Any) -> None:
        self.session = TrainerSession(path, columns, options)
        self._saved: int | None = None
        self._undo = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the step of an earlier run's checkpoint."""
        self._saved = None

    def state_dict(self) -> dict[str, Any]:
        """The memory's step, which becomes a part of a checkpoint."""
        return {} if self.session.step is None else {"step": self.session.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A checkpoint has been loaded: remember the step in it."""
        self._saved = state_dict["step"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to record: model and optimisers are ready, and their checkpoint is loaded."""
        how = type(trainer.strategy).__name__
        if trainer.world_size > 1 and how != "DDPStrategy":
            refuse_shared(how)
        self.session.begin(pl_module, trainer.optimizers, self._saved, _last_step(trainer))
        if not pl_module.automatic_optimization:  # a batch may take several steps
            for optimizer in trainer.optimizers:
                handle = optimizer.register_step_post_hook(lambda *_: self.session.note_again())
                self._undo.callback(handle.remove)
        # not on_save_checkpoint: that event is left out where a checkpoint holds only weights
        self._undo.enter_context(wrapped_method(trainer, "save_checkpoint", self._save_checkpoint))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note a batch; with accumulated gradients several batches make one step."""
        self.session.note(batch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the memory."""
        self._undo.close()
        self.session.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the memory with all complete steps."""
        self._undo.close()
        self.session.end(exception)

    def _save_checkpoint(self, save: Any, *args: Any, **kwargs: Any) -> Any:
        self.session.flush()
        return save(*args, **kwargs)


def _last_step(trainer: Trainer) -> int | None:
    """The number of steps that training will take; None where it is unknown."""
    steps = trainer.estimated_stepping_batches
    return int(steps) if math.isfinite(steps) and steps > 0 else None
