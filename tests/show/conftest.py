"""One small memory that the tests of this folder only read."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dualform.explain import Memory, open_memory
from dualform.models import MLP
from dualform.record import record


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
