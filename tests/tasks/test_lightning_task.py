"""Lightning modules: what their own ``training_step`` returned is run again bit for bit."""

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualform
from dualform.errors import QueryError
from dualform.tasks import lightning

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
L: Any = pytest.importorskip(
    next((name for name in PACKAGES if find_spec(name.partition(".")[0])), PACKAGES[0]),
    reason="lightning is not installed (extra: lightning)",
)

from dualform.record.lightning import RecordCallback  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk", "quiet")

N, D, C = 40, 6, 4


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in (*PACKAGES, *(f"{name}.utilities.rank_zero" for name in PACKAGES))]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


class Classifier(L.LightningModule):
    """With batch normalisation, class weights and a log."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(D, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, C))
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.3, 1.7, 0.9, 2.1]), label_smoothing=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.criterion(self(batch[0]), batch[1])
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return optim.AdamW(self.parameters(), lr=1e-2)


class WithLosses(Classifier):
    """Says itself what each example's share is."""

    def losses(self, batch: Any) -> Tensor:
        hidden = self.net[:3](batch[0])
        return F.cross_entropy(self.net[3](hidden), batch[1], reduction="none") / len(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.losses(batch).sum()


class Bypassing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.criterion(self.net(batch[0]), batch[1])


def loader() -> DataLoader:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(N, D), torch.randint(C, (N,)), torch.arange(N))
    return DataLoader(data, batch_size=7, shuffle=True)


def fitted(path: Any, module: Any, **settings: Any) -> tuple[dualform.Memory, DataLoader]:
    data = loader()
    callback = RecordCallback(path, columns=lambda batch: {"index": batch[2]}, progress=False)
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=2, callbacks=[callback], enable_model_summary=False, **options, **settings)
    trainer.fit(module, data)
    return dualform.open(path), data


def assert_same(run: Any, module: Any) -> None:
    check = run.check()
    assert check.exact, str(check)
    for again, parameter in zip(run.retrain().parameters(), module.parameters(), strict=True):
        assert torch.equal(again, parameter)


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.3}])
def test_the_module_s_own_training_step_runs_again_bit_for_bit(settings, tmp_path):
    module = Classifier()
    memory, data = fitted(tmp_path / "memory", module, **settings)
    run = memory.replay(module, *lightning(module, data, loss=module.criterion))
    assert_same(run, module)
    values = run.influence(torch.randn(2, D)).values
    assert values.shape == (2, N) and values.isfinite().all() and values.abs().max() > 0
    assert "log" not in vars(module)


def test_a_module_may_say_what_each_share_is(tmp_path):
    module = WithLosses()
    memory, data = fitted(tmp_path / "memory", module, accumulate_grad_batches=2)
    assert_same(memory.replay(module, *lightning(module, data.dataset)), module)
    fresh = WithLosses()  # has no trainer that knows
    assert_same(memory.replay(fresh, *lightning(fresh, data.dataset, accumulate=2)), module)
    assert not memory.replay(fresh, *lightning(fresh, data.dataset)).check().exact


def test_what_is_required_is_said(tmp_path):
    data, module = loader(), Classifier()
    other = lightning(module, data)
    with pytest.raises(QueryError, match=r"but the loss of the loop is .* must backpropagate loss="):
        other.losses(module, other.data(torch.arange(5)))
    bypassing = Bypassing()
    task = lightning(bypassing, data, loss=bypassing.criterion)
    with pytest.raises(QueryError, match=r"called self\(…\) 0 times.*method losses\(batch\)"):
        task.losses(bypassing, task.data(torch.arange(5)))
    with pytest.raises(QueryError, match="neither training_step nor losses"):
        lightning(nn.Linear(2, 2), data)
