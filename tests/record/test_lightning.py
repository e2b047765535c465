"""Lightning: its training is unchanged, and every visit has the columns of its own example."""

import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import assert_clean, assert_rebuilt, state_of
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import dualform
from dualform.errors import MemoryExists, MemoryNotFound, MissingExtra, NoteError, QueryError, RecordError
from dualform.record.shards.shard_builder import ShardBuilder
from dualform.types import Ended

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
L: Any = pytest.importorskip(
    next((name for name in PACKAGES if find_spec(name.partition(".")[0])), PACKAGES[0]),
    reason="lightning is not installed (extra: lightning)",
)

from dualform.record.lightning import RecordCallback  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk", "quiet")

EXACT = 1e-10


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in (*PACKAGES, *(f"{name}.utilities.rank_zero" for name in PACKAGES))]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


# ---------------------------------------------------------------- networks, data, trainers


@cache
def digits(count: int = 45) -> tuple[Tensor, Tensor]:
    """8 × 8 images, as scikit-learn has them."""
    x, y = import_module("sklearn.datasets").load_digits(return_X_y=True)
    return torch.tensor(x[:count]) / 16, torch.tensor(y[:count]).long()


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        x, y = digits()
        return iter(zip(x, y, range(len(y)), strict=True))


class Named(Dataset):
    """Examples with names, and a string among them."""

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = digits()
        return {"x": x[index], "y": y[index], "index": index, "source": "even" if y[index] % 2 == 0 else "odd"}


def loader(data: Dataset | None = None, shuffle: bool = True, **settings: Any) -> DataLoader:
    x, y = digits()
    data = TensorDataset(x, y, torch.arange(len(y))) if data is None else data
    order = torch.Generator().manual_seed(1)
    return DataLoader(data, batch_size=4, shuffle=shuffle, generator=order, **settings)


def columns(batch: Any) -> dict[str, Any]:
    return {"index": batch[2], "label": batch[1]}


def module(package: Any = L, **settings: Any) -> Any:
    """A network of the given package (the two have classes of their own)."""

    class Digits(package.LightningModule):
        def __init__(
            self, dropout: float = 0.0, momentum: float = 0.9, manual: bool = False, dtype: Any = torch.float64
        ) -> None:
            super().__init__()
            torch.manual_seed(0)
            layers = nn.Linear(64, 12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, 10)
            self.net = nn.Sequential(*layers).to(dtype)
            self.automatic_optimization = not manual
            self.momentum = momentum
            self.seen: list[tuple[int, list[int]]] = []

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.to(next(self.parameters()).dtype))

        def loss(self, batch: Any) -> Tensor:
            x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch[:2]
            return F.cross_entropy(self(x), y)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            index = batch["index"] if isinstance(batch, dict) else batch[2]
            self.seen.append((self.trainer.global_step + 1, index.tolist()))
            if self.automatic_optimization:
                return self.loss(batch)
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
            return None

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.loss(batch))

        def val_dataloader(self) -> DataLoader:
            return loader(shuffle=False)

        def configure_optimizers(self) -> Any:
            if not self.automatic_optimization:
                return [optim.SGD(self.net[i].parameters(), lr=0.1, momentum=self.momentum) for i in (0, 3)]
            optimizer = optim.SGD(self.parameters(), lr=0.2, momentum=self.momentum, weight_decay=0.01)
            return [optimizer], [optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]

        def visits(self) -> list[dict[str, Any]]:
            """What the memory should list."""
            return [
                {"step": step, "row": row, "index": index}
                for step, batch in self.seen
                for row, index in enumerate(batch)
            ]

    return Digits(**settings)


def trainer(*callbacks: Any, package: Any = L, **settings: Any) -> Any:
    settings = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        **settings,
    }
    torch.manual_seed(2)
    return package.Trainer(callbacks=list(callbacks), **settings)


def recorder(folder: Path, **options: Any) -> RecordCallback:
    return RecordCallback(folder / "memory", **{"columns": columns, "dtype": "float64", "progress": False, **options})


def opened(folder: Path) -> dualform.Memory:
    return dualform.open(folder / "memory")


def listed(folder: Path, *names: str) -> list[dict[str, Any]]:
    """The visits of the memory in their order."""
    return [{key: line[key] for key in ("step", "row", *names)} for line in opened(folder).visits.to_pylist()]


def assert_same(model: nn.Module, twin: nn.Module) -> None:
    """Two models have the same weights, bit for bit."""
    first, second = state_of(model), state_of(twin)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


class At(L.Callback):
    """Runs an action after a batch."""

    def __init__(self, batch: int, action: Any) -> None:
        self.batch, self.action = batch, action

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batch:
            self.action()


# ---------------------------------------------------------------- training is what it was


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param({"accumulate_grad_batches": 5, "gradient_clip_val": 0.05}, id="accumulated and clipped"),
        pytest.param({"max_steps": 7, "val_check_interval": 2}, id="validated"),
        pytest.param({"precision": "64-true"}, id="in double precision by the trainer"),
    ],
)
def test_recorded_training_is_the_unrecorded_one_and_the_memory_rebuilds_it(tmp_path, settings):
    dtype = torch.float32 if "precision" in settings else torch.float64
    bare, model = (module(dropout=0.2, dtype=dtype) for _ in range(2))
    trainer(**settings).fit(bare, loader())
    trainer(recorder(tmp_path), **settings).fit(model, loader())
    assert_same(bare, model)
    assert_rebuilt(opened(tmp_path), model, EXACT)
    assert_clean(opened(tmp_path))
    assert listed(tmp_path, "index") == model.visits()


def test_in_float32_the_memory_is_as_exact_as_training(tmp_path):
    model = module(dtype=torch.float32)
    trainer(recorder(tmp_path, dtype="float32")).fit(model, loader())
    assert_rebuilt(opened(tmp_path), model, 1e-4)
    assert opened(tmp_path).certificate.worst <= 1e-4


def test_mixed_precision_is_recorded_as_it_runs(tmp_path):
    bare, model = (module(dtype=torch.float32) for _ in range(2))
    trainer(precision="bf16-mixed").fit(bare, loader())
    trainer(recorder(tmp_path, dtype="float32"), precision="bf16-mixed").fit(model, loader())
    assert_same(bare, model)
    assert opened(tmp_path).certificate.worst < 2**-7  # gradients are rounded to bfloat16 before they are added
    assert_clean(opened(tmp_path))


class Last(L.Callback):
    """Keeps the weights that training ends with."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.state = state_of(pl_module)


def averaging() -> Any:
    return L.callbacks.StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)


@pytest.mark.filterwarnings("ignore")  # the memory says what it noticed, Lightning that it swaps the schedule
def test_averaged_weights_that_a_callback_loads_at_the_end_are_no_part_of_the_memory(tmp_path):
    model, last = module(), Last()
    trainer(last, averaging(), recorder(tmp_path), max_epochs=3).fit(model, loader())
    memory = opened(tmp_path)
    assert {mark.kind for mark in memory.certificate.marks} == {"changed-at-end"}
    assert not all(torch.equal(tensor, state_of(model)[name]) for name, tensor in last.state.items())
    for name, tensor in last.state.items():
        torch.testing.assert_close(memory.weights(progress=False)[name], tensor)
    assert memory.certificate.worst < EXACT


@pytest.mark.filterwarnings("ignore")  # Lightning's own, about layers that are not trained at first
def test_layers_that_are_unfrozen_later_are_recorded_from_then_on(tmp_path):
    class Backbone(L.callbacks.BaseFinetuning):
        """As Lightning's BackboneFinetuning does it: the first layer joins the optimiser in the second epoch."""

        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net[0])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)

    def trained(*callbacks: Any) -> Any:
        model = module()
        model.configure_optimizers = lambda: optim.SGD(
            [p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9
        )
        trainer(Backbone(), *callbacks, max_epochs=3).fit(model, loader())
        return model

    bare, model = trained(), trained(recorder(tmp_path))
    assert_same(bare, model)
    memory = opened(tmp_path)
    assert set(memory.layers) == {"net.0", "net.3"}
    assert_clean(memory)
    assert_rebuilt(memory, model, EXACT)
    assert listed(tmp_path, "index") == model.visits()


def test_several_optimisers_that_the_module_steps_itself_are_recorded(tmp_path):
    bare, model = (module(manual=True) for _ in range(2))
    trainer().fit(bare, loader())
    trainer(recorder(tmp_path)).fit(model, loader())
    assert_same(bare, model)
    assert_rebuilt(opened(tmp_path), model, EXACT)
    assert_clean(opened(tmp_path))
    expected = [index for _, batch in model.seen for _ in range(2) for index in batch]  # two steps a batch
    assert [line["index"] for line in listed(tmp_path, "index")] == expected


@pytest.mark.parametrize("name", PACKAGES)
def test_lightning_goes_by_two_names(tmp_path, name):
    package = pytest.importorskip(name, reason=f"{name} is not installed")
    model = module(package)
    trainer(recorder(tmp_path), package=package).fit(model, loader())
    assert_rebuilt(opened(tmp_path), model, EXACT)
    assert listed(tmp_path, "index") == model.visits()


def test_nothing_is_left_on_the_model_or_in_the_trainer(tmp_path):
    model, run = module(), trainer(recorder(tmp_path))
    own = set(vars(run))
    run.fit(model, loader())
    assert not any(module._forward_hooks for module in model.modules())
    assert {name for name in set(vars(run)) - own if callable(vars(run)[name])} == set()


# ---------------------------------------------------------------- columns


@pytest.mark.parametrize(
    ("data", "settings", "noted"),
    [
        pytest.param(None, {}, columns, id="tuples"),
        pytest.param(None, {"num_workers": 1}, columns, id="workers"),
        pytest.param(Stream(), {"shuffle": False}, columns, id="iterable"),
        pytest.param(Named(), {}, ("index", "source"), id="names"),
        pytest.param(Named(), {}, lambda batch: {"index": batch["index"], "of": "digits"}, id="function of a dict"),
    ],
)
def test_every_visit_has_the_columns_of_its_own_example(tmp_path, data, settings, noted):
    model = module()
    run = trainer(recorder(tmp_path, columns=noted), accumulate_grad_batches=3, max_epochs=1)
    run.fit(model, loader(data, **settings))
    assert listed(tmp_path, "index") == model.visits()
    y = digits()[1]
    for line in opened(tmp_path).visits.to_pylist():
        digit = int(y[line["index"]])
        assert line.get("label", digit) == digit
        assert line.get("source", "odd" if digit % 2 else "even") == ("odd" if digit % 2 else "even")


def test_without_columns_a_visit_is_its_step_and_row(tmp_path):
    model = module()
    trainer(recorder(tmp_path, columns=()), max_epochs=1).fit(model, loader())
    assert opened(tmp_path).visits.column_names == ["visit", "step", "row"]
    assert len(listed(tmp_path)) == 45


def test_names_need_a_batch_that_has_them(tmp_path):
    with pytest.raises(NoteError, match=r"no column 'sauce'.*\['index', 'source', 'x', 'y'\]"):
        trainer(recorder(tmp_path, columns="sauce")).fit(module(), loader(Named()))
    with pytest.raises(NoteError, match=r"Here a batch is a list, .*function of the batch"):
        trainer(recorder(tmp_path, columns="index", overwrite=True)).fit(module(), loader())
    with pytest.raises(NoteError, match="returned a list"):
        trainer(recorder(tmp_path, columns=lambda batch: batch, overwrite=True)).fit(module(), loader())


# ---------------------------------------------------------------- checkpoints


def saving(folder: Path, **settings: Any) -> Any:
    settings = {"dirpath": folder / "checkpoints", "filename": "{step}", "save_top_k": -1, **settings}
    return import_module(f"{L.__name__}.callbacks").ModelCheckpoint(**settings)


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_is_never_newer_than_the_memory(tmp_path, weights_only):
    io = import_module(f"{L.__name__}.plugins.io").TorchCheckpointIO

    class Careful(io):
        def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            on_disk.append((checkpoint["global_step"], opened(tmp_path).step))
            super().save_checkpoint(checkpoint, *args, **kwargs)

    on_disk: list[tuple[int, int]] = []
    save = saving(tmp_path, every_n_train_steps=3, save_weights_only=weights_only)
    trainer(recorder(tmp_path), save, max_steps=7, enable_checkpointing=True, plugins=[Careful()]).fit(
        module(), loader()
    )
    assert on_disk[:2] == [(3, 3), (6, 6)]
    assert all(step <= memory for step, memory in on_disk)


def test_a_resumed_run_is_the_run_that_was_never_interrupted(tmp_path):
    def run(folder: Path, *more: Any) -> tuple[Any, Any]:
        callbacks = recorder(folder), saving(folder, every_n_epochs=1), *more
        return module(), trainer(*callbacks, max_epochs=3, enable_checkpointing=True, accumulate_grad_batches=2)

    def fail() -> None:
        raise ValueError

    whole, uninterrupted = run(tmp_path / "whole")
    uninterrupted.fit(whole, loader(shuffle=False))

    model, first = run(tmp_path, At(29, fail))  # 12 batches and 6 steps an epoch
    with pytest.raises(ValueError):
        first.fit(model, loader(shuffle=False))
    assert opened(tmp_path).step == 14
    model, second = run(tmp_path)
    second.fit(model, loader(shuffle=False), ckpt_path=tmp_path / "checkpoints" / "step=12.ckpt")

    assert_same(whole, model)
    assert opened(tmp_path).step == 18
    assert listed(tmp_path, "index") == listed(tmp_path / "whole", "index")
    assert_rebuilt(opened(tmp_path), model, EXACT)
    assert_clean(opened(tmp_path))


def test_resuming_without_the_memory_is_refused(tmp_path):
    def run() -> Any:
        return trainer(recorder(tmp_path), saving(tmp_path), max_epochs=2, enable_checkpointing=True)

    run().fit(module(), loader())
    with pytest.raises(MemoryExists, match="24 steps"):
        run().fit(module(), loader())
    shutil.rmtree(tmp_path / "memory")
    with pytest.raises(MemoryNotFound):
        run().fit(module(), loader(), ckpt_path=tmp_path / "checkpoints" / "step=12.ckpt")


def test_a_checkpoint_that_was_not_recorded_begins_a_memory(tmp_path):
    trainer(saving(tmp_path), max_epochs=1, enable_checkpointing=True).fit(module(), loader())
    run, model = trainer(recorder(tmp_path), saving(tmp_path), enable_checkpointing=True), module()
    run.fit(model, loader(), ckpt_path=tmp_path / "checkpoints" / "step=12.ckpt")
    assert opened(tmp_path).step == 12
    assert_rebuilt(opened(tmp_path), model, EXACT)


def test_a_checkpoint_loaded_only_for_evaluation_does_not_count(tmp_path):
    trainer(recorder(tmp_path), saving(tmp_path), max_epochs=1, enable_checkpointing=True).fit(module(), loader())
    new = recorder(tmp_path / "new"), saving(tmp_path)
    run, model = trainer(*new, max_epochs=1, enable_checkpointing=True), module()
    run.validate(module(), ckpt_path=tmp_path / "checkpoints" / "step=12.ckpt", verbose=False)
    run.fit(model, loader())
    assert opened(tmp_path / "new").step == 12
    assert_rebuilt(opened(tmp_path / "new"), model, EXACT)


# ---------------------------------------------------------------- how a run ends, and begins again


@pytest.mark.parametrize(("error", "seen"), [(ValueError, ValueError), (KeyboardInterrupt, SystemExit)])
def test_a_run_that_fails_keeps_its_complete_steps(tmp_path, error, seen):
    def fail() -> None:
        raise error

    model, handler = module(), signal.getsignal(signal.SIGINT)
    run = trainer(recorder(tmp_path), At(7, fail), accumulate_grad_batches=2)
    try:
        with pytest.raises(seen):
            run.fit(model, loader())
    finally:
        signal.signal(signal.SIGINT, handler)  # after an interrupt Lightning wants no other
    assert opened(tmp_path).step == 3
    assert not any(module._forward_hooks for module in model.modules())
    assert "save_checkpoint" not in vars(run)


def test_an_interrupt_inside_a_hook_of_the_recorder_keeps_the_step(tmp_path, monkeypatch):
    add, model, handler = ShardBuilder.add, module(), signal.getsignal(signal.SIGINT)

    def pressed(shelf: ShardBuilder, step: int, *args: Any, **kwargs: Any) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        add(shelf, step, *args, **kwargs)

    monkeypatch.setattr(ShardBuilder, "add", pressed)
    try:
        with pytest.raises(SystemExit):
            trainer(recorder(tmp_path)).fit(model, loader())
    finally:
        signal.signal(signal.SIGINT, handler)  # after an interrupt Lightning wants no other
    assert opened(tmp_path).store.manifest.ended == Ended("interrupted", 4, "KeyboardInterrupt")
    assert_rebuilt(opened(tmp_path), model, EXACT)


def test_another_fit_needs_a_checkpoint_or_another_memory(tmp_path):
    run = trainer(recorder(tmp_path, overwrite=True), saving(tmp_path), max_epochs=1, enable_checkpointing=True)
    model = module()
    run.fit(model, loader())
    run.fit_loop.max_epochs = 2
    with pytest.raises(MemoryExists, match="with another optimiser"):  # Lightning makes a new one
        run.fit(model, loader())
    run.fit(model, loader(), ckpt_path=tmp_path / "checkpoints" / "step=12.ckpt")
    assert opened(tmp_path).step == 24
    assert_rebuilt(opened(tmp_path), model, EXACT)


def test_the_options_are_those_of_record(tmp_path):
    trainer(recorder(tmp_path, layers=["net.3"], keep="keys"), max_epochs=1).fit(module(), loader())
    assert opened(tmp_path).layers == ("net.3",)
    with pytest.raises(TypeError, match="layer"):
        recorder(tmp_path, layer=["net.3"])


def test_a_model_that_no_process_has_whole_is_refused(tmp_path):
    two: Any = SimpleNamespace(world_size=2, strategy=L.strategies.FSDPStrategy())
    with pytest.raises(RecordError, match="FSDPStrategy"):
        recorder(tmp_path).on_train_start(two, module())


def test_without_the_package_the_extra_is_named(monkeypatch):
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "dualform.record.lightning")
    with pytest.raises(MissingExtra, match=r"pip install 'dualform\[lightning\]'"):
        import_module("dualform.record.lightning")


def test_the_recipe_is_kept_and_a_wrong_one_is_refused_before_training(tmp_path):
    model = module()
    names = [f"class {i}" for i in range(10)]
    callback = recorder(tmp_path, describe={"model": "train:make_model", "classes": names})
    trainer(callback).fit(model, loader())
    recipe = opened(tmp_path).recipe
    assert recipe is not None and (recipe.model, recipe.classes) == ("train:make_model", tuple(names))
    with pytest.raises(QueryError, match="has no 'modle'"):
        recorder(tmp_path, describe={"modle": "train:make_model"})
