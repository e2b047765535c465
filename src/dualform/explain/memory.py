"""The user's memory: a recorded training run that can be asked, travelled through and masked."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from dualform.attend import View, add_up, certify, entries, explained_layers, initial_part, layer_sums
from dualform.errors import FilterError, ModelMismatch, QueryError
from dualform.memory import Store, sampled_bytes, sampled_entries, samples_at

from .answers import Certificate, Ledger
from .filters import Filter, groups_of, matching
from .forward import Target, evaluating, run
from .progress import bar
from .spotlight import Spotlight, _Groups

LEDGER_BYTES = 4 << 30


def open_memory(path: str | os.PathLike) -> "Memory":
    """Open a memory that was recorded with :func:`dualform.record`."""
    store = Store(Path(path))
    return Memory(store, View(store.steps))


@dataclass(frozen=True)
class Memory:
    """A recorded training run, read at a horizon and through a mask. Made by :func:`dualform.open`.

    A masked memory (``without``, ``only``) leaves out direct contributions with everything else held fixed: it shows
    what the weights are made of, not what training without those examples would have given.
    """

    store: Store
    view: View

    # ------------------------------------------------------------------------------------------- what is in it

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.store.path

    @property
    def step(self) -> int:
        """The step it is read at."""
        return self.view.horizon

    @property
    def layers(self) -> tuple[str, ...]:
        """The recorded layers."""
        return tuple(module.name for layer in self.store.manifest.layers for module in layer.modules)

    @property
    def visits(self) -> pa.Table:
        """The visits up to this step that the mask shows: visit, step, row, and the noted columns."""
        table = self.store.visits
        shown = table["step"].to_numpy() <= self.step
        if self.view.visible is not None:
            shown &= self.view.visible
        return table if shown.all() else table.filter(pa.array(shown))

    @property
    def certificate(self) -> Certificate:
        """How exactly the memory explains the weights:
        as written when recording closed, or checked now for other steps.
        """
        kept = self.store.manifest.certificate
        if kept is None or kept["step"] != self.step:
            return replace(self, view=View(self.step)).check()
        lines = kept["parameters"]
        return self._certificate({n: v["error"] for n, v in lines.items()}, {n: v["floor"] for n, v in lines.items()})

    def __repr__(self) -> str:
        mask = (
            ""
            if self.view.visible is None
            else f", {int(self.view.visible.sum()):,} of {len(self.view.visible):,} visits"
        )
        return f"Memory({str(self.path)!r}, step {self.step} of {self.store.steps}, layers {list(self.layers)}{mask})"

    # ------------------------------------------------------------------------------------------- other views

    def at(self, step: int) -> "Memory":
        """The memory as it stood after a step."""
        return replace(self, view=replace(self.view, horizon=self.store.horizon(step)))

    def without(self, filter: Filter) -> "Memory":
        """The memory with the matching visits masked out: SQL (``"source = 'web'"``), an Arrow expression or a mask."""
        return self._masked(~self._matching(filter))

    def only(self, filter: Filter) -> "Memory":
        """The memory with all but the matching visits masked out. The first weights stay."""
        return self._masked(self._matching(filter))

    def _matching(self, filter: Filter) -> np.ndarray:
        self.store.need_steps()
        found = matching(self.store.visits, filter)
        shown = self.store.visits["step"].to_numpy() <= self.step
        if self.view.visible is not None:
            shown &= self.view.visible
        if not (found & shown).any():
            raise FilterError(
                f"the filter {filter!r} matches none of the visits up to step {self.step} that are not masked already."
            )
        return found

    def _masked(self, visible: np.ndarray) -> "Memory":
        before = self.view.visible
        return replace(self, view=replace(self.view, visible=visible if before is None else visible & before))

    # ------------------------------------------------------------------------------------------- questions

    def attend(self, model: nn.Module, inputs: Any, *, target: Target = None) -> Spotlight:
        """Turn the spotlight on some inputs: what does each layer recall when the network sees them?

        The queries are those of the network that this memory stands for: ``model`` itself if it has these weights, else
        ``model`` with the memory's weights (it is not changed).
        """
        self.store.need_steps()
        self.fits(model)
        return Spotlight(self, model, inputs, None if self._is(model) else self._own_weights(), target)

    def predict(self, model: nn.Module, inputs: Any, *, progress: bool = True) -> Any:
        """What the network says with the memory's weights: at its step, and without what is masked."""
        self.fits(model)
        with torch.no_grad(), evaluating(model):
            return run(model, inputs, self.weights(progress=progress))

    def check(self, model: nn.Module | None = None, *, full: bool = False, progress: bool = True) -> Certificate:
        """Does this model have the weights that the memory rebuilds?

        Without a model: do the entries kept at this step agree?

        Random projections are compared, or with ``full=True`` every entry.
        """
        self.store.need_steps()
        if model is None and not self.store.weights_kept_at(self.step):
            return self._check_samples()
        if model is None:
            actual = {name: self.store.snapshot(name, self.step) for name in self._explained}
        else:
            self.fits(model)
            actual = dict(model.named_parameters())
        total = sum(self.store.slots(layer.name) for layer in explained_layers(self.store))
        with bar("checking", total, progress) as watch:
            found = certify(self.store, self.view, actual, full=full, watch=watch)
        return self._certificate({n: a.error for n, a in found.items()}, {n: a.floor for n, a in found.items()})

    def ledger(self, column: str, *, progress: bool = True) -> Ledger:
        """One set of weights for each group of a column: together with the initial part they add up to the weights."""
        self.store.need_steps()
        names, ids = groups_of(self.store.visits, column)
        groups = _Groups((*names, None), np.append(ids, len(names)))
        size = 8 * len(groups.names) * sum(math.prod(self.store.parameters[name].shape) for name in self._explained)
        if size > LEDGER_BYTES:
            raise QueryError(
                f"a ledger of '{column}' would hold {len(names):,} copies of the weights ({size / 2**30:.1f} GiB). "
                f"Choose a coarser column, or ask spot.by({column!r}, …) about single queries."
            )
        sums = self._sums(progress, group_of=groups, groups=len(groups.names))
        used = [
            i for i, name in enumerate(groups.names) if name is not None or any(bool(s[i].any()) for s in sums.values())
        ]
        return Ledger(
            column, self.step, {name: initial_part(self.store, name, self.step) for name in sums},
            {groups.names[i]: {name: total[i] for name, total in sums.items()} for i in used},
        )  # fmt: skip

    def weights(self, *, progress: bool = True) -> dict[str, Tensor]:
        """Every parameter and buffer of the network: rebuilt from the slots, the rest from its snapshots."""
        key = ("weights", self.view.key)
        if key not in self.store.cache:
            sums = self._sums(progress) if self.step else {}
            built = (
                {name: initial_part(self.store, name, self.step) + total[0] for name, total in sums.items()}
                if sums
                else {}
            )
            self.store.cache[key] = {
                p.name: built[p.name].to(getattr(torch, p.dtype))
                if p.name in built
                else self.store.snapshot(p.name, self.step)
                for p in self.store.manifest.parameters
            }
        return self.store.cache[key]

    def parameter(self, name: str) -> Tensor:
        """One parameter in float64, rebuilt from the slots (or from its snapshot)."""
        if name in self._explained:
            layers = [
                layer for layer in explained_layers(self.store) if name in layer_sums(self.store, layer, self.step)
            ]
            total = initial_part(self.store, name, self.step)
            for layer in layers:
                term = layer_sums(self.store, layer, self.step)[name]
                add_up(self.store, layer.name, self.view, [term])
                total = total + term.total[0].reshape(total.shape)
            return total
        return self.store.snapshot(name, self.step).double()

    def load_into(self, model: nn.Module, *, progress: bool = True) -> nn.Module:
        """Copy the memory's weights into a model."""
        self.fits(model)
        weights = self.weights(progress=progress)
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name in weights:
                    tensor.copy_(weights[name])
        return model

    def fits(self, model: nn.Module) -> None:
        """See that a model has the parameters of the recorded one."""
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for p in self.store.manifest.parameters:
            found = tensors.get(p.name)
            if found is None or tuple(found.shape) != p.shape:
                what = "has none" if found is None else f"has one of shape {tuple(found.shape)}"
                raise ModelMismatch(
                    f"this {type(model).__name__} does not fit the memory at {self.path}: "
                    f"it recorded '{p.name}' of shape {p.shape}, the model {what}. Pass the model that was trained."
                )

    # ------------------------------------------------------------------------------------------- inside

    @property
    def _explained(self) -> list[str]:
        return [p.name for p in self.store.manifest.parameters if p.kind != "rest"]

    def _sums(self, progress: bool, **options: Any) -> dict[str, Tensor]:
        """The sum over all slots for each explained parameter, (groups, *shape)."""
        layers = list(explained_layers(self.store))
        out: dict[str, Tensor] = {}
        with bar("rebuilding the weights", sum(self.store.slots(layer.name) for layer in layers), progress) as watch:
            for layer in layers:
                terms = layer_sums(self.store, layer, self.step, **options)
                add_up(self.store, layer.name, self.view, list(terms.values()), watch)
                for name, term in terms.items():
                    total = term.total.reshape(-1, *self.store.parameters[name].shape)
                    out[name] = out[name] + total if name in out else total
        return out

    def _is(self, model: nn.Module) -> bool:
        """Whether a model has the weights of this memory, by the entries that were kept of them."""
        if self.view.visible is not None:
            return False
        tensors = dict(model.named_parameters())
        return all(
            sampled_bytes(tensors[name].cpu(), sampled_entries(tensors[name].numel()))
            == samples_at(self.store, name, self.step)[0]
            for name in self._explained
        )

    def _own_weights(self) -> Mapping[str, Tensor]:
        if self.view.visible is None and self.step and self.store.weights_kept_at(self.step):
            return {p.name: self.store.snapshot(p.name, self.step) for p in self.store.manifest.parameters}
        return self.weights()

    def _check_samples(self) -> Certificate:
        errors, floor = {}, {}
        for layer in explained_layers(self.store):
            for name in layer_sums(self.store, layer, self.step):
                shape = self.store.parameters[name].shape
                which = torch.from_numpy(sampled_entries(math.prod(shape)))
                kept = torch.frombuffer(
                    bytearray(samples_at(self.store, name, self.step)[0]),
                    dtype=getattr(torch, self.store.parameters[name].dtype),
                )
                start = initial_part(self.store, name, self.step).reshape(-1)[which]
                first = self.store.initial(name).reshape(-1)[which].double()
                if len(shape) == 2 and name == layer.weight:
                    rows, columns = (which // shape[1]).numpy(), (which % shape[1]).numpy()
                    built = start + entries(self.store, layer, name, self.view, rows, columns).diagonal()
                else:
                    built = self.parameter(name).reshape(-1)[which]
                off, moved = (kept.double() - built).norm().item(), (kept.double() - first).norm().item()
                errors[name] = off / moved if moved else (0.0 if off == 0 else math.inf)
                steps = int((self.store.schedule(name)[0] <= self.step).sum())
                eps = torch.finfo(kept.dtype).eps
                floor[name] = 0.3 * eps * math.sqrt(steps) * kept.double().norm().item() / moved if moved else 0.0
        return self._certificate(errors, floor)

    def _certificate(self, errors: Mapping[str, float], floor: Mapping[str, float]) -> Certificate:
        rest = tuple(p.name for p in self.store.manifest.parameters if p.kind == "rest")
        return Certificate(self.step, errors, floor, rest, self.store.manifest.marks)
