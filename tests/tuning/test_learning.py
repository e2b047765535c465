"""A class that a middle layer knows and the last class token does not."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualform.models import ViT
from dualform.tuning import Probe, Tuned, VisualQueryTuning, trained_parameters


def accuracy_of(model: Tuned, x: Tensor, y: Tensor, steps: int, rate: float) -> float:
    """Learn the first three quarters, and see the rest."""
    cut = len(x) * 3 // 4
    optimizer = torch.optim.Adam(trained_parameters(model).values(), lr=rate)
    for step in range(steps):
        index = torch.randperm(cut, generator=torch.Generator().manual_seed(step))[:64]
        F.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float((model.eval()(x[cut:]).argmax(1) == y[cut:]).float().mean())


@pytest.mark.slow
def test_queries_read_what_the_class_token_forgets():
    """Random pictures, a random frozen backbone, and the sign of a direction of the mean token that the third layer is
    given. Full fine-tuning is told for reference (``-s`` shows it); nothing depends on it.
    """
    torch.manual_seed(0)
    vit = ViT(16, 4, classes=2, width=32, heads=4, layers=4)
    for each in vit.parameters():
        if each.ndim > 1:
            nn.init.normal_(each, std=0.25)
    vit.eval()
    x = torch.randn(3200, 3, 16, 16)
    with torch.no_grad():
        tokens = vit.embed(x)
        for block in list(vit.blocks)[:2]:
            tokens = block(tokens)
        block = vit.blocks[2]
        score = block.norm1(tokens).mean(1) @ torch.randn(32)  # pyright: ignore[reportCallIssue]
        y = (score > score.median()).long()
    probe = accuracy_of(Probe(vit, 2), x, y, 500, 0.02)
    one = accuracy_of(VisualQueryTuning(vit, 2, tokens=1), x, y, 500, 0.02)
    still = VisualQueryTuning(vit, 2, tokens=1)
    still.queries.requires_grad_(False)
    untrained = accuracy_of(still, x, y, 500, 0.02)
    five = accuracy_of(VisualQueryTuning(vit, 2, tokens=5), x, y, 500, 0.02)
    learning = copy.deepcopy(vit).requires_grad_(True)
    full = accuracy_of(Probe(learning, 2, detach_backbone=False), x, y, 500, 1e-3)
    print(
        f"linear probe {probe:.2f}, one query {one:.2f} (untrained {untrained:.2f}), five {five:.2f}, "
        f"full fine-tuning {full:.2f}"
    )
    assert min(one, five) > probe + 0.1 and min(one, five) > 0.8 and one > untrained + 0.03
