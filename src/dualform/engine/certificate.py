r"""The certificate: do the slots of a memory add up to the weights of a model?

For each recorded parameter the weights are rebuilt from the slots and compared with the real ones,

.. math:: \frac{\lVert W_h - \text{rebuilt} \rVert}{\lVert W_h - W_0 \rVert},

beside the floor that is set by the rounding of training itself. A few random projections are enough; the comparison of
every entry is available on request.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.progress import OnProgress
from dualform.store import Store, parameter_columns, piece_of
from dualform.types import LayerInfo

from .layer_progress import LayerProgress
from .layer_sums import explained_layers, initial_part, layer_sums, layers_by_pass
from .parameter_sums import ParameterSum, parameter_sum
from .parameters_by_group import split_by_group
from .stream import StoreView

PROBES = 4


class Rounding(NamedTuple):
    """The machine precision of a parameter, and of its gradients."""

    weight: float
    gradient: float = 0.0


@dataclass(frozen=True)
class Agreement:
    """The error of a rebuilt parameter, relative to how far the parameter moved, and the rounding floor of that."""

    error: float
    floor: float


def certify(
    store: Store,
    view: StoreView,
    actual: Mapping[str, Tensor],
    *,
    full: bool = False,
    only: Iterable[str] | None = None,
    watch: OnProgress | None = None,
) -> dict[str, Agreement]:
    """Compare weights with those the memory rebuilds, for all parameters or ``only`` these.

    ``full`` compares every entry instead of random projections.
    """
    wanted = set(store.parameters if only is None else only)
    totals: dict[str, Tensor] = {}
    views: dict[str, CertificateView] = {}
    feeding = [layer for layer in explained_layers(store) if wanted & set(layer.parameters)]
    progress = LayerProgress(store, feeding, watch)
    for layers in layers_by_pass(store, feeding):
        sums: dict[str, list[ParameterSum]] = {}
        for layer in layers:
            terms = {name: term for name, term in layer_sums(store, layer, view.horizon).items() if name in wanted}
            for name, term in terms.items():
                views[name] = certificate_view(store, layer, name, full)
                term.project = views[name].probes
            if terms:
                sums[layer.name] = list(terms.values())
        parameter_sum(store, sums, view, progress.of(layers))
        for term in chain.from_iterable(sums.values()):
            totals[term.parameter] = totals.get(term.parameter, 0.0) + views[term.parameter].project_sum(term)
    rebuilt = {
        name: views[name].project(initial_part(store, name, view.horizon)) + total for name, total in totals.items()
    }
    whole_parameters = [
        name for name in (*preconditioned_parameters(store), *ledger_parameters(store)) if name in wanted
    ]
    for name, part in split_by_group(store, view, whole_parameters, watch=watch).items():
        views[name], rebuilt[name] = CertificateView.every_entry(store, name), part.total
    return {
        name: agreement(
            certified.project(actual[name]),
            certified.project(store.initial(name).double()),
            rebuilt[name],
            count_moves(store, view, name),
            rounding(store, view, name, actual[name].dtype),
        )
        for name, certified in views.items()
    }


def preconditioned_parameters(store: Store) -> list[str]:
    """The parameters that a rule with a preconditioner explains."""
    return [name for name in store.parameters if store.is_preconditioned(name)]


def ledger_parameters(store: Store) -> list[str]:
    """The parameters that a ledger explains."""
    return [p.name for p in store.manifest.parameters if p.kind == "ledger"]


def count_moves(store: Store, view: StoreView, name: str) -> int:
    """The number of steps up to the horizon that changed a parameter."""
    if store.parameters[name].kind == "ledger":
        return next((entry.moves.get(name, 0) for entry in store.manifest.ledgers if entry.step == view.horizon), 0)
    return int((store.schedule(name).steps <= view.horizon).sum())


def rounding(store: Store, view: StoreView, name: str, dtype: torch.dtype) -> Rounding:
    """The machine precision of a parameter of this type, and of its gradients up to the horizon."""
    return Rounding(torch.finfo(dtype).eps, store.gradient_eps(name, view.horizon))


@dataclass(frozen=True)
class CertificateView:
    """What is compared of a parameter: a few random projections of its columns, or (without ``probes``) every entry."""

    layer: LayerInfo | None
    parameter: str
    probes: Float[Tensor, "c p"] | None
    shape: tuple[int, ...]

    @classmethod
    def every_entry(cls, store: Store, name: str) -> "CertificateView":
        """A view of every entry of a parameter."""
        return cls(None, name, None, store.parameters[name].shape)

    def project(self, tensor: Tensor) -> Float[Tensor, "..."]:
        """The projections of a parameter."""
        if self.probes is None or self.layer is None:
            return tensor.detach()
        columns = parameter_columns(self.layer, piece_of(self.layer, self.parameter), tensor.detach())
        return columns.to("cpu", torch.float64) @ self.probes

    def project_sum(self, term: ParameterSum) -> Float[Tensor, "..."]:
        """The projections of a sum over slots, which were projected while they were added up."""
        return term.as_parameter(self.shape)[0] if self.probes is None else term.total[0]


def certificate_view(store: Store, layer: LayerInfo, name: str, full: bool) -> CertificateView:
    """Random projections where they are possible and cheaper, else every entry."""
    in_one_layer = sum(name in info.parameters for info in store.manifest.layers) == 1
    if full or not in_one_layer or name not in layer.weights or layer.indexed or layer.parts > 1:
        return CertificateView.every_entry(store, name)
    piece = piece_of(layer, name)
    return CertificateView(layer, name, random_probes(piece.end - piece.begin), store.parameters[name].shape)


def agreement(actual: Tensor, first: Tensor, rebuilt: Tensor, steps: int, eps: Rounding) -> Agreement:
    """Compare real weights with the initial and the rebuilt ones (or entries, or projections, of all three)."""
    current = actual.detach().to("cpu", torch.float64)
    return compare(
        (current - rebuilt).norm().item(), (current - first).norm().item(), current.norm().item(), steps, eps
    )


def compare(off: float, moved: float, size: float, steps: int, eps: Rounding) -> Agreement:
    r"""The error of weights of a given norm, relative to how far they moved in a number of steps, and its floor.

    The floor has two parts. Weights are rounded after every step, a random walk with steps of about 0.3 ε|W|; and
    every gradient is rounded to the precision it is computed in, by 0.21 ε_g of it (a uniform error of half a unit in
    the last place, for numbers of any leading digits). So step s is off by 0.21 ε_g ‖ΔW_s‖, and all of them by
    0.21 ε_g (Σ ‖ΔW_s‖²)^½, which is 0.21 ε_g ‖W_h − W_0‖ if the steps are orthogonal.
    """
    if off:
        off = off / moved if moved else math.inf
    walk = 0.3 * eps.weight * math.sqrt(steps) * size / moved if moved else 0.0
    return Agreement(off, math.hypot(walk, 0.21 * eps.gradient) if moved else 0.0)


def random_probes(d_in: int) -> Float[Tensor, "d_in p"] | None:
    """Random projections of the input of a layer; None if the input is no wider than their number."""
    if d_in <= PROBES:
        return None
    return torch.randn(d_in, PROBES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
