"""Images in realistic training: a convolutional network with Lightning, AdamW, accumulation and clipping."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_clean, assert_whole, close, state_of
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

import dualform
from dualform import data
from dualform.explain import Ledger

L: Any = pytest.importorskip("lightning.pytorch", reason="lightning is not installed (extra: lightning)")

from dualform.record.lightning import RecordCallback  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

BATCH, TOGETHER, EPOCHS = 8, 2, 2  # two batches make a step
EACH, ASKED = 256, 3  # images of each source, to train on and to ask about
STEPS, MIDDLE = 2 * EACH * EPOCHS // (BATCH * TOGETHER), 30
RATE, DECAY = 1e-2, 0.1


def warm(step: int) -> float:
    """How much of the learning rate counts: all of it after ten steps."""
    return min(1, (step + 1) / 10)


KEPT = prod(1 - RATE * warm(step) * DECAY for step in range(STEPS))
"""What weight decay leaves of the first weights."""

LAYERS = {"conv1": (8, 8), "conv2": (4, 4), "fc1": (), "fc2": ()}
"""Each layer, and the pixels of its output."""

BAR = 1e-4
"""Of the certificate: trained and remembered in float32."""

# ---------------------------------------------------------------- images, network, training


def images() -> dict[str, tuple[Tensor, Tensor]]:
    """Handwritten digits of 8 × 8 pixels: scikit-learn's are so, those of MNIST are shrunk. Both come in packages."""
    x, y = import_module("sklearn.datasets").load_digits(return_X_y=True)
    large, labels = data.digits()
    return {
        "uci": (torch.tensor(x).float().reshape(-1, 1, 8, 8) / 16, torch.tensor(y).long()),
        "mnist": (F.avg_pool2d(large[:, None, 2:26, 2:26] / 255, 3), labels),
    }


def rows(source: str, x: Tensor, y: Tensor) -> list[dict[str, Any]]:
    """Some images of a source, each with its name."""
    chosen = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[: EACH + ASKED].tolist()
    return [{"image": x[i], "label": int(y[i]), "source": source, "index": f"{source}-{i}"} for i in chosen]


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        # no bias before the normalisation, which takes it away: its gradient would be nothing but rounding
        self.conv1, self.norm = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 12, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(12 * 2 * 2, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.conv1(x)).relu(), 2)
        x = F.max_pool2d(self.conv2(x).relu(), 2)
        return self.fc2(self.fc1(x.flatten(1)).relu())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["image"]), batch["label"])

    def configure_optimizers(self) -> Any:
        optimizer = optim.AdamW(self.parameters(), lr=RATE, weight_decay=DECAY)
        return [optimizer], [{"scheduler": optim.lr_scheduler.LambdaLR(optimizer, warm), "interval": "step"}]


def untrained() -> Digits:
    torch.manual_seed(0)
    return Digits()


def fit(train: list[dict[str, Any]], *callbacks: Any) -> Digits:
    model = untrained()
    order = torch.Generator().manual_seed(1)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, accumulate_grad_batches=TOGETHER, gradient_clip_val=1.0,
        callbacks=list(callbacks), logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
    )  # fmt: skip
    trainer.fit(model, DataLoader(train, BATCH, shuffle=True, generator=order))  # pyright: ignore[reportArgumentType]
    return model.eval()


@dataclass(frozen=True)
class Trained:
    """A recorded training, its images by their names, others to ask about, and the checkpoint of a step between."""

    model: Digits
    memory: dualform.Memory
    train: Mapping[str, dict[str, Any]]
    asked: Tensor
    checkpoint: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Trained:
    path = tmp_path_factory.mktemp("images")
    sources = [rows(source, x, y) for source, (x, y) in images().items()]
    train = {row["index"]: row for source in sources for row in source[:EACH]}
    record = RecordCallback(path / "memory", columns=("index", "label", "source"), dtype="float32", progress=False)
    save = import_module("lightning.pytorch.callbacks").ModelCheckpoint(
        dirpath=path, filename="{step}", every_n_train_steps=MIDDLE, save_top_k=-1
    )
    model = fit(list(train.values()), record, save)
    asked = torch.stack([row["image"] for source in sources for row in source[EACH:]])
    return Trained(model, dualform.open(path / "memory"), train, asked, path / f"step={MIDDLE}.ckpt")


# ---------------------------------------------------------------- what is recorded


def test_every_convolution_and_linear_layer_is_recorded_and_only_the_normalisation_is_rest(run):
    assert run.memory.step == STEPS and len(run.memory.visits) == STEPS * TOGETHER * BATCH
    assert run.memory.layers == tuple(LAYERS)
    assert set(run.memory.certificate.rest) == {name for name in run.model.state_dict() if name.startswith("norm.")}
    assert set(run.memory.certificate) == set(run.model.state_dict()) - set(run.memory.certificate.rest)
    assert_clean(run.memory)


def test_the_memory_rebuilds_every_parameter(run):
    assert run.memory.certificate.worst <= BAR
    assert run.memory.check(run.model, full=True, progress=False).worst <= BAR
    assert run.memory.is_of(run.model)


def test_recorded_training_is_the_unrecorded_one(run):
    bare, recorded = state_of(fit(list(run.train.values()))), state_of(run.model)
    assert bare.keys() == recorded.keys()
    assert all(torch.equal(bare[name], recorded[name]) for name in bare)


def test_a_step_between_is_the_checkpoint_that_was_saved_there(run):
    then, saved = run.memory.at(MIDDLE), Digits.load_from_checkpoint(run.checkpoint)
    certificate, weights = then.check(saved, full=True, progress=False), then.weights(progress=False)
    assert certificate.worst <= BAR
    assert then.is_of(saved) and not run.memory.is_of(saved)
    for name, tensor in state_of(saved).items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5 if name in certificate else 0)


# ---------------------------------------------------------------- what a prediction is made of


def patches(x: Tensor) -> Tensor:
    """What the first layer sees at each pixel: (image, pixel, 9)."""
    return F.unfold(x, 3, padding=1).mT


def test_a_prediction_has_its_top_images(run):
    hits = run.memory.attend(run.model, run.asked).top(5, layer="fc2", progress=False, per="slot")
    assert hits.contribution.shape == (len(run.asked), 5)
    for image_hits in (hits[i] for i in range(len(hits))):
        for hit in image_hits:
            image = run.train[hit.index]
            assert (hit.label, hit.source) == (image["label"], image["source"]) and hit.contribution > 0
        assert (image_hits.contribution.diff() <= 0).all()


def test_a_slot_of_a_convolution_is_a_pixel_of_its_image(run):
    spot = run.memory.attend(run.model, run.asked)
    hits = {layer: spot.top(20, layer=layer, progress=False, per="slot") for layer in ("conv1", "conv2")}
    for layer, layer_hits in hits.items():
        assert layer_hits.positions.min() >= 0 and layer_hits.positions.max() < torch.Size(LAYERS[layer]).numel()
    for i, query in enumerate(patches(run.asked)):
        for hit in hits["conv1"][i]:  # the key is what that image shows around that pixel
            key = patches(run.train[hit.index]["image"].unsqueeze(0))[0, hit.position]
            assert hit.weight == pytest.approx(float((query @ key).sum()), rel=1e-5, abs=1e-5)


def change(run: Trained, layer: str) -> Tensor:
    """What training changed in the part that a layer has in the largest logit: gradient · (output − what is left of the
    first one), for each image asked.
    """
    tensors: list[Tensor] = []

    def hook(module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        tensors.extend((args[0], out))

    handle = run.model.get_submodule(layer).register_forward_hook(hook)
    logit = run.model(run.asked).max(1).values
    handle.remove()
    x, out = tensors
    (direction,) = torch.autograd.grad(logit.sum(), out)
    first = untrained().get_submodule(layer)(x)
    return (direction * (out - KEPT * first)).detach().flatten(1).sum(1).double()


@pytest.mark.parametrize("column", ["source", "label"])
@pytest.mark.parametrize("layer", LAYERS)
def test_what_groups_of_images_add_to_a_logit_sums_to_what_the_layer_changed(run, layer, column):
    groups = run.memory.attend(run.model, run.asked).by(column, layer=layer, progress=False)
    assert groups.names == (("mnist", "uci") if column == "source" else tuple(range(10)))
    assert groups.bias is not None
    close(groups.values.sum(1) + groups.bias.sum(1), change(run, layer), BAR)
    assert_whole(groups, BAR)
    if layer == "fc2":
        close(groups.total, run.model(run.asked).max(1).values, BAR)


def test_all_slots_of_a_source_sum_to_its_group(run):
    spot = run.memory.attend(run.model, run.asked)
    hits = spot.top(len(run.memory.visits), layer="fc2", progress=False, per="slot")
    groups = spot.by("source", layer="fc2", progress=False)
    source = hits.columns["source"].to_numpy(zero_copy_only=False).reshape(hits.slots.shape)
    for name, values in zip(groups.names, groups.values.mT, strict=True):
        total = torch.where(torch.from_numpy(source == name), hits.contribution, 0).double().sum(1)
        close(total, values, BAR)


# ---------------------------------------------------------------- what each source put into the weights


@pytest.fixture(scope="module")
def ledger(run) -> Ledger:
    return run.memory.ledger("source", progress=False)


def test_the_first_weights_and_both_sources_sum_to_the_weights(run, ledger):
    first = untrained()
    assert set(ledger) == {"uci", "mnist"}
    for name in run.memory.certificate:
        weight = run.model.get_parameter(name).detach().double()
        assert (ledger.total(name) - weight).norm() <= 1e-5 * weight.norm(), name
        close(ledger.initial[name], KEPT * first.get_parameter(name), 1e-5)  # torch rounds 1 − ηλ to float32
        assert all(ledger[source][name].any() for source in ledger)


def test_a_mask_of_a_source_gives_a_whole_model_with_other_predictions(run, ledger):
    before, masked = state_of(run.model), run.memory.without("source = 'mnist'")
    model = masked.load_into(untrained(), progress=False).eval()
    for name, tensor in state_of(model).items():
        close(tensor, before[name] - ledger["mnist"][name] if name in ledger["mnist"] else before[name], 1e-5)
    logits = masked.predict(run.model, run.asked, progress=False)
    assert torch.equal(logits, model(run.asked)) and logits.isfinite().all()
    assert (logits - run.model(run.asked)).abs().max() > 0.1
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(run.model).items())
