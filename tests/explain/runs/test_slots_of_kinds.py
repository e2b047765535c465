"""Every kind of layer: a run that kept no slots answers as a memory that kept them, and it all adds up."""

from typing import Any

import pytest
import torch
from kinds import KINDS
from test_slots import assert_equal
from torch import Tensor, nn, optim
from torch.nn import functional as F

import dualform
from dualform.explain import Memory

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

BATCHES, EPOCHS = 3, 3
QUICK = ("linear", "conv2d, grouped", "embedding, padded", "lstm, deep", "attention, across")
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in KINDS]


class Training:
    """A training on a few fixed batches, with all slots or with no more than a log of the run."""

    def __init__(self, name: str, path: Any, keep: Any) -> None:
        self.kind, random = KINDS[name], torch.Generator().manual_seed(3)
        self.x = [self.kind.inputs(random) for _ in range(BATCHES)]
        self.y = torch.randint(3, (BATCHES, self.kind.examples), generator=random)
        self.model = self.kind.model()
        optimizer = optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        self.batch_dim = {"body": self.kind.batch_dim} if self.kind.batch_dim else None
        with dualform.record(
            self.model, optimizer, path, dtype="float64", keep=keep, batch_dim=self.batch_dim, progress=False,
            **self.kind.options,
        ) as tape:  # fmt: skip
            for _ in range(EPOCHS):
                for number in torch.randperm(BATCHES).tolist():
                    index = number * self.kind.examples + torch.arange(self.kind.examples)
                    tape.note(index=index, label=self.y[number], part=["ab"[int(i) % 2] for i in index])
                    self.losses(self.model, self.data(index)).sum().backward()
                    nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
        self.memory = dualform.open(path)

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") / len(batch[1])

    def data(self, index: Tensor) -> tuple[Tensor, Tensor]:
        number = int(index[0]) // self.kind.examples
        return self.x[number], self.y[number]

    def answers(self, memory: Memory) -> dict[str, Tensor]:
        """Every question of a memory, for every layer."""
        x, found = self.x[0], {}
        spot = memory.attend(self.model, x)
        masked, earlier = memory.without("part = 'a' and step <= 5"), memory.at(4)
        for layer in memory.layers:
            hits, groups = spot.top(4, layer=layer, per="slot"), spot.by("label", layer=layer)
            parts = {
                "top": hits.contribution,
                "top visits": hits.visits,
                "by": groups.values,
                "timeline": spot.timeline("part", layer=layer, stretches=3).values,
                "output": spot.output(layer),
                "earlier": earlier.attend(self.model, x).top(2, layer=layer, per="slot").contribution,
                "masked": masked.attend(self.model, x).top(2, layer=layer, per="slot").contribution,
            }
            found |= {f"{layer}: {name}": part for name, part in parts.items()}
        found |= {f"weights at step 4: {name}": tensor for name, tensor in earlier.weights().items()}
        found |= {f"ledger: {name}": part for name, part in memory.ledger("part")["a"].items()}
        found |= {f"check: {n}": torch.tensor(e) for n, e in memory.check(self.model, full=True).items()}
        return found


@pytest.mark.parametrize("name", NAMES)
def test_answers_of_a_replayed_run_are_those_of_kept_slots(name, tmp_path):
    kept, bare = Training(name, tmp_path / "kept", "slots"), Training(name, tmp_path / "bare", "replay")
    torch.testing.assert_close(list(kept.model.parameters()), list(bare.model.parameters()), rtol=0, atol=0)
    with bare.memory.replay(bare.model, bare.losses, bare.data) as run:
        assert run.check().exact
        memory = run.slots("100 MB", batch_dim=bare.batch_dim, progress=False)
        assert memory.layers == kept.memory.layers and set(bare.kind.layers) <= set(memory.layers)
        assert memory.visits.equals(kept.memory.visits) and memory.certificate == kept.memory.certificate
        assert_equal(bare.answers(memory), kept.answers(kept.memory))


@pytest.mark.parametrize("name", NAMES)
def test_the_direct_answer_of_a_run_is_the_sum_of_what_the_ledger_has(name, tmp_path):
    """Σ over parameters of ⟨∂φ/∂W, what the example put into W⟩; nothing in these layers mixes rows."""
    training = Training(name, tmp_path / "kept", "slots")
    if training.kind.batch_dim:
        pytest.skip("a run takes the first axis of its inputs for that of the examples")
    x, model = training.x[1], training.model.eval()
    run = training.memory.replay(model, training.losses, training.data)
    direct = run.direct(x, target=lambda output: output[:, 0], progress=False)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.scale_grad_by_freq = False  # for the derivative itself
    parameters = dict(model.named_parameters())
    slopes = [torch.autograd.grad(v, list(parameters.values()), retain_graph=True) for v in model(x)[:, 0]]
    ledger = training.memory.ledger("index")
    for place, example in enumerate(direct.index.tolist()):
        put = [ledger[example][parameter] for parameter in parameters]
        expected = torch.stack(
            [torch.stack([(a * b).sum() for a, b in zip(s, put, strict=True)]).sum() for s in slopes]
        )
        torch.testing.assert_close(direct.values[:, place], expected, rtol=1e-6, atol=1e-12)
