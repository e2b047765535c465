"""Models built from our attention layers can be recorded and asked."""

import pytest
import torch
from helpers import assert_whole
from torch import Tensor, nn

import dualform
from dualform.attention import ATTENTIONS, build


class Classifier(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.embedding, self.attention, self.out = nn.Linear(3, 8), build(name, 8, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        return self.out((x + self.attention(x)).mean(1))


@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_member_is_recorded_exactly_and_can_be_asked(name, optimiser, tmp_path):
    torch.manual_seed(0)
    model = Classifier(name).double()
    optimizer = optimiser(model.parameters(), lr=0.05)
    with dualform.record(model, optimizer, tmp_path / "memory", dtype="float64", progress=False) as tape:
        for step in range(12):
            x, y = torch.randn(5, 9, 3, dtype=torch.float64), torch.arange(5) % 3
            tape.note(index=5 * step + torch.arange(5), label=y)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = dualform.open(tmp_path / "memory")
    assert memory.certificate.rest == () and memory.certificate.marks == ()
    for parameter, error in memory.certificate.items():
        # the bias of keys cancels in a softmax, so what there is of its gradient is rounding
        noise = "attention.key." in parameter and parameter.endswith("bias")
        assert error < (1e-5 if noise else 1e-10), parameter
    spot = memory.attend(model, torch.randn(2, 9, 3, dtype=torch.float64))
    for layer in memory.layers:
        assert_whole(spot.by("label", layer=layer))
    assert any(layer.startswith("attention.") for layer in memory.layers)
