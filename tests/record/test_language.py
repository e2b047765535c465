"""Language models in realistic training: a transformer with Hugging Face's Trainer, an LSTM with Adam."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

import dualform
from dualform import data
from dualform.engine.preconditioned import SlotGradients
from dualform.errors import DataNotFound


def text(read: Callable[[], str]) -> bytes:
    """A real text as bytes, or a reason to skip."""
    try:
        return read().encode()
    except DataNotFound as error:
        pytest.skip(str(error))


def passages(source: bytes, length: int, count: int) -> Tensor:
    """Stretches of a text, evenly over it."""
    ids = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    begins = torch.linspace(0, len(ids) - length - 1, count).long()
    return torch.stack([ids[begin : begin + length] for begin in begins.tolist()])


# ---------------------------------------------------------------- a transformer

LENGTH, EACH = 24, 48


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    from dualform.record.hf import RecordCallback

    sources = {"aesop": text(data.aesop), "wikitext": text(lambda: data.wikitext2("valid"))}
    rows = [
        {"input_ids": row, "labels": row, "source": source, "index": f"{source}-{i}"}
        for source, content in sources.items()
        for i, row in enumerate(passages(content, LENGTH, EACH))
    ]
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": LENGTH, "vocab_size": 256}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    path = tmp_path_factory.mktemp("gpt2")
    arguments = transformers.TrainingArguments(
        output_dir=str(path / "out"), max_steps=24, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        max_grad_norm=1.0, learning_rate=3e-3, weight_decay=0.01, optim="adamw_torch", use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, seed=0,
    )  # fmt: skip
    callback = RecordCallback(
        path / "memory", columns=("source", "index"), dtype="float32", overwrite=True, progress=False
    )
    transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train()
    return model, dualform.open(path / "memory"), rows


def test_every_linear_map_of_a_transformer_is_recorded_exactly(gpt2):
    model, memory, _ = gpt2
    assert memory.step == 24
    maps = {
        name for name, module in model.named_modules() if type(module).__name__ in ("Conv1D", "Linear", "Embedding")
    }
    assert set(memory.layers) == maps and len(maps) == 2 * 4 + 3
    assert set(memory.certificate.rest) == {name for name, _ in model.named_parameters() if "ln_" in name}
    assert not memory.certificate.marks
    assert max(memory.certificate.values()) < 1e-4
    assert max(memory.check(model, full=True, progress=False).values()) < 1e-4


def test_a_prompt_has_its_top_passages_and_its_sources(gpt2):
    model, memory, rows = gpt2
    model.eval()
    prompt = torch.stack([row["input_ids"] for row in (rows[3], rows[-5])])
    spot = memory.attend(model, {"input_ids": prompt})
    names = {row["index"] for row in rows}
    layer = "transformer.h.1.mlp.c_proj"
    hits = spot.top(3, layer=layer, progress=False, per="slot")
    for hit in hits[0]:
        assert hit.index in names and hit.source in ("aesop", "wikitext") and 0 <= hit.position < LENGTH
    groups = spot.by("source", layer=layer, progress=False)
    assert set(groups.names) == {"aesop", "wikitext"}
    assert groups.residual is not None and groups.residual.abs().max() < 1e-3
    tied = spot.by("source", layer="lm_head", progress=False)  # with what the embedding put into the same weight
    assert tied.residual is not None and tied.residual.abs().max() < 1e-2
    ledger = memory.ledger("source", progress=False)
    weight = "transformer.h.0.attn.c_attn.weight"
    torch.testing.assert_close(ledger.total(weight).float(), model.get_parameter(weight).detach(), rtol=0, atol=1e-5)
    without = memory.without("source = 'wikitext'").predict(model, {"input_ids": prompt}, progress=False).logits
    assert not torch.allclose(without, model(input_ids=prompt).logits, atol=1e-2)


# ---------------------------------------------------------------- an LSTM


class CharLSTM(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(256, 24), nn.LSTM(24, width, batch_first=True)
        self.out = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(x))[0])


@pytest.fixture(scope="module")
def lstm(tmp_path_factory):
    """The reference code's own optimiser: Adam with weight decay 1e-7, clipped at 1."""
    rows = passages(text(data.aesop), 33, 60 * 8).unflatten(0, (60, 8))
    torch.manual_seed(0)
    model = CharLSTM()
    optimizer = optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-7)
    path = tmp_path_factory.mktemp("lstm")
    with dualform.record(model, optimizer, path, dtype="float32", progress=False) as tape:
        for i, batch in enumerate(rows):
            tape.note(passage=torch.arange(8) + 8 * i)
            F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model, dualform.open(path), rows


def test_an_lstm_under_adam_is_explained(lstm):
    model, memory, rows = lstm
    assert memory.layers == ("embed", "lstm", "out") and not memory.certificate.rest
    assert max(memory.certificate.values()) < 1e-4
    assert max(memory.check(model, full=True, progress=False).values()) < 1e-4
    spot = memory.attend(model, rows[0][:2, :-1])
    hits = spot.top(3, layer="lstm", position=-1, progress=False, per="slot")
    assert hits.positions.max() < 32 and (hits.visits >= 0).all()


@pytest.mark.parametrize("name", ["lstm.weight_hh_l0", "lstm.weight_ih_l0", "out.weight"])
def test_no_scalar_for_each_step_explains_adam(name, lstm):
    """The negative control: even the best ones leave most of the change of the weights unexplained."""
    model, memory, _ = lstm
    gradients = SlotGradients(memory.store, [name])
    steps = torch.stack([gradients.total(s)[name].flatten() for s in range(1, memory.step + 1)], 1).double()
    change = (model.get_parameter(name).detach() - memory.store.initial(name)).flatten().double().unsqueeze(1)
    best = torch.linalg.lstsq(steps, change).solution
    assert (steps @ best - change).norm() / change.norm() > 0.5
