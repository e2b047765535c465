"""LoRA with the package peft: the adapters are recorded, the frozen layers under them are not."""

import copy

import pytest
import torch
from torch import Tensor, nn, optim

import dualform
from dualform.explain import Memory

peft = pytest.importorskip("peft", reason="the extra lora is not installed")
transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

STEPS, BATCH, LENGTH, WORDS = 6, 4, 7, 19
PLACES = ("q_proj", "v_proj", "down_proj")


def tokens() -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, WORDS, (STEPS, BATCH, LENGTH), generator=draw)


def adapted(**options) -> nn.Module:
    """A small Llama in float64 with adapters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=WORDS, max_position_embeddings=LENGTH, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config).double()
    options = {"r": 3, "lora_alpha": 6, "target_modules": list(PLACES)} | options
    return peft.get_peft_model(llama, peft.LoraConfig(**options), autocast_adapter_dtype=False)


def train(model: nn.Module, path=None) -> nn.Module:
    """A few steps of AdamW, recorded where there is a path."""
    torch.manual_seed(2)  # for dropout
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tape = dualform.record(model, optimizer, path, dtype="float64", progress=False) if path else None
    with tape or torch.enable_grad():
        for batch in tokens():
            if tape:
                tape.note(source=["even", "odd"] * (BATCH // 2))
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[nn.Module, Memory]:
    path = tmp_path_factory.mktemp("lora")
    return train(adapted(), path), dualform.open(path)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens()[0]).logits


def test_the_adapters_are_recorded_and_frozen_layers_are_not(trained):
    model, memory = trained
    assert len(memory.layers) == 2 * len(PLACES) * 2
    assert all(name.endswith((".lora_A.default", ".lora_B.default")) for name in memory.layers)
    learnt = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(memory.certificate) == learnt == {f"{name}.weight" for name in memory.layers}


def test_the_weights_of_the_adapters_are_explained(trained):
    model, memory = trained
    assert not memory.certificate.marks
    assert max(memory.certificate.values()) < 1e-10
    assert max(memory.check(model, full=True, progress=False).values()) < 1e-10


@pytest.mark.parametrize(
    "options", [{}, {"lora_dropout": 0.3}, {"use_rslora": True}, {"target_modules": "all-linear"}], ids=str
)
def test_recorded_training_is_bare_training(options, tmp_path):
    recorded, bare = train(adapted(**options), tmp_path), train(adapted(**options))
    for (name, first), (_, second) in zip(recorded.named_parameters(), bare.named_parameters(), strict=True):
        assert torch.equal(first, second), name
    assert max(dualform.open(tmp_path).certificate.values()) < 1e-10


def test_the_parts_of_both_sources_and_the_first_weights_are_the_adapter(trained):
    model, memory = trained
    ledger = memory.ledger("source", progress=False)
    for name in memory.certificate:
        torch.testing.assert_close(ledger.total(name), model.get_parameter(name).detach().double())
        if "lora_B" in name:  # begins with zeros, so all that it holds comes from fine-tuning
            assert not ledger.initial[name].any()


def test_a_mask_takes_a_source_out_of_the_adapters_and_leaves_the_base_alone(trained):
    model, memory = trained
    masked = memory.without("source = 'odd'").load_into(copy.deepcopy(model), progress=False)
    for (name, first), (_, second) in zip(model.named_parameters(), masked.named_parameters(), strict=True):
        assert torch.equal(first, second) != ("lora_" in name), name
    predicted = memory.without("source = 'odd'").predict(model, {"input_ids": tokens()[0]}, progress=False).logits
    torch.testing.assert_close(predicted, logits(masked))
    assert not torch.allclose(predicted, logits(model), atol=1e-4)


def test_a_mask_of_all_visits_gives_the_pretrained_model(trained):
    model, memory = trained
    masked = memory.without("step > 0").load_into(copy.deepcopy(model), progress=False)
    with model.disable_adapter():  # pyright: ignore[reportCallIssue]
        torch.testing.assert_close(logits(masked), logits(model), rtol=0, atol=1e-12)


def test_an_adapter_that_was_masked_can_be_merged(trained):
    model, memory = trained
    masked = memory.without("source = 'odd'").load_into(copy.deepcopy(model), progress=False)
    merged = copy.deepcopy(masked).merge_and_unload()  # pyright: ignore[reportCallIssue]
    assert not any("lora_" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(logits(merged), logits(masked))


def test_the_answer_of_a_model_has_its_rows_and_sources_in_every_adapter(trained):
    model, memory = trained
    spot = memory.attend(model, {"input_ids": tokens()[0][:1]})
    for layer in memory.layers:
        hits = spot.top(2, layer=layer, progress=False, per="slot")
        assert all(hit.source in ("even", "odd") and 0 <= hit.position < LENGTH for hit in hits)
        parts = spot.by("source", layer=layer, progress=False)
        assert parts.residual is not None and parts.residual.abs().max() < 1e-10
        out = spot.output(layer, progress=False)
        assert out.shape[:2] == (1, LENGTH)
