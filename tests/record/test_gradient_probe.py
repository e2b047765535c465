"""What a probe sees of a gradient is what it sees of the slots that make it up, and no entry is out of its sight."""

import pytest
import torch
from helpers import close
from torch import Tensor

from dualform.record.verify.gradient_probe import GradientProbe, probe_call, probe_gradients
from dualform.store import LayerMatrix
from dualform.types import LayerInfo, ModuleInfo, Piece

ROWS = 7


def layer(d_in: int, d_out: int, kind: str) -> tuple[LayerInfo, dict[str, Tensor]]:
    """A layer, and parameters for it."""
    parts, indexed, turned = (3 if kind == "parts" else 1), kind == "indexed", kind == "turned"
    columns = d_in // parts
    info = LayerInfo(
        "layer", kind, (Piece("weight", 0, columns, turned),), d_in, d_out, (ModuleInfo("layer", ("bias",), "layer"),),
        "slots", parts=parts, indexed=indexed,
    )  # fmt: skip
    shape = (columns, d_out) if turned or indexed else (d_out, columns)
    return info, {"weight": torch.randn(shape, dtype=torch.float64), "bias": torch.randn(d_out, dtype=torch.float64)}


@pytest.mark.parametrize("numbers", [4096, 16])
@pytest.mark.parametrize("size", [(6, 9), (66, 99)])
@pytest.mark.parametrize("kind", ["plain", "turned", "parts", "indexed"])
def test_slots_are_seen_as_the_gradient_that_they_make_up(kind, size, numbers):
    """Of small and large parameters, alone and together, whole and folded to a few numbers."""
    torch.manual_seed(0)
    info, parameters = layer(size[0], size[1], kind)
    error = torch.randn(ROWS, size[1], dtype=torch.float64)
    key = torch.randint(size[0], (ROWS, 1)) if kind == "indexed" else torch.randn(ROWS, size[0], dtype=torch.float64)
    gradients = {
        name: LayerMatrix(info).gradient(name, key, error, tensor.shape) for name, tensor in parameters.items()
    }
    probes = {name: GradientProbe(name, tensor, [info], numbers) for name, tensor in parameters.items()}
    seen, finite = probe_gradients(list(probes.values()), list(gradients.values()))
    together = probe_call(list(probes.values()), info, key, error)
    assert finite
    for (name, probe), whole, part in zip(probes.items(), seen, together, strict=True):
        assert len(whole) == probe.size <= numbers
        close(part, whole)
        close(probe.of(gradients[name]), whole)
        close(probe_call([probe], info, key, error)[0], whole)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(bad):
    info, parameters = layer(66, 99, "plain")
    parameters["weight"][5, 7] = bad
    probes = [GradientProbe(name, tensor, [info]) for name, tensor in parameters.items()]
    assert not probe_gradients(probes, list(parameters.values()))[1]


def test_a_change_of_any_one_entry_shows_by_half_of_itself_or_more():
    info, parameters = layer(66, 99, "plain")
    probe = GradientProbe("weight", parameters["weight"], [info])
    changes = torch.eye(66, dtype=torch.float64)  # each in a row of its own
    assert probe.of(torch.cat([changes, torch.zeros(33, 66, dtype=torch.float64)]))[:66].abs().min() >= 0.5


@pytest.mark.parametrize("threshold", [0.3, 0.1, 0.03])
def test_a_change_of_a_whole_row_is_hidden_as_seldom_as_is_said(threshold):
    """A change D stays below τ with a probability of about 0.8 τ / ‖D‖."""
    torch.manual_seed(0)
    rows = 20_000
    probe = GradientProbe("weight", torch.zeros(rows, 64, dtype=torch.float64), [layer(64, rows, "plain")[0]], rows)
    changes = torch.nn.functional.normalize(torch.randn(rows, 64, dtype=torch.float64))
    hidden = float((probe.of(changes).abs() < threshold).double().mean())
    assert hidden == pytest.approx(0.8 * threshold, rel=0.15)
