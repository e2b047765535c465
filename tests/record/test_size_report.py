"""What is announced is what it takes."""

import re

import pytest
import torch
from helpers import mlp
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform.record.shards import shard_builder as shelves
from dualform.record.shards import size_report as sizes
from dualform.record.slots import slot_buffers as stage

UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def layers(d: int = 96) -> nn.Module:
    return mlp(d, 128, 10).float()


def pictures() -> nn.Module:
    """Convolutions with many rows a visit, normalisation in the rest, a layer with one row."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(288, 10),
    )  # fmt: skip


def adapted() -> nn.Module:
    """A small Llama with adapters at every linear layer."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))


def losses(model: nn.Module, kind: str, steps: int, batch: int):
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        label = torch.randint(10, (batch,), generator=random)
        if kind == "adapted":
            tokens = torch.randint(50, (batch, 12), generator=random)
            yield model(input_ids=tokens, labels=tokens).loss, label
        else:
            shape = (96,) if kind == "layers" else (1, 10, 10)
            yield F.cross_entropy(model(torch.randn(batch, *shape, generator=random)), label), label


NETWORKS = {"layers": layers, "pictures": pictures, "adapted": adapted}


def recorded(path, kind: str, steps: int, batch: int = 16, known: bool = True) -> dualform.Tape:
    model = NETWORKS[kind]()
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    tape = dualform.record(model, optimizer, path)
    tape.steps_ahead = steps if known else None
    with tape:
        for loss, label in losses(model, kind, steps, batch):
            tape.note(label=label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return tape


def told(text: str, pattern: str) -> float:
    found = re.search(pattern + r" (?:about )?([\d.,]+) (bytes|kB|MB|GB)", text)
    assert found, text
    return float(found[1].replace(",", "")) * UNITS[found[2]]


def size_of(path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind == "adapted" else ()) for kind in NETWORKS]
)
def test_what_is_announced_is_what_it_takes(kind, tmp_path, monkeypatch, capsys):
    """With shards of a megabyte, so that there are many, and weights and optimiser state are kept between them."""
    for module in (stage, shelves):
        monkeypatch.setattr(module, "SHARD_BYTES", 1 << 20)
    steps = 200
    recorded(tmp_path, kind, steps, batch=64 if kind == "layers" else 16)
    text = " ".join(capsys.readouterr().err.split())
    taken = size_of(tmp_path)
    assert told(text, f"the {steps} steps of this training take") == pytest.approx(taken, rel=0.05)
    manifest = dualform.open(tmp_path).store.manifest
    assert len(manifest.shards) > 5
    once = size_of_last_weights(manifest) + manifest.init.bytes
    assert told(text, "a visit takes") == pytest.approx((taken - once) / manifest.visits, rel=0.05)


def size_of_last_weights(manifest) -> int:
    return sum(p.size * 4 for p in manifest.parameters if p.by_slots)


def test_where_nobody_knows_the_length_the_size_is_told_after_a_hundred_steps(tmp_path, capsys):
    recorded(tmp_path, "layers", sizes.GROWN + 5, known=False)
    text = " ".join(capsys.readouterr().err.split())
    assert text.count("dualform: ") == 4 and "began without a warm-up" in text and "of this training" not in text
    assert told(text, "the memory takes") == pytest.approx(size_of(tmp_path) * 100 / 105, rel=0.05)
    manifest = dualform.open(tmp_path).store.manifest
    more = (size_of(tmp_path) - size_of_last_weights(manifest) - manifest.init.bytes) * 1000 / 105
    assert told(text, "after 100 steps, and") == pytest.approx(more, rel=0.15)  # no weights were kept in between yet


def test_a_ledger_says_that_it_keeps_no_slots(tmp_path, capsys):
    model = nn.Sequential(nn.Linear(3, 2))
    with dualform.record(model, optim.SGD(model.parameters(), lr=0.1), tmp_path, keep="ledger", by="label"):
        text = " ".join(capsys.readouterr().err.split())
    assert "recording 1 layer (0) to" in text and "no slots are kept" in text and "0 bytes" not in text


def test_silence_is_kept_where_it_is_asked_for(tmp_path, capsys):
    model = layers()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path, progress=False):
        for loss, _ in losses(model, "layers", sizes.GROWN + 2, 2):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not capsys.readouterr().err
