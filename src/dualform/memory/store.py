"""The memory, read: tables of visits and steps, and the slots as a stream of blocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dualform.errors import HorizonError, LayerNotFound, NoSteps
from dualform.types import LayerInfo, ModuleInfo, ParameterInfo, Transition

from .codec import COMPUTED, row_scale
from .files import map_tensors, verify
from .manifest import Manifest, Shard, load_manifest

BLOCK_ROWS = 4096
"""Rows that are decoded and multiplied at a time: small enough for the cache, large enough for the matrix product."""


@dataclass(frozen=True)
class Calls:
    """The calls of one layer as columns, in the order of their slots. ``start`` is the first slot of each."""

    start: Int[np.ndarray, " k"]
    rows: Int[np.ndarray, " k"]
    step: Int[np.ndarray, " k"]
    visit: Int[np.ndarray, " k"]
    batch: Int[np.ndarray, " k"]
    stride: Int[np.ndarray, " k"]
    call: Int[np.ndarray, " k"]
    module: Int[np.ndarray, " k"]
    factor: Float[np.ndarray, " k"]

    def of(self, slots: Int[np.ndarray, " m"]) -> Int[np.ndarray, " m"]:
        """The call of each slot."""
        return np.searchsorted(self.start, slots, side="right") - 1

    def visits_of(
        self, slots: Int[np.ndarray, " m"], calls: Int[np.ndarray, " m"] | None = None
    ) -> Int[np.ndarray, " m"]:
        """The visit of each slot, −1 where it is not known; ``calls`` are their calls, if at hand."""
        k = self.of(slots) if calls is None else calls
        visits = self.visit[k] + (slots - self.start[k]) // self.stride[k] % self.batch[k]
        return np.where(self.visit[k] < 0, -1, visits)

    def positions_of(self, slots: Int[np.ndarray, " m"]) -> Int[np.ndarray, " m"]:
        """The place of each slot inside its example (token, pixel)."""
        k = self.of(slots)
        r, stride = slots - self.start[k], self.stride[k]
        return r // (stride * self.batch[k]) * stride + r % stride


@dataclass(frozen=True)
class Block:
    """Some consecutive slots of one layer, as they lie on disk."""

    slots: Int[np.ndarray, " m"]
    keys: Shaped[Tensor, "m d_in"]
    key_scale: Float[Tensor, " m"] | None
    errors: Shaped[Tensor, "m d_out"] | None
    error_scale: Float[Tensor, " m"] | None
    calls: Calls

    @cached_property
    def call(self) -> Int[np.ndarray, " m"]:
        """The call of each row."""
        return self.calls.of(self.slots)

    @cached_property
    def steps(self) -> Int[np.ndarray, " m"]:
        """The step of each row."""
        return self.calls.step[self.call]

    @cached_property
    def visits(self) -> Int[np.ndarray, " m"]:
        """The visit of each row, −1 where it is not known."""
        return self.calls.visits_of(self.slots, self.call)

    def coefficients(self, of_step: Float[np.ndarray, " T1"]) -> Float[np.ndarray, " m"]:
        """What each row counts for, from the coefficient of its step."""
        return of_step[self.steps] * self.calls.factor[self.call]

    def take(self, rows: Int[np.ndarray, " k"]) -> "Block":
        """Some rows of the block."""
        index = torch.from_numpy(rows)

        def some(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[index]

        return Block(
            slots=self.slots[rows],
            keys=self.keys[index],
            key_scale=some(self.key_scale),
            errors=some(self.errors),
            error_scale=some(self.error_scale),
            calls=self.calls,
        )


class Store:
    """A memory on disk, opened for reading. Everything is read when it is first asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest: Manifest = load_manifest(self.path)
        verify(self.path / "init.safetensors", self.manifest.init, content=True)
        for shard in self.manifest.shards:
            for name, entry in shard.files.items():
                verify(self.path / name, entry, content=name.endswith(".parquet"))
        self._mapped: dict[str, dict[str, Tensor]] = {}
        self.cache: dict[Any, Any] = {}
        """What was computed from the memory and is worth keeping while it is open."""

    @property
    def compute(self) -> torch.dtype:
        """The precision that sums over slots are computed in."""
        return COMPUTED[self.manifest.dtype]

    @property
    def steps(self) -> int:
        """The last complete step."""
        return self.manifest.steps

    def need_steps(self) -> None:
        """Say so if there is nothing to ask."""
        if not self.steps:
            raise NoSteps(f"the memory at {self.path} holds no complete step: nothing was recorded before it ended.")

    @cached_property
    def parameters(self) -> dict[str, ParameterInfo]:
        """Every tensor of the model by its name."""
        return {parameter.name: parameter for parameter in self.manifest.parameters}

    def layer(self, name: str) -> tuple[LayerInfo, ModuleInfo]:
        """The recorded map behind a layer's name, and the module of that name."""
        for layer in self.manifest.layers:
            for module in layer.modules:
                if module.name == name:
                    return layer, module
        names = [module.name for layer in self.manifest.layers for module in layer.modules]
        raise LayerNotFound(
            f"no layer '{name}' in the memory at {self.path}: it recorded {names}. Ask for one of these."
        )

    # ---------------------------------------------------------------------------------------------- tables

    @cached_property
    def visits(self) -> pa.Table:
        """One line a visit; line i is visit i."""
        tables = [self._table(shard, "visits").slice(0, shard.visits) for shard in self.manifest.shards if shard.visits]
        if not tables:
            return pa.table(
                {"visit": pa.array([], pa.int64()), "step": pa.array([], pa.int64()), "row": pa.array([], pa.int64())}
            )
        return pa.concat_tables(tables, promote_options="permissive")

    @cached_property
    def step_table(self) -> pa.Table:
        """One line a step and parameter."""
        tables = []
        for shard in self.manifest.shards:
            table = self._table(shard, "steps")
            tables.append(table.filter(pa.compute.field("step") <= shard.last))  # type: ignore[attr-defined]
        self.need_steps()
        return pa.concat_tables(tables, promote_options="permissive")

    @cached_property
    def _by_parameter(self) -> dict[str, dict[str, np.ndarray]]:
        if not self.steps:
            return {}
        table = self.step_table
        names, which = np.unique(table["parameter"].to_numpy(zero_copy_only=False).astype(str), return_inverse=True)
        numbers = (
            np.stack([table[name].to_numpy() for name in Transition._fields], axis=1)
            if len(table)
            else np.zeros((0, 6))
        )
        steps, scale = table["step"].to_numpy(), table["scale"].to_numpy()
        out = {}
        for i, name in enumerate(names):
            rows = np.flatnonzero(which == i)
            out[str(name)] = {"rows": rows, "steps": steps[rows], "transitions": numbers[rows], "scale": scale[rows]}
        return out

    def schedule(self, parameter: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Steps at which a parameter moved, their transitions (k, 6) and gradient scales."""
        found = self._by_parameter.get(parameter)
        if found is None:
            return np.zeros(0, np.int64), np.zeros((0, 6)), np.zeros(0)
        return found["steps"], found["transitions"], found["scale"]

    def sample(self, parameter: str, step: int) -> tuple[bytes, bytes] | None:
        """The entries of a parameter and its buffer that were kept after ``step`` (or the last move before it)."""
        found = self._by_parameter.get(parameter)
        if found is None:
            return None
        at = int(np.searchsorted(found["steps"], step, side="right")) - 1
        if at < 0:
            return None
        row = int(found["rows"][at])
        return self.step_table["sample"][row].as_py(), self.step_table["buffer_sample"][row].as_py()

    def calls(self, layer: str) -> Calls:
        """The calls of a layer's map."""
        if layer not in self._calls:
            self._calls[layer] = self._read_calls(layer)
        return self._calls[layer]

    @cached_property
    def _calls(self) -> dict[str, Calls]:
        return {}

    @cached_property
    def _call_tables(self) -> list[pa.Table]:
        field = pa.compute.field  # type: ignore[attr-defined]
        return [self._table(shard, "calls").filter(field("step") <= shard.last) for shard in self.manifest.shards]

    def _read_calls(self, layer: str) -> Calls:
        self.need_steps()
        field = pa.compute.field  # type: ignore[attr-defined]
        table = pa.concat_tables(t.filter(field("layer") == layer) for t in self._call_tables)
        info, _ = self.layer(layer)
        modules = {module.name: i for i, module in enumerate(info.modules)}
        rows = table["rows"].to_numpy()
        start = np.concatenate([[0], np.cumsum(rows)[:-1]]).astype(np.int64)[: len(rows)]
        columns = {name: table[name].to_numpy() for name in ("step", "visit", "batch", "stride", "call", "factor")}
        module = np.array([modules[name] for name in table["module"].to_pylist()], np.int64)
        return Calls(start=start, rows=rows, module=module, **columns)

    def _table(self, shard: Shard, kind: str) -> pa.Table:
        return pq.read_table(self.path / f"{kind}/{shard.number:06d}.parquet")

    # ---------------------------------------------------------------------------------------------- tensors

    def slots(self, layer: str) -> int:
        """How many slots a layer has."""
        return sum(shard.slots.get(layer, 0) for shard in self.manifest.shards)

    def blocks(self, layer: str, *, errors: bool, rows: int = BLOCK_ROWS, upto: int | None = None) -> Iterator[Block]:
        """The slots of a layer, in order, a few at a time; ``upto`` ends with the shard of that step."""
        calls, first = self.calls(layer), 0
        for shard in self.manifest.shards:
            if upto is not None and shard.first > upto:
                return
            count = shard.slots.get(layer, 0)
            if not count:
                continue
            keys, key_scale, es, error_scale = self._slot_tensors(shard, layer, errors)
            for begin in range(0, count, rows):
                end = min(begin + rows, count)
                cut = slice(begin, end)
                yield Block(
                    slots=np.arange(first + begin, first + end),
                    keys=keys[cut],
                    key_scale=None if key_scale is None else key_scale[cut],
                    errors=None if es is None else es[cut],
                    error_scale=None if error_scale is None else error_scale[cut],
                    calls=calls,
                )
            first += count

    def gather(self, layer: str, slots: Int[np.ndarray, " m"], what: str = "error") -> Float[Tensor, "m d"]:
        """The errors (or keys) of the given slots."""
        ends = np.cumsum([shard.slots.get(layer, 0) for shard in self.manifest.shards])
        info, _ = self.layer(layer)
        out = torch.empty(len(slots), info.d_out if what == "error" else info.d_in, dtype=self.compute)
        which = np.searchsorted(ends, slots, side="right")
        for i in np.unique(which):
            shard = self.manifest.shards[i]
            here = np.flatnonzero(which == i)
            local = torch.from_numpy(slots[here] - (ends[i - 1] if i else 0))
            keys, key_scale, errors, error_scale = self._slot_tensors(shard, layer, what == "error")
            values, scale = (errors, error_scale) if what == "error" else (keys, key_scale)
            assert values is not None
            rows = values[local].to(self.compute)
            out[torch.from_numpy(here)] = rows if scale is None else rows * scale[local].unsqueeze(1)
        return out

    def _slot_tensors(
        self, shard: Shard, layer: str, errors: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        tensors = self._tensors(f"shards/{shard.number:06d}.safetensors", shard)

        def scale(what: str) -> Tensor | None:
            return row_scale(tensors.get(f"{layer}.{what}_exponents"), self.compute)

        keys = tensors[f"{layer}.keys"]
        if not errors:
            return keys, scale("key"), None, None
        return keys, scale("key"), tensors[f"{layer}.errors"], scale("error")

    def _tensors(self, name: str, shard: Shard | None = None) -> dict[str, Tensor]:
        """The tensors of a file, mapped once, after its content was checked: a changed byte is found in time."""
        if name not in self._mapped:
            if shard is not None:
                verify(self.path / name, shard.files[name], content=True)
            self._mapped[name] = map_tensors(self.path / name)
        return self._mapped[name]

    def initial(self, name: str) -> Tensor:
        """A parameter or buffer as recording began."""
        return self._tensors("init.safetensors")[name]

    def initial_buffer(self, name: str) -> Tensor | None:
        """The optimiser's buffer of a parameter as recording began, if it had one."""
        return self._tensors("init.safetensors").get(f"{name}#buffer")

    @cached_property
    def _snapshots(self) -> dict[str, dict[int, Shard]]:
        where: dict[str, dict[int, Shard]] = {}
        for shard in self.manifest.shards:
            name = f"snapshots/{shard.number:06d}.safetensors"
            for key in self._tensors(name, shard) if name in shard.files else ():
                parameter, step = key.rsplit("@", 1)
                if int(step) <= shard.last:
                    where.setdefault(parameter, {})[int(step)] = shard
        return where

    def snapshot(self, name: str, step: int) -> Tensor:
        """A tensor that was kept whole, as it stood after ``step``."""
        kept = self._snapshots.get(name, {})
        before = max((s for s in kept if s <= step), default=0)
        after = min((s for s in kept if s > step), default=None)
        if (
            before != step and after is not None
        ):  # between the two it may have changed at any step that nobody looked at
            looks = {shard.last for shard in self.manifest.shards if not shard.cut} | {
                -(-step // self._every) * self._every
            }
            if not any(step <= look < after for look in looks):
                raise HorizonError(
                    f"'{name}' was kept at every {self._every}th step only, so the whole model of step {step} is not "
                    f"known; ask for step {before} or {after}, or record with snapshot_every=1."
                )
        if before == 0:
            return self.initial(name)
        return self._tensors(f"snapshots/{kept[before].number:06d}.safetensors", kept[before])[f"{name}@{before}"]

    @property
    def _every(self) -> int:
        return self.manifest.snapshot_every

    def weights_kept_at(self, step: int) -> bool:
        """Whether all parameters were kept whole at this step (a flush, or the end)."""
        return all(step in self._snapshots.get(p.name, {}) for p in self.manifest.parameters if p.kind != "rest")

    def horizon(self, step: int | None) -> int:
        """A step that the memory can be read at."""
        if step is None:
            return self.steps
        if not 0 <= step <= self.steps:
            raise HorizonError(
                f"the memory at {self.path} cannot be read at step {step}: it holds steps 0 to {self.steps}."
            )
        return int(step)
