"""One small memory of pictures, and every answer that it gives."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
from dualform.explain import Memory, ReplayedRun
from dualform.models import MLP

EVIL = "<b>bold</b>\x1b[31m\u202e"
"""A noted value that would write bold, colour a terminal and turn the direction of a line."""


@dataclass(frozen=True)
class Pictures:
    path: Path
    model: nn.Module
    images: Tensor
    x: Tensor
    labels: Tensor
    survey_path: Path

    @property
    def memory(self) -> Memory:
        return dualform.open(self.path)

    @property
    def run(self) -> ReplayedRun:
        return self.memory.replay(MLP(64, 8, 3), *dualform.tasks.classification(self.x, self.labels))

    def answers(self) -> dict[str, Any]:
        """Every kind of answer."""
        spot, run, test = self.memory.attend(self.model, self.x[:3]), self.run, self.x[:2]
        survey = dualform.open(self.survey_path)
        return {
            "examples": spot.top(8),
            "visits": spot.top(8, per="visit"),
            "slots": spot.top(8, layer="fc1", per="slot", score="weight"),
            "places": self.memory.attend(self.model, self.x[:1]).places(spot.top(8)[0]),
            "groups": spot.by("label"),
            "groups-of-layer": spot.by("source", layer="fc2"),
            "timeline": spot.timeline("label")[0],
            "certificate": self.memory.certificate,
            "influence": run.influence(test),
            "comparison": run.compare(test, without="label = 2"),
            "check": run.check(),
            "scores": survey.scores(self.model, test),
            "memory": self.memory,
            "masked": self.memory.without("label = 2").at(12),
            "survey": survey,
            "spotlight": spot,
            "ledger": self.memory.ledger("label"),
            "suspects": self.memory.suspects(self.model, self.x, self.labels, classes=["a", EVIL, "c"]),
        }


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> Pictures:
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    images = torch.randint(0, 60, (60, 8, 8), generator=draw, dtype=torch.uint8)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[2 * label + 1 : 2 * label + 3] = 220
    x = images.flatten(1) / 255
    torch.manual_seed(0)
    model = MLP(64, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    folder = tmp_path_factory.mktemp("displays")
    with dualform.record(model, optimizer, folder / "memory", dtype="float32", progress=False) as tape:
        for step in range(24):
            index = torch.arange(10 * step, 10 * step + 10) % 60
            tape.note(index=index, label=labels[index], source=EVIL if step % 2 else "web")
            F.cross_entropy(model(x[index]), labels[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    dualform.survey(
        model, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1], reduction="none"),
        lambda i: (x[i], labels[i]), folder / "survey", examples=60, columns={"label": labels}, progress=False,
    )  # fmt: skip
    return Pictures(folder / "memory", model, images, x, labels, folder / "survey")
