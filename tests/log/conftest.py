"""A small memory, and answers to log."""

from dataclasses import dataclass
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from dualform.explain import Memory, open_memory
from dualform.record import record


@dataclass(frozen=True)
class Logged:
    memory: Memory
    tables: dict[str, Any]


@pytest.fixture(scope="session")
def logged(tmp_path_factory) -> Logged:
    torch.manual_seed(1)
    path, model = tmp_path_factory.mktemp("log") / "memory", nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    with record(model, optimizer, path, progress=False) as tape:
        for index in torch.arange(20).split(5):
            tape.note(index=index, label=y[index], source=["a|b", "c"] * 2 + ["d"])
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = open_memory(path)
    spot = memory.attend(model, x[:2])
    mixed = pd.DataFrame({"what": ["a", 3, None], "score": [0.5, 1.5, 2.5]})
    tables = {"top": spot.top(3, layer="2", per="slot"), "by label": spot.by("label", layer="2"), "mixed": mixed}
    return Logged(memory, tables)
