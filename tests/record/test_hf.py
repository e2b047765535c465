"""Hugging Face's Trainer: its training is unchanged, and every visit has the columns of its own example."""

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import assert_clean, state_of
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.utils.data import DataLoader, IterableDataset

import dualform
from dualform.errors import MemoryExists, MemoryNotFound, MissingExtra, NoteError, QueryError, RecordError
from dualform.record.shards.shard_builder import ShardBuilder
from dualform.types import Ended

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")
pytest.importorskip("accelerate", reason="accelerate is not installed (extra: hf)")

from dualform.record.hf import RecordCallback, _packed, _unpacked  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk", "quiet")

PAD, WORDS = 0, 64
EXACT = 1e-10
NAMES = ("source", "index")


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    gc.freeze()  # every training begins with a garbage collection, and all that is imported here is no garbage
    yield
    gc.unfreeze()
    transformers.utils.logging.set_verbosity_warning()
    transformers.utils.logging.enable_progress_bar()


# ---------------------------------------------------------------- networks, data, trainers


def llama(dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=False,
        attention_dropout=0.1,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def gpt2(dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """With dropout; its softmax has a weight of its own."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=16,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=1,
    )
    return transformers.GPT2LMHeadModel(config).to(dtype)


def sentences(count: int = 14, ragged: bool = False, labels: bool = True) -> list[dict[str, Any]]:
    """All different, each with its index and where it comes from."""
    random = torch.Generator().manual_seed(0)
    out = []
    for index in range(count):
        words = torch.randint(3, WORDS, (5 + index % 3 if ragged else 6,), generator=random).tolist()
        example = {"input_ids": words, "source": "web" if index % 3 else "books", "index": index}
        out.append({**example, "labels": words} if labels else example)
    return out


class Stream(IterableDataset):
    def __init__(self, examples: list[dict[str, Any]]) -> None:
        self.examples = examples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.examples)


class Spy(transformers.Trainer):
    """Collects the inputs of its training steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[int, list[list[int]]]] = []
        self.keys: set[str] = set()

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        words = [[word for word in line if word != PAD] for line in inputs["input_ids"].tolist()]
        self.seen.append((self.state.global_step + 1, words))
        self.keys |= set(inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    def visits(self, examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What the memory should list, the last step's leftovers aside."""
        index = {tuple(example["input_ids"]): example for example in examples}
        return [
            {"step": step, "row": row, **{name: index[tuple(words)][name] for name in NAMES}}
            for step, batch in self.seen
            for row, words in enumerate(batch)
            if step <= self.state.global_step
        ]


def trainer(
    folder: Path,
    model: nn.Module,
    callback: RecordCallback | None = None,
    *,
    data: Any = None,
    collator: Any = None,
    callbacks: tuple[Any, ...] = (),
    optimizer: optim.Optimizer | None = None,
    model_init: Any = None,
    **settings: Any,
) -> Spy:
    settings = {
        "output_dir": str(folder / "checkpoints"),
        "optim": "sgd",
        "learning_rate": 0.1,
        "weight_decay": 0.01,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "log_level": "error",
        "dataloader_pin_memory": False,
        **settings,
    }
    return Spy(
        None if model_init else model,
        transformers.TrainingArguments(**settings),
        train_dataset=sentences() if data is None else data,
        eval_dataset=sentences(4),
        data_collator=collator,
        optimizers=(optimizer, None),
        model_init=model_init,
        callbacks=[*([callback] if callback else []), *callbacks],
    )


def recorder(folder: Path, **options: Any) -> RecordCallback:
    return RecordCallback(folder / "memory", **{"columns": NAMES, "dtype": "float64", "progress": False, **options})


def opened(folder: Path) -> dualform.Memory:
    return dualform.open(folder / "memory")


def listed(folder: Path) -> list[dict[str, Any]]:
    """The visits of the memory in their order."""
    return [{key: line[key] for key in line if key != "visit"} for line in opened(folder).visits.to_pylist()]


def assert_exact(folder: Path, model: nn.Module, bar: float = EXACT) -> None:
    """The memory rebuilds the weights of the model, now and when it was written."""
    assert opened(folder).check(model, full=True).worst <= bar
    assert opened(folder).certificate.worst <= bar
    assert len(opened(folder).certificate)


def assert_same(model: nn.Module, twin: nn.Module) -> None:
    """Two models have the same weights, bit for bit."""
    first, second = state_of(model), state_of(twin)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def momentum(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)


class At(transformers.TrainerCallback):
    """Runs an action after a step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.action()


def interrupt() -> None:
    raise KeyboardInterrupt


# ---------------------------------------------------------------- training is what it was


@pytest.mark.parametrize("network", [llama, gpt2])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param({"gradient_accumulation_steps": 4, "max_grad_norm": 0.05}, id="accumulated and clipped"),
        pytest.param(
            {"max_steps": 5, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}, id="evaluated"
        ),
        pytest.param({"gradient_checkpointing": True}, id="recomputed"),
        pytest.param({"dataloader_num_workers": 1, "num_train_epochs": 1}, id="workers"),
    ],
)
def test_recorded_training_is_the_unrecorded_one_and_the_memory_rebuilds_it(tmp_path, network, settings):
    bare, model = network(), network()
    trainer(tmp_path, bare, **settings).train()
    recorded = trainer(tmp_path, model, recorder(tmp_path), **settings)
    recorded.train()
    assert_same(bare, model)
    assert_exact(tmp_path, model)
    assert_clean(opened(tmp_path))
    assert listed(tmp_path) == recorded.visits(sentences())


@pytest.mark.parametrize("optimizer", [None, momentum])
def test_in_float32_the_memory_is_as_exact_as_training(tmp_path, optimizer):
    model = llama(torch.float32)
    own = optimizer(model) if optimizer else None
    trainer(tmp_path, model, recorder(tmp_path, dtype="float32"), optimizer=own, learning_rate=1.0).train()
    assert_exact(tmp_path, model, 1e-4)


def test_mixed_precision_is_recorded_as_it_runs(tmp_path):
    bare, model = llama(torch.float32), llama(torch.float32)
    trainer(tmp_path, bare, bf16=True).train()
    trainer(tmp_path, model, recorder(tmp_path, dtype="float32"), bf16=True).train()
    assert_same(bare, model)
    assert opened(tmp_path).certificate.worst < 2**-8  # gradients are rounded to bfloat16 before they are added
    assert_clean(opened(tmp_path))


def test_nothing_is_left_on_the_model_or_in_the_trainer(tmp_path):
    model = llama()
    before = {id(module): len(module._forward_hooks) for module in model.modules()}
    run = trainer(tmp_path, model, recorder(tmp_path))
    own = set(vars(run))
    run.train()
    assert {id(module): len(module._forward_hooks) for module in model.modules()} == before
    assert {name for name in set(vars(run)) - own if callable(vars(run)[name])} == set()


# ---------------------------------------------------------------- columns


def as_datasets(examples: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("datasets", reason="datasets is not installed").Dataset.from_list(examples)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(list, id="list"),
        pytest.param(Stream, id="iterable"),
        pytest.param(as_datasets, id="datasets"),
        pytest.param(lambda examples: as_datasets(examples).with_format("torch"), id="datasets as tensors"),
        pytest.param(lambda examples: as_datasets(examples).to_iterable_dataset(), id="datasets streamed"),
    ],
)
def test_every_visit_has_the_columns_of_its_own_example(tmp_path, make):
    run = trainer(
        tmp_path,
        llama(),
        recorder(tmp_path),
        data=make(sentences()),
        max_steps=5,
        gradient_accumulation_steps=3,
    )
    run.train()
    assert len(listed(tmp_path)) > 5 * 3
    assert listed(tmp_path) == run.visits(sentences())
    assert run.keys == {"input_ids", "labels"}


def padding() -> Any:
    tokenizers = import_module("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": PAD, "word": 1}, unk_token="word"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    return transformers.DataCollatorForLanguageModeling(fast, mlm=False)


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.text(), st.floats(), st.booleans()), min_size=1))
def test_columns_are_the_same_after_encoding_and_decoding(values):
    names = ("index", "source", "weight", "kept")
    decoded = _unpacked(_packed([dict(zip(names, row, strict=True)) for row in values]))
    assert repr(decoded) == repr({name: [row[i] for row in values] for i, name in enumerate(names)})  # NaN and all


@pytest.mark.parametrize("make", [list, as_datasets])
def test_a_collator_that_pads_never_sees_the_columns(tmp_path, make):
    examples = sentences(ragged=True, labels=False)
    settings = {"data": make(examples), "collator": padding(), "dataloader_num_workers": 1, "num_train_epochs": 1}
    bare, model = llama(), llama()
    unrecorded = trainer(tmp_path, bare, **settings)
    unrecorded.train()
    run = trainer(tmp_path, model, recorder(tmp_path), **settings)
    run.train()
    assert_same(bare, model)
    assert listed(tmp_path) == run.visits(examples)
    assert run.keys == unrecorded.keys


@pytest.mark.parametrize("make", [list, as_datasets])
@pytest.mark.parametrize("removed", [True, False])
def test_a_custom_collator_gets_the_same_examples_as_without_recording(tmp_path, make, removed):
    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        columns.append([sorted(example) for example in examples])
        return {name: torch.tensor([example[name] for example in examples]) for name in ("input_ids", "labels")}

    columns: list[list[list[str]]] = []
    settings = {"data": make(sentences()), "collator": collate, "remove_unused_columns": removed}
    trainer(tmp_path, llama(), **settings).train()
    without, columns = columns, []
    run = trainer(tmp_path, llama(), recorder(tmp_path), **settings)
    run.train()
    assert columns == without
    assert listed(tmp_path) == run.visits(sentences())


def test_a_custom_loader_is_left_unchanged(tmp_path):
    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        assert set(examples[0]) == {"input_ids", "labels", *NAMES}
        return {name: torch.tensor([example[name] for example in examples]) for name in ("input_ids", "labels")}

    class Own(Spy):
        def get_train_dataloader(self) -> DataLoader:
            return loader

    data: Any = sentences()
    loader = DataLoader(data, batch_size=3, collate_fn=collate)
    run = trainer(tmp_path, llama(), recorder(tmp_path))
    run.__class__ = Own
    run.train()
    assert loader.collate_fn is collate
    assert listed(tmp_path) == run.visits(sentences())


def test_columns_may_be_made_of_the_batch(tmp_path):
    def columns(batch: Any) -> dict[str, Any]:
        return {"first": batch["input_ids"][:, 0], "kind": "sentence"}

    run = trainer(tmp_path, llama(), recorder(tmp_path, columns=columns))
    run.train()
    assert [line["first"] for line in listed(tmp_path)] == [words[0] for _, batch in run.seen for words in batch]
    assert {line["kind"] for line in listed(tmp_path)} == {"sentence"}


def test_a_column_that_the_collator_makes_can_be_noted_too(tmp_path):
    def collate(examples: list[Any]) -> dict[str, torch.Tensor]:
        words = torch.tensor(examples)
        return {"input_ids": words, "labels": words, "first": words[:, 0]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

        def forward(self, input_ids: Any, labels: Any, first: Any) -> dict[str, Any]:
            logits = self.out(self.table(input_ids))
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    plain = [example["input_ids"] for example in sentences()]  # examples without names
    run = trainer(tmp_path, Net(), recorder(tmp_path, columns="first"), data=plain, collator=collate)
    run.train()
    assert [line["first"] for line in listed(tmp_path)] == [words[0] for _, batch in run.seen for words in batch]
    assert "first" in run.keys


def test_without_columns_a_visit_is_its_step_and_row(tmp_path):
    run = trainer(tmp_path, llama(), recorder(tmp_path, columns=()), num_train_epochs=1)
    run.train()
    assert listed(tmp_path) == [{"step": step, "row": row} for step, batch in run.seen for row in range(len(batch))]


@pytest.mark.parametrize("make", [list, as_datasets])
def test_a_missing_column_is_rejected_with_a_list_of_the_others(tmp_path, make):
    run = trainer(tmp_path, llama(), recorder(tmp_path, columns=("sauce",)), data=make(sentences()))
    with pytest.raises(NoteError, match=r"no column 'sauce'.*\['index', 'input_ids', 'labels', 'source'\]"):
        run.train()


def test_columns_that_have_no_place_in_the_batch_are_rejected(tmp_path):
    def collate(examples: list[dict[str, Any]]) -> list[torch.Tensor]:
        return [torch.tensor([example["input_ids"] for example in examples])]

    run = trainer(tmp_path, llama(), recorder(tmp_path), collator=collate)
    with pytest.raises(NoteError, match=r"the collator returns a list.*'source', 'index'.*function"):
        run.train()


@pytest.mark.parametrize(("value", "why"), [([1, 2], "shape"), (None, "shape"), (object(), "one number or one string")])
def test_a_column_holds_one_value_an_example(tmp_path, value, why):
    data = [{**example, "odd": value} for example in sentences()]
    with pytest.raises(NoteError, match=why):
        trainer(tmp_path, llama(), recorder(tmp_path, columns="odd"), data=data).train()


def test_a_function_for_columns_must_give_names(tmp_path):
    run = trainer(tmp_path, llama(), recorder(tmp_path, columns=lambda batch: [1, 2]))
    with pytest.raises(NoteError, match="returned a list"):
        run.train()


# ---------------------------------------------------------------- checkpoints


def test_a_checkpoint_is_never_newer_than_the_memory(tmp_path):
    class Careful(Spy):
        def save_model(self, *args: Any, **kwargs: Any) -> None:
            on_disk.append((self.state.global_step, opened(tmp_path).step))
            super().save_model(*args, **kwargs)

    on_disk: list[tuple[int, int]] = []
    run = trainer(tmp_path, llama(), recorder(tmp_path), save_strategy="steps", save_steps=3, max_steps=7)
    run.__class__ = Careful
    run.train()
    assert on_disk == [(3, 3), (6, 6), (7, 7)]


@pytest.mark.parametrize("optimizer", [None, momentum])
def test_a_resumed_run_is_the_run_that_was_never_interrupted(tmp_path, optimizer):
    def run(folder: Path, **more: Any) -> tuple[nn.Module, Spy]:
        model = llama()
        own = optimizer(model) if optimizer else None
        settings = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 3, **more}
        return model, trainer(folder, model, recorder(folder), optimizer=own, **settings)

    whole, uninterrupted = run(tmp_path / "whole")
    uninterrupted.train()

    _, first = run(tmp_path, callbacks=(At(5, interrupt),))
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert opened(tmp_path).step == 5
    model, second = run(tmp_path)
    second.train(resume_from_checkpoint=True)

    assert_same(whole, model)
    assert listed(tmp_path) == listed(tmp_path / "whole")
    assert_exact(tmp_path, model)
    assert_clean(opened(tmp_path))


def test_resuming_without_the_memory_is_refused(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 4, "max_steps": 6}
    trainer(tmp_path, llama(), recorder(tmp_path), **saving).train()
    shutil.rmtree(tmp_path / "memory")
    with pytest.raises(MemoryNotFound):
        trainer(tmp_path, llama(), recorder(tmp_path), **saving).train(resume_from_checkpoint=True)


def test_a_second_training_at_the_same_path_needs_overwrite_or_resume(tmp_path):
    trainer(tmp_path, llama(), recorder(tmp_path), max_steps=3).train()
    with pytest.raises(MemoryExists, match="3 steps"):
        trainer(tmp_path, llama(), recorder(tmp_path), max_steps=3).train()
    trainer(tmp_path, llama(), recorder(tmp_path, overwrite=True), max_steps=2).train()
    assert opened(tmp_path).step == 2


def test_the_step_to_go_on_from_can_be_given(tmp_path):
    model = llama()
    trainer(tmp_path, model, recorder(tmp_path), max_steps=3).train()
    trainer(tmp_path, model, recorder(tmp_path, resume=3), max_steps=2).train()
    assert opened(tmp_path).step == 5
    assert_exact(tmp_path, model)


def test_a_checkpoint_that_was_not_recorded_begins_a_memory(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    trainer(tmp_path, llama(), **{**saving, "max_steps": 4}).train()
    model = llama()
    trainer(tmp_path, model, recorder(tmp_path), **saving).train(resume_from_checkpoint=True)
    assert opened(tmp_path).step == 4
    assert_exact(tmp_path, model)


def test_the_best_model_that_is_loaded_at_the_end_is_not_part_of_the_memory(tmp_path):
    model, last = llama(), {}
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    run = trainer(
        tmp_path,
        model,
        recorder(tmp_path),
        callbacks=(At(6, lambda: last.update(state_of(model))),),
        load_best_model_at_end=True,
        learning_rate=20.0,  # so that the best model is an early one
        max_grad_norm=0,
        **settings,
    )
    run.train()
    assert run.state.best_global_step < 6
    assert opened(tmp_path).certificate.worst < EXACT
    assert_clean(opened(tmp_path))
    weights = opened(tmp_path).weights()
    assert all(torch.allclose(weights[name], last[name], atol=1e-8) for name in last)


# ---------------------------------------------------------------- how a run ends, and begins again


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_run_that_fails_keeps_its_complete_steps_and_can_go_on(tmp_path, error):
    def fail() -> None:
        raise error

    model = llama()
    failing = At(4, fail)
    run = trainer(tmp_path, model, recorder(tmp_path), callbacks=(failing,), gradient_accumulation_steps=2)
    with pytest.raises(error):
        run.train()
    assert opened(tmp_path).step == 4
    assert not any(module._forward_hooks for module in model.modules())
    assert "training_step" not in vars(run)
    run.remove_callback(failing)
    run.train()
    assert opened(tmp_path).step == 4 + run.state.global_step
    assert_exact(tmp_path, model)


def test_an_interrupt_inside_a_hook_of_the_recorder_keeps_the_step(tmp_path, monkeypatch):
    add, steps, model = ShardBuilder.add, [], llama()

    def pressed(shelf: ShardBuilder, step: int, *args: Any, **kwargs: Any) -> None:
        steps.append(step)
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        add(shelf, step, *args, **kwargs)

    monkeypatch.setattr(ShardBuilder, "add", pressed)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, model, recorder(tmp_path)).train()
    assert steps == [1, 2, 3, 4] and opened(tmp_path).store.manifest.ended == Ended(
        "interrupted", 4, "KeyboardInterrupt"
    )
    assert_exact(tmp_path, model)
    assert_clean(opened(tmp_path))


@pytest.mark.parametrize("optimizer", [None, momentum])
def test_training_twice_makes_one_memory(tmp_path, optimizer):
    model = llama()
    run = trainer(
        tmp_path,
        model,
        recorder(tmp_path, overwrite=True),
        optimizer=optimizer(model) if optimizer else None,
        max_steps=5,
        save_strategy="steps",
        save_steps=4,
    )
    run.train()
    run.train()
    assert opened(tmp_path).step == 10
    assert_exact(tmp_path, model)
    assert_clean(opened(tmp_path))
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoints" / "checkpoint-4"))  # of the second training
    assert opened(tmp_path).step == 10
    assert_exact(tmp_path, model)


def test_a_training_from_new_weights_is_not_the_same_memory(tmp_path):
    run = trainer(tmp_path, llama(), recorder(tmp_path, overwrite=True), model_init=lambda: llama(), max_steps=3)
    run.train()
    with pytest.raises(MemoryExists, match="a callback with its own path"):
        run.train()
    assert opened(tmp_path).step == 3


def test_a_trainer_that_looks_for_its_batch_size_goes_on_recording(tmp_path):
    class Small(Spy):
        def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.state.global_step == 2 and len(inputs["input_ids"]) > 3:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *args, **kwargs)

    model = llama()
    run = trainer(tmp_path, model, recorder(tmp_path), auto_find_batch_size=True, per_device_train_batch_size=4)
    run.__class__ = Small
    run.train()
    assert opened(tmp_path).step == 2 + run.state.global_step
    assert_exact(tmp_path, model)
    assert_clean(opened(tmp_path))


# ---------------------------------------------------------------- callback and trainer find each other


def test_a_callback_that_comes_later_has_to_be_attached(tmp_path):
    run, callback = trainer(tmp_path, llama(), max_steps=3), recorder(tmp_path)
    run.add_callback(callback)
    with pytest.raises(RecordError, match=r"callback\.attach\(trainer\)"):
        run.train()
    callback.attach(run)
    callback.attach(run)  # once is enough
    run.train()
    assert opened(tmp_path).step == 3
    assert sum(present is callback for present in run.callback_handler.callbacks) == 1


def test_a_callback_that_was_removed_records_nothing(tmp_path):
    callback = recorder(tmp_path)
    run = trainer(tmp_path, llama(), callback, max_steps=3)
    run.remove_callback(callback)
    run.train()
    assert run.keys == {"input_ids", "labels"} and not (tmp_path / "memory").exists()


def test_the_recipe_is_kept_and_a_wrong_one_is_refused_before_training(tmp_path):
    model = llama()
    names = [f"class {i}" for i in range(64)]
    callback = recorder(tmp_path, describe={"model": "train:make_model", "classes": names})
    trainer(tmp_path, model, callback).train()
    recipe = opened(tmp_path).recipe
    assert recipe is not None and (recipe.model, recipe.classes) == ("train:make_model", tuple(names))
    with pytest.raises(QueryError, match="has no 'modle'"):
        recorder(tmp_path, describe={"modle": "train:make_model"})


def test_the_options_are_those_of_record(tmp_path):
    trainer(tmp_path, llama(), recorder(tmp_path, layers=["lm_head"], keep="keys"), max_steps=2).train()
    assert opened(tmp_path).layers == ("lm_head",)
    with pytest.raises(TypeError, match="layer"):
        recorder(tmp_path, layer=["lm_head"])


@pytest.mark.parametrize("how", [{"n_gpu": 2}, {"fsdp": "full_shard"}, {"deepspeed": {"zero": 3}}], ids=str)
def test_a_model_that_no_process_has_whole_is_refused(tmp_path, how):
    args: Any = SimpleNamespace(**{"n_gpu": 0, "fsdp": [], "deepspeed": None, **how})
    nothing: Any = None
    callback = recorder(tmp_path)
    callback._training = True
    with pytest.raises(RecordError, match=r"2 devices|FSDP|DeepSpeed"):
        callback.on_train_begin(args, nothing, nothing)


@pytest.mark.parametrize("package", ["transformers", "accelerate"])
def test_without_the_package_the_extra_is_named(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "dualform.record.hf")
    with pytest.raises(MissingExtra, match=r"pip install 'dualform\[hf\]'"):
        import_module("dualform.record.hf")
