"""Networks of Hugging Face: a training by Trainer, or by a loop on ``model(**batch).loss``, runs again bit for bit."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

import dualform
from dualform.errors import QueryError, RecordError
from dualform.tasks import causal_lm, of_trainer, optimizer_of, sequence_classification

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")
pytest.importorskip("accelerate", reason="accelerate is not installed (extra: hf)")

from dualform.record.hf import RecordCallback  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk", "quiet")

WORDS, PAD, N = 64, 0, 14
DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    gc.freeze()  # every training begins with a garbage collection
    yield
    gc.unfreeze()
    transformers.utils.logging.set_verbosity_warning()
    transformers.utils.logging.enable_progress_bar()


# ------------------------------------------------------------------------------------------- networks, data, trainers


def gpt2(kind: str = "GPT2LMHeadModel", **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=1,
        pad_token_id=PAD, **{**DRY, **settings},
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def llama(**settings: Any) -> Any:
    """A network that divides its loss by the tokens of the whole step."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, tie_word_embeddings=True, pad_token_id=PAD, **settings,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert(kind: str = "BertForSequenceClassification", **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=PAD,
        **settings,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def sentences(label: Any = None, first: int = 0) -> list[dict[str, Any]]:
    """Of 4 to 9 words; ``label`` is a function of their number."""
    random = torch.Generator().manual_seed(0)
    rows = []
    for i in range(N):
        words = torch.randint(3, WORDS, (4 + i % 6,), generator=random).tolist()
        rows.append({"input_ids": words, "index": first + i} | ({} if label is None else {"labels": label(i)}))
    return rows


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [PAD] * (longest - len(row["input_ids"])) for row in rows])
    labels = torch.tensor([row["labels"] for row in rows]) if "labels" in rows[0] else ids.masked_fill(ids == PAD, -100)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def trained(
    path: Any,
    model: Any,
    rows: Any = None,
    kind: Any = None,
    collate: Any = padded,
    recording: Any = None,
    **settings: Any,
) -> tuple[Any, Any]:
    options = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, **settings}
    args = transformers.TrainingArguments(
        str(path / "out"), per_device_train_batch_size=3, report_to=[], disable_tqdm=True, save_strategy="no",
        logging_strategy="no", use_cpu=True, **options,
    )  # fmt: skip
    callback = RecordCallback(path / "memory", columns=("index",), progress=False, **(recording or {}))
    trainer = (kind or transformers.Trainer)(
        model, args, train_dataset=sentences() if rows is None else rows, data_collator=collate, callbacks=[callback]
    )
    trainer.train()
    return trainer, callback


def assert_same(run: Any, model: nn.Module) -> None:
    check = run.check()
    assert check.exact, str(check)
    for again, parameter in zip(run.retrain().parameters(), model.parameters(), strict=True):
        assert torch.equal(again, parameter)


# ------------------------------------------------------------------------------------------- the Trainer


SETTINGS: dict[str, dict[str, Any]] = {
    "fused AdamW": {},
    "plain AdamW": {"optim": "adamw_torch"},
    "SGD, three batches a step": {"optim": "sgd", "gradient_accumulation_steps": 3},
    "one batch a step, smoothed labels": {"gradient_accumulation_steps": 1, "label_smoothing_factor": 0.1},
    "two batches a step, smoothed labels": {"label_smoothing_factor": 0.1},
    "a schedule, clipped": {"max_grad_norm": 0.05, "warmup_steps": 3, "lr_scheduler_type": "cosine"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize("network", [gpt2, llama])
def test_a_language_model_runs_again_bit_for_bit(network, settings, tmp_path):
    model = network()
    _, callback = trained(tmp_path, model, **settings)
    memory = dualform.open(tmp_path / "memory")
    assert 5 % settings.get("gradient_accumulation_steps", 2) or settings["gradient_accumulation_steps"] == 1
    assert_same(callback.replay(memory), model)


def test_a_fused_optimiser_has_to_be_named(tmp_path):
    model = gpt2()
    trainer, _ = trained(tmp_path, model, optim="adamw_torch_fused")
    memory = dualform.open(tmp_path / "memory")
    assert_same(memory.replay(model, *of_trainer(trainer), optimizer=optimizer_of(trainer)), model)
    check = memory.replay(model, *of_trainer(trainer)).check()
    assert not check.exact


def test_a_new_process_makes_the_trainer_again_without_training(tmp_path):
    model = gpt2()
    trainer, _ = trained(tmp_path, model)
    fresh = transformers.Trainer(gpt2(), trainer.args, train_dataset=sentences(), data_collator=padded)
    memory = dualform.open(tmp_path / "memory")
    assert_same(memory.replay(fresh.model, *of_trainer(fresh), optimizer=optimizer_of(fresh)), model)


LABELS: dict[str, tuple[dict[str, Any], Any]] = {
    "classes": ({"num_labels": 3}, lambda i: i % 3),
    "several labels": ({"num_labels": 3}, lambda i: [float(i % 2), 1.0, float(i % 3 == 0)]),
    "a number": ({"num_labels": 1}, lambda i: i / 10),
}


@pytest.mark.parametrize(("config", "label"), LABELS.values(), ids=list(LABELS))
@pytest.mark.parametrize("network", [bert, lambda **config: gpt2("GPT2ForSequenceClassification", **config)])
def test_a_classifier_of_sequences_runs_again_bit_for_bit(network, config, label, tmp_path):
    model = network(**config)
    _, callback = trained(tmp_path, model, sentences(label))
    assert_same(callback.replay(dualform.open(tmp_path / "memory")), model)


def tagged(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Every third word has a label: its number in the vocabulary."""
    batch = padded(rows)
    return {**batch, "labels": torch.where(batch["labels"] % 3 == 0, batch["labels"], -100)}


def pixels(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    images = torch.stack([torch.full((1, 4, 4), float(row["index"])).cumsum(1).cos() for row in rows])
    return {"pixel_values": images, "labels": torch.tensor([row["index"] % 3 for row in rows])}


def vit() -> Any:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=4, patch_size=2,
        num_channels=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


class Plain(nn.Module):
    """A network that is none of Hugging Face's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 3)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.linear(pixel_values.flatten(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


OTHERS: dict[str, tuple[Any, Any]] = {
    "classes of tokens": (lambda: bert("BertForTokenClassification", num_labels=WORDS), tagged),
    "masked words": (lambda: bert("BertForMaskedLM"), tagged),
    "images": (vit, pixels),
    "a plain network": (Plain, pixels),
}


@pytest.mark.parametrize(("network", "collate"), OTHERS.values(), ids=list(OTHERS))
def test_other_networks_run_again_bit_for_bit(network, collate, tmp_path):
    model = network()
    _, callback = trained(tmp_path, model, collate=collate, remove_unused_columns=False)
    assert_same(callback.replay(dualform.open(tmp_path / "memory")), model)


def test_adapters_run_again_bit_for_bit(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed (extra: lora)")
    model = peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    _, callback = trained(tmp_path, model)
    assert_same(callback.replay(dualform.open(tmp_path / "memory")), model)


@pytest.mark.parametrize("network", [gpt2, llama])
@pytest.mark.parametrize("keep", ["slots", "replay"])
def test_a_memory_with_the_states_of_the_generator_runs_dropout_again(network, keep, tmp_path):
    model = network(attention_dropout=0.1) if network is llama else network(resid_pdrop=0.1, attn_pdrop=0.1)
    _, callback = trained(tmp_path, model, recording={"replay": True, "keep": keep})
    assert_same(callback.replay(dualform.open(tmp_path / "memory")), model)


def test_dropout_is_named_where_the_generator_was_not_kept(tmp_path):
    model = gpt2(resid_pdrop=0.1)
    _, callback = trained(tmp_path, model)
    check = callback.replay(dualform.open(tmp_path / "memory")).check()
    assert check.exact or (check.first_difference == 1 and "dropout" in str(check))


def test_the_column_holds_the_index_where_the_data_are_in_another_order(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = sentences(first=100)
    order = [(5 * i) % N for i in range(N)]
    table = datasets.Dataset.from_list([rows[i] for i in order])
    model = llama()
    trainer, callback = trained(tmp_path, model, table)
    memory = dualform.open(tmp_path / "memory")
    assert set(memory.visits["index"].to_pylist()) == set(range(100, 100 + N))
    assert_same(callback.replay(memory), model)
    assert "index" in trainer.train_dataset.column_names


class Doubled(transformers.Trainer):
    """Has a loss of its own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        return (2 * loss, outputs) if return_outputs else 2 * loss


def test_a_loss_that_the_shares_do_not_sum_to_is_answered_with_a_sentence(tmp_path):
    model = gpt2()
    _, callback = trained(tmp_path, model, kind=Doubled)
    with pytest.raises(QueryError, match=r"but the loss of the loop is .* computes another loss"):
        callback.replay(dualform.open(tmp_path / "memory")).check()


def test_a_callback_without_a_trainer_says_so(tmp_path):
    with pytest.raises(RecordError, match="has 0 trainers"):
        RecordCallback(tmp_path / "memory").replay(None)


def test_what_a_trainer_does_not_have_is_named(tmp_path):
    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
    with pytest.raises(QueryError, match="no train_dataset"):
        of_trainer(transformers.Trainer(gpt2(), args))
    question = bert("BertForQuestionAnswering")
    task = of_trainer(transformers.Trainer(question, args, train_dataset=sentences(), data_collator=padded))
    with pytest.raises(QueryError, match=r"BertForQuestionAnswering \(ForQuestionAnswering\) has no known share"):
        task.losses(question, task.data(torch.arange(2)))


def test_a_memory_without_an_index_says_what_to_note(tmp_path):
    model = gpt2()
    args = transformers.TrainingArguments(
        str(tmp_path / "out"), report_to=[], use_cpu=True, disable_tqdm=True, max_steps=1, save_strategy="no"
    )
    callback = RecordCallback(tmp_path / "memory", progress=False)
    transformers.Trainer(model, args, train_dataset=sentences(), data_collator=padded, callbacks=[callback]).train()
    with pytest.raises(QueryError, match="no column 'index'"):
        callback.replay(dualform.open(tmp_path / "memory"))


# ------------------------------------------------------------------------------------------- a loop of one's own


def recorded(path: Any, model: Any, rows: Any, collate: Any, backward: Any, passes: int = 1) -> dualform.Memory:
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(3)
    with dualform.record(model, optimizer, path, progress=False, dtype="float64") as tape:
        for _ in range(2):
            places = torch.randperm(N)[:12].split(3)
            for begin in range(0, len(places), passes):
                window = [collate([rows[i] for i in index]) for index in places[begin : begin + passes]]
                for index, batch in zip(places[begin : begin + passes], window, strict=True):
                    tape.note(index=index)
                    backward(model, batch, window)
                optimizer.step()
                optimizer.zero_grad()
    return dualform.open(path)


def test_a_loop_on_the_model_s_own_loss_runs_again(tmp_path):
    model, rows = gpt2(), sentences()
    data: Any = rows
    memory = recorded(tmp_path / "m", model, rows, padded, lambda m, batch, _: m(**batch).loss.backward())
    assert_same(memory.replay(model, *causal_lm(rows, padded)), model)
    loader = torch.utils.data.DataLoader(data, batch_size=3, collate_fn=padded)
    assert_same(memory.replay(model, *causal_lm(loader)), model)


def test_a_loop_may_accumulate_by_batches_or_by_tokens(tmp_path):
    model, rows = llama(), sentences()
    memory = recorded(tmp_path / "a", model, rows, padded, lambda m, b, w: (m(**b).loss / len(w)).backward(), 2)
    assert_same(memory.replay(model, *causal_lm(rows, padded, accumulate=2)), model)

    def by_tokens(m: Any, batch: Any, window: Any) -> None:
        tokens = sum((other["labels"][:, 1:] != -100).sum() for other in window)
        m(**batch, num_items_in_batch=tokens).loss.backward()

    model = llama()
    memory = recorded(tmp_path / "b", model, rows, padded, by_tokens, 2)
    assert_same(memory.replay(model, *causal_lm(rows, padded, tokens_of="step")), model)
    assert not memory.replay(model, *causal_lm(rows, padded, accumulate=2)).check().exact


def test_rows_of_equal_length_need_no_collator(tmp_path):
    rows = torch.randint(3, WORDS, (N, 8), generator=torch.Generator().manual_seed(0))

    def backward(model: Any, batch: Any, window: Any) -> None:
        model(input_ids=batch, labels=batch).loss.backward()

    model = gpt2()
    memory = recorded(tmp_path / "m", model, rows, torch.stack, backward)
    assert_same(memory.replay(model, *causal_lm(rows)), model)
    assert_same(memory.replay(model, *causal_lm([row.tolist() for row in rows])), model)
    with pytest.raises(QueryError, match="4 to 9 tokens cannot be stacked"):
        causal_lm(sentences()).data(torch.arange(6))


def test_a_loop_on_a_classifier_runs_again(tmp_path):
    model, rows = bert(num_labels=3), sentences(lambda i: i % 3)
    memory = recorded(tmp_path / "m", model, rows, padded, lambda m, batch, _: m(**batch).loss.backward())
    assert_same(memory.replay(model, *sequence_classification(rows, padded)), model)


def test_batches_without_labels_are_named():
    model, rows = bert(num_labels=3), sentences()
    task = sequence_classification(rows, lambda some: {"input_ids": padded(some)["input_ids"]})
    with pytest.raises(QueryError, match="the labels are missing"):
        task.losses(model, task.data(torch.arange(2)))


def test_each_share_is_the_loss_of_its_own_sequence():
    model, rows = gpt2().double(), sentences()
    task, index = causal_lm(rows, padded), torch.arange(5)
    batch = task.data(index)
    shares, labels = task.losses(model, batch), batch.inputs["labels"]
    logits, tokens = model(**batch.inputs).logits, (labels[:, 1:] != -100).sum()
    for i in index.tolist():
        naive = sum(
            F.cross_entropy(logits[i, j], labels[i, j + 1]) for j in range(labels.shape[1] - 1) if labels[i, j + 1] >= 0
        )
        torch.testing.assert_close(shares[i], naive / tokens)


# ------------------------------------------------------------------------------------------- influence


def double_loss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """That of transformers turns float64 into float32."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1), ignore_index=-100)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_influence_on_a_language_model_is_the_finite_difference_of_training_again(clip, tmp_path):
    model, rows = gpt2().double(), sentences()
    model.loss_function = double_loss

    def backward(model: Any, batch: Any, window: Any) -> None:
        (model(**batch).loss / 2).backward()
        if clip is not None and batch is window[-1]:
            nn.utils.clip_grad_norm_(model.parameters(), clip)

    memory = recorded(tmp_path / "m", model, rows, padded, backward, 2)
    run = memory.replay(model, *causal_lm(rows, padded, accumulate=2))
    assert run.check().exact
    question, target = {"input_ids": torch.tensor([[5, 9, 11, 4]])}, lambda output: output.logits[:, -1, 7]
    influence, weights = run.influence(question, target=target), torch.ones(len(run.visits)).double()
    for example, value in influence.top(2):
        visits, logits = torch.from_numpy(run.visits["index"].to_numpy() == example), []
        for change in (1e-5, -1e-5):
            with torch.no_grad():
                changed = run.retrain(weights=weights.masked_fill(visits, 1 + change))
                logits.append(float(target(changed(**question))))
        assert (logits[0] - logits[1]) / 2e-5 == pytest.approx(value, rel=1e-6)


CHANGES: dict[str, dict[str, Any]] = {
    "clipped, with words that never occur": {"max_grad_norm": 0.5},
    "bfloat16": {"bf16": True},
    "checkpointed": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
}


@pytest.mark.parametrize("settings", CHANGES.values(), ids=list(CHANGES))
def test_influence_on_a_trainer_s_network_is_a_number(settings, tmp_path):
    model = gpt2()
    _, callback = trained(tmp_path, model, **settings)
    run = callback.replay(dualform.open(tmp_path / "memory"))
    assert_same(run, model)
    influence = run.influence(
        {"input_ids": torch.tensor([[5, 9, 11, 4]])}, target=lambda output: output.logits[:, -1, 7]
    )
    assert influence.values.isfinite().all() and influence.values.abs().max() > 0
