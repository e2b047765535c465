r"""Does the memory hold what made these weights?

For each recorded parameter the weights are rebuilt from the slots and compared with the real ones,

.. math:: \frac{\lVert W_h - \text{rebuilt} \rVert}{\lVert W_h - W_0 \rVert},

beside the floor that the rounding of training itself sets. A few random projections are enough; the full sum is there
on request.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.memory import Store
from dualform.types import LayerInfo

from .coefficients import coefficients
from .rebuild import Sum, add_up
from .stream import View, Watch, stream

PROBES = 4


@dataclass(frozen=True)
class Agreement:
    """How far a parameter is from what the memory rebuilds, relative to how far it moved,
    and the rounding floor of that.
    """

    error: float
    floor: float


def certify(
    store: Store, view: View, actual: Mapping[str, Tensor], *, full: bool = False, watch: Watch | None = None
) -> dict[str, Agreement]:  # fmt: skip
    """Compare the given weights with the memory's, parameter by parameter; ``full`` compares every entry."""
    found: dict[str, Tensor] = {}
    projects: dict[str, Tensor | None] = {}
    for layer in explained_layers(store):
        project = None if full else probes(layer.d_in)
        terms = layer_sums(store, layer, view.horizon, project)
        add_up(store, layer.name, view, list(terms.values()), watch)
        for name, term in terms.items():
            projects[name] = project if name == layer.weight else None
            found[name] = found.get(name, 0.0) + term.total[0]
    out = {}
    for name, total in found.items():
        start = projected(initial_part(store, name, view.horizon), projects[name])
        steps = int((store.schedule(name)[0] <= view.horizon).sum())
        first = projected(store.initial(name).double(), projects[name])
        out[name] = agreement(actual[name], first, start + total, projects[name], steps)
    return out


def agreement(
    actual: Tensor,
    first: Float[Tensor, "d p"],
    rebuilt: Float[Tensor, "d p"],
    project: Float[Tensor, "d_in p"] | None,
    steps: int,
) -> Agreement:
    """Compare real weights with (projections of) the first and the rebuilt ones.

    The floor: rounding after every step is a random walk with steps of about 0.3 ε|W|.
    """
    eps = torch.finfo(actual.dtype).eps
    now = projected(actual.detach().to("cpu", torch.float64), project)
    error, moved = (now - rebuilt).norm().item(), (now - first).norm().item()
    if error != 0.0:
        error = error / moved if moved else math.inf
    return Agreement(error, 0.3 * eps * math.sqrt(steps) * now.norm().item() / moved if moved else 0.0)


def probes(d_in: int) -> Float[Tensor, "d_in p"] | None:
    """The random projections of a layer's input; None where the input is no wider than those."""
    if d_in <= PROBES:
        return None
    return torch.randn(d_in, PROBES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def explained_layers(store: Store) -> Iterator[LayerInfo]:
    """The layers whose slots rebuild at least one parameter."""
    for layer in store.manifest.layers:
        if any(store.parameters[name].kind != "rest" for name in layer.parameters):
            yield layer


def layer_sums(
    store: Store, layer: LayerInfo, horizon: int, project: Tensor | None = None, *, of: str = "weight", **options: Any
) -> dict[str, Sum]:  # fmt: skip
    """The sums over a layer's slots that rebuild its weight and its biases, by parameter. Options go to :class:`Sum`.

    ``of="buffer"`` rebuilds the optimiser's buffers of them instead.
    """
    terms = {}
    if store.parameters[layer.weight].kind != "rest":
        of_step = coefficients(store, layer.weight, horizon, of).of_step
        terms[layer.weight] = Sum(of_step, project=project, **options)
    for bias in {module.bias for module in layer.modules if module.bias}:
        if store.parameters[bias].kind != "rest":
            users = [i for i, module in enumerate(layer.modules) if module.bias == bias]
            some = None if len(users) == len(layer.modules) else users
            terms[bias] = Sum(coefficients(store, bias, horizon, of).of_step, bias=True, modules=some, **options)
    return terms


def initial_part(store: Store, name: str, horizon: int, of: str = "weight") -> Float[Tensor, "..."]:
    r"""What is left of the beginning: :math:`\rho W_0 + \gamma M_0`, in float64."""
    c = coefficients(store, name, horizon, of)
    part = c.rho * store.initial(name).double()
    buffer = store.initial_buffer(name)
    return part if buffer is None else part + c.gamma * buffer.double()


def entries(
    store: Store,
    layer: LayerInfo,
    name: str,
    view: View,
    rows: Int[np.ndarray, " r"],
    columns: Int[np.ndarray, " c"] | None,
    of: str = "weight",
) -> Float[Tensor, "r c"]:
    """What the slots of a layer add to some rows and columns of one of its parameters (a bias has no columns)."""
    of_step = coefficients(store, name, view.horizon, of).of_step
    users = [i for i, module in enumerate(layer.modules) if name in (layer.weight, module.bias)]
    total = torch.zeros(len(rows), 1 if columns is None else len(columns), dtype=torch.float64)
    for slots in stream(store, layer.name, view, errors=True):
        assert slots.errors is not None
        value = slots.values(of_step, bias=columns is None).double() * torch.from_numpy(slots.modules_among(users))
        if columns is not None and slots.block.key_scale is not None:
            value = value * slots.block.key_scale
        e = slots.errors[:, torch.from_numpy(rows)].double() * value.unsqueeze(1)
        x = torch.ones(len(e), 1) if columns is None else slots.keys[:, torch.from_numpy(columns)]
        total += e.mT @ x.double()
    return total


def projected(tensor: Tensor, project: Tensor | None) -> Float[Tensor, "d p"]:
    """A weight seen through projections; a bias is one column."""
    tensor = tensor if tensor.ndim == 2 else tensor.unsqueeze(1)
    return tensor if project is None else tensor @ project
