"""Models with every attention of the table: they are recorded exactly and can be asked, like any other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_whole
from torch import Tensor, nn

import dualform
from dualform.attention import ATTENTIONS
from dualform.errors import SizeError
from dualform.models import SeriesClassifier, TextClassifier, TransformerLM, ViT

BATCH, STEPS = 5, 4
SMALL: dict[str, Any] = {"width": 8, "heads": 4, "layers": 1, "hidden": 12}
ENDS = torch.tensor([[16], [16], [9], [4], [12]])
SEQUENCES = [name for name in ATTENTIONS if not name.startswith("conv2d")]
ORDERED = [name for name in SEQUENCES if name != "kdgqa"]
"""Those that may be causal."""


def series(name: str) -> tuple[nn.Module, Callable[[], tuple[Any, ...]]]:
    padding = torch.arange(16) >= ENDS if not name.startswith("conv2d") else torch.zeros(5, 16, dtype=torch.bool)
    return SeriesClassifier(3, 16, 3, attention=name, **SMALL), lambda: (torch.randn(BATCH, 16, 3).double(), padding)


def text(name: str) -> tuple[nn.Module, Callable[[], tuple[Any, ...]]]:
    model = TextClassifier(11, 20, 3, attention=name, **SMALL)
    return model, lambda: (torch.randint(11, (BATCH, 16)), torch.arange(16) >= ENDS)


def images(name: str) -> tuple[nn.Module, Callable[[], tuple[Any, ...]]]:
    model = ViT(12, 4, channels=2, classes=3, width=8, heads=4, layers=1, ratio=1.5, attention=name)
    return model, lambda: (torch.randn(BATCH, 2, 12, 12).double(),)


def language(name: str) -> tuple[nn.Module, Callable[[], tuple[Any, ...]]]:
    model = TransformerLM(7, 12, attention=name, tied=True, **SMALL)
    return model, lambda: (torch.randint(7, (BATCH, 12)),)


KINDS = {
    "series": (series, torch.optim.SGD, list(ATTENTIONS)),
    "text": (text, torch.optim.AdamW, SEQUENCES),
    "images": (images, torch.optim.AdamW, list(ATTENTIONS)),
    "language": (language, torch.optim.SGD, ORDERED),
}
RUNS = [(kind, name) for kind, (_, _, names) in KINDS.items() for name in names]


def loss_of(model: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    output = model(*inputs)
    if output.ndim == 3:
        return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), inputs[0][:, 1:].flatten())
    return nn.functional.cross_entropy(output, y)


WITH = {name: [kind for kind, other in RUNS if other == name] for name in ATTENTIONS}
QUICK = {(kinds[i % len(kinds)], name) for i, (name, kinds) in enumerate(WITH.items())}
"""Each attention in one of the models."""


@pytest.mark.parametrize(
    ("kind", "name"), [pytest.param(*run, marks=() if run in QUICK else pytest.mark.slow) for run in RUNS]
)
def test_every_model_with_every_attention_is_recorded_exactly_and_can_be_asked(kind, name, tmp_path):
    make, optimiser, _ = KINDS[kind]
    torch.manual_seed(0)
    model, draw = make(name)
    model = model.double()
    optimizer = optimiser(model.parameters(), lr=0.05)
    with dualform.record(model, optimizer, tmp_path / "memory", dtype="float64", progress=False) as tape:
        for step in range(STEPS):
            y = torch.arange(BATCH) % 3
            tape.note(index=BATCH * step + torch.arange(BATCH), label=y)
            loss_of(model, draw(), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "memory")
    assert memory.certificate.marks == ()
    assert {part.rpartition(".")[0].rpartition(".")[2] for part in memory.certificate.rest} <= {
        "norm",
        "norm1",
        "norm2",
        "",
        *(("attn",) if name == "dgqa" else ()),  # its allocation
    }
    for parameter, error in memory.certificate.items():
        # the bias of keys cancels in a softmax, so what there is of its gradient is rounding
        noise = "attn.key" in parameter and parameter.endswith("bias")
        assert error < (1e-5 if noise else 1e-9), parameter
    spot = memory.attend(model, tuple(each[:2] for each in draw()))
    for layer in memory.layers:
        assert_whole(spot.by("label", layer=layer))
    assert any(".attn." in layer for layer in memory.layers)


def test_what_is_padded_does_not_count():
    for name in (name for name in SEQUENCES if name not in ("sparse-sh", "sparse-bn+sh")):
        # there a window at the end is seen where any of its tokens is, though that one is padded
        torch.manual_seed(0)
        options = {"window": 3, "stride": 4} if "sparse" in name else {}
        model = SeriesClassifier(3, 16, 3, attention=name, **SMALL, **options).double().eval()
        x = torch.randn(2, 16, 3).double()
        padding = torch.arange(16) >= torch.tensor([[10], [10]])
        torch.testing.assert_close(model(x, padding), model(x[:, :10]), msg=name)


def test_the_future_does_not_leak_out_of_a_language_model():
    for name in ORDERED:
        model = TransformerLM(7, 12, attention=name, **SMALL).double().eval()
        tokens = torch.randint(7, (1, 12))
        other = tokens.clone()
        other[:, 8:] = (other[:, 8:] + 1) % 7
        torch.testing.assert_close(model(tokens)[:, :8], model(other)[:, :8])


def test_parameters_are_as_many_as_they_should_be():
    """A 2-layer encoder of width 64: BN and SH add none, a convolution 9 for each number of a token and layer.
    DeiT-tiny's shape has 5.7 million."""
    plain = count(TextClassifier(32, 100, 10))
    same = [name for name in SEQUENCES if not any(part in name for part in ("conv", "gqa", "mdha", "relative"))]
    assert all(count(TextClassifier(32, 100, 10, attention=name)) == plain for name in same)
    assert count(TextClassifier(32, 100, 10, attention="gqa", groups=1)) == plain - 2 * 2 * 32 * 65
    assert count(TextClassifier(32, 100, 10, attention="conv1d")) == plain + 2 * 3 * 64
    assert count(TextClassifier(32, 100, 10, attention="mdha")) == plain + 2 * 3 * 4 * 32
    assert count(SeriesClassifier(1, 64, 10, attention="conv2d")) == count(SeriesClassifier(1, 64, 10)) + 2 * 9 * 64
    with torch.device("meta"):
        assert count(ViT(224, 16, classes=1000)) == 5_717_416


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_sequences_that_are_too_long_are_refused():
    with pytest.raises(SizeError, match="21 tokens is longer than the 20 positions"):
        TextClassifier(5, 20, 2, **SMALL)(torch.zeros(1, 21, dtype=torch.int64))
    with pytest.raises(SizeError, match="9 tokens is longer than the 8 positions"):
        TransformerLM(5, 8, **SMALL)(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(SizeError, match="size=30 must be a multiple of patch=4"):
        ViT(30, 4, classes=2)
