"""``torch.compile`` inside the with-block: recorded as ever, or refused with a sentence."""

import pytest
import torch
from kinds import KINDS
from torch import nn, optim
from torch.nn import functional as F

import dualform
from dualform.errors import UnsupportedLayer

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # whatever the compiler has to say
    pytest.mark.skipif(not hasattr(torch, "compile"), reason="this torch does not compile"),
]


def compiled_training(name: str, path) -> torch.nn.Module:
    kind, random = KINDS[name], torch.Generator().manual_seed(0)
    model = kind.model()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    torch._dynamo.reset()
    with dualform.record(model, optimizer, path, dtype="float64", progress=False) as tape:
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(4):
            label = torch.randint(3, (kind.examples,), generator=random)
            tape.note(label=label)
            F.cross_entropy(compiled(kind.inputs(random)), label).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", ["linear", "conv2d", "embedding, tied", "lstm"])
def test_what_is_compiled_inside_is_recorded(name, tmp_path):
    model = compiled_training(name, tmp_path)
    memory = dualform.open(tmp_path)
    assert not memory.certificate.marks
    assert max(memory.check(model, full=True, progress=False).values()) < 1e-10


def test_a_compiled_layer_with_its_own_forward_is_left_to_the_rest(tmp_path):
    """Compiled code does not tell of the functional call inside it."""

    class Scaled(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = Scaled(11, 5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.embed(x).mean(1))

    torch.manual_seed(0)
    model = Words().double()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    torch._dynamo.reset()
    with dualform.record(model, optimizer, tmp_path, dtype="float64", progress=False):
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(3):
            F.cross_entropy(compiled(torch.randint(11, (4, 6))), torch.tensor([0, 1, 2, 0])).backward()
            optimizer.step()
            optimizer.zero_grad()
    certificate = dualform.open(tmp_path).certificate
    assert certificate.rest == ("embed.weight",) and "torch.compile" in certificate.reasons["embed.weight"]
    assert certificate.worst < 1e-12


def test_compiled_attention_is_refused(tmp_path):
    with pytest.raises(UnsupportedLayer, match=r"MultiheadAttention inside torch\.compile"):
        compiled_training("attention", tmp_path)
