"""The memory, read: tables of visits and steps, and the slots as a stream of blocks."""

import pickle
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.errors import FrozenWeights, HorizonError, LayerNotFound, NoSteps, StoreError, UnsupportedOptimizer
from dualform.rules import Rule, named_rules
from dualform.types import LayerInfo, ModuleInfo, ParameterInfo

from .answer_caches import AnswerCaches
from .blocks import Block, CallTable, join_blocks
from .format import COMPUTED, STORED, LedgerState, Manifest, Shard, add_parts, map_tensors, read_ledger, row_scale
from .inference_mode import outside_inference_mode
from .io import verify
from .rank_folders import ledgers_by_rank, lines, load_manifest
from .snapshots import Snapshots
from .step_table import NO_MOVES, ParameterSteps, StepTable

BLOCK_ROWS = 4096
"""The most rows of a block."""

DECODED = 4 << 20
"""The most bytes of keys that are decoded at a time: they are still in the cache when they are multiplied."""


class Store:
    """A memory on disk, opened for reading. Everything is read when it is first asked for.

    ``manifest`` says which of its shards count, if not all; ``rules`` are those that were taught.
    """

    def __init__(self, path: str | Path, manifest: Manifest | None = None, rules: Iterable[Rule] = ()) -> None:
        self.path = Path(path)
        self._taught = tuple(rules)
        self.rules = named_rules(self._taught)
        self.manifest = load_manifest(self.path) if manifest is None else manifest
        self._files = self.manifest.files
        verify(self.path / "init.safetensors", self.manifest.init, content=True)
        self._files |= {entry.name: entry.file for entry in self.manifest.ledgers}
        for name, entry in self._files.items():
            verify(self.path / name, entry, content=name.endswith(".parquet"))
        self._mapped: dict[str, dict[str, Tensor]] = {}
        self._calls: dict[str, CallTable] = {}
        self.cache = AnswerCaches()
        """What was computed from the memory and is worth keeping while it is open."""

    def __reduce__(self) -> tuple[type["Store"], tuple[Path, Manifest, tuple[Rule, ...]]]:
        """Opened again from its folder, with the shards that count here."""
        for rule in self._taught:
            _require_picklable(rule, self.path)
        return Store, (self.path.absolute(), self.manifest, self._taught)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Store":
        """Itself: nothing changes it."""
        return self

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

    def layer(self, name: str | int) -> tuple[LayerInfo, ModuleInfo]:
        """The recorded map behind a layer's name, and the module of that name; 2 stands for "2" in a Sequential."""
        name = str(name) if isinstance(name, int) and not isinstance(name, bool) else name
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
        tables = self._tables("visits")
        if not tables and self.manifest.ledgers:
            return self._groups_as_visits
        if not tables:
            return pa.table(
                {"visit": pa.array([], pa.int64()), "step": pa.array([], pa.int64()), "row": pa.array([], pa.int64())}
            )
        table = pa.concat_tables(tables, promote_options="permissive")
        return table if self.manifest.ranks == 1 else table.sort_by("visit")

    @property
    def _groups_as_visits(self) -> pa.Table:
        """Of a ledger alone nothing is known but its groups: one line each."""
        last = self.ledger_state(max(entry.step for entry in self.manifest.ledgers))
        numbers = pa.array(range(len(last.groups)), pa.int64())
        ones = pa.array([1] * len(last.groups), pa.int64())
        columns = {"visit": numbers, "step": ones, "row": numbers, last.column: pa.array(list(last.groups))}
        return pa.table(columns).append_column("visits", pa.array(list(last.visits), pa.int64()))

    def ledger_state(self, step: int, rank: int | None = None) -> LedgerState:
        """The ledger as it stood after a step: all of it, or the part of one process."""
        entries = ledgers_by_rank(self.manifest.ledgers, step)
        if entries:
            names = [p.name for p in self.manifest.parameters if p.kind == "ledger"]
            first = {name: self.initial(name) for name in names}
            some = entries.values() if rank is None else [entries[rank]]
            return add_parts([read_ledger(self._tensors(entry.name), entry, first) for entry in some])
        kept = sorted({entry.step for entry in self.manifest.ledgers})
        raise HorizonError(
            f"the ledger of the memory at {self.path} was kept at the steps {kept} alone, not at step {step}. Ask for "
            "one of these: memory.at(step)."
        )

    @cached_property
    def step_table(self) -> pa.Table:
        """One line a step and parameter."""
        self.need_steps()
        return pa.concat_tables(self._tables("steps"), promote_options="permissive")

    @cached_property
    def _schedule(self) -> StepTable:
        return StepTable(self.step_table)

    def schedule(self, parameter: str) -> ParameterSteps:
        """What the optimiser did to a parameter. Kept for the next question."""
        return self.cache.step_tables(parameter, lambda: self._schedule.moves(parameter) if self.steps else NO_MOVES)

    def gradient_eps(self, parameter: str, step: int) -> float:
        """The machine precision in which the gradients of a parameter were computed up to a step."""
        if self.parameters[parameter].kind == "ledger":
            entries = [entry for entry in self.manifest.ledgers if entry.step == step]
            return max((entry.gradient_eps.get(parameter, 0.0) for entry in entries), default=0.0)
        return self._schedule.gradient_eps(parameter, step) if self.steps else 0.0

    def rule(self, parameter: str) -> Rule | None:
        """The rule that explains a parameter; None if there is none, or none is needed to read it."""
        name = self.parameters[parameter].rule
        rule = self.rules.get(name) if name else None
        if rule is None and self.schedule(parameter).transitions[:, 6:].any():
            raise UnsupportedOptimizer(
                f"the memory at {self.path} was recorded under the rule '{name}' of '{parameter}', which is not known "
                f"here. Give it again: dualform.open(path, rules=[Rule({name!r}, …)])."
            )
        return rule

    def is_preconditioned(self, parameter: str) -> bool:
        """Whether a rule with a preconditioner explains a parameter: no number tells what a slot counts for in it."""
        rule = self.rule(parameter) if self.parameters[parameter].by_slots else None
        return rule is not None and rule.precondition is not None

    def sample(self, parameter: str, step: int) -> tuple[bytes, bytes] | None:
        """The entries of a parameter and its buffer that were kept after ``step`` (or the last move before it)."""
        return self._schedule.sample(parameter, step) if self.steps else None

    def calls(self, layer: str) -> CallTable:
        """The calls of a layer's map."""
        if layer not in self._calls:
            self._calls[layer] = self._read_calls(layer)
        return self._calls[layer]

    @cached_property
    def _call_tables(self) -> list[pa.Table]:
        return self._tables("calls")

    def _read_calls(self, layer: str) -> CallTable:
        self.need_steps()
        field = pa.compute.field  # type: ignore[attr-defined]
        table = pa.concat_tables(t.filter(field("layer") == layer) for t in self._call_tables)
        info, _ = self.layer(layer)
        modules = {module.name: i for i, module in enumerate(info.modules)}
        rows = table["rows"].to_numpy()
        start = np.concatenate([[0], np.cumsum(rows)[:-1]]).astype(np.int64)[: len(rows)]
        names = ("step", "visit", "batch", "stride", "call", "factor", "bias_factor")
        columns = {name: table[name].to_numpy() for name in names}
        module = np.array([modules[name] for name in table["module"].to_pylist()], np.int64)
        return CallTable(start=start, rows=rows, module=module, **columns)

    def _tables(self, kind: str) -> list[pa.Table]:
        return [table for shard in self.manifest.shards if (table := lines(self.path, shard, kind)) is not None]

    # ---------------------------------------------------------------------------------------------- tensors

    def slots(self, layer: str) -> int:
        """How many slots a layer has."""
        return sum(shard.slots.get(layer, 0) for shard in self.manifest.shards)

    def block_rows(self, layer: str) -> int:
        """The most rows that a block of a layer has."""
        if self.compute == STORED[self.manifest.dtype]:
            return BLOCK_ROWS
        info, _ = self.layer(layer)
        return min(BLOCK_ROWS, max(64, DECODED // (info.key_size * self.compute.itemsize)))

    def blocks(self, layer: str, *, errors: bool, rows: int | None = None, upto: int | None = None) -> Iterator[Block]:
        """The slots of a layer, in order, some ``rows`` at a time; ``upto`` ends with the shard of that step."""
        first = 0
        rows = self.block_rows(layer) if rows is None else rows
        for shard in self.manifest.shards:
            count = shard.slots.get(layer, 0)
            later = upto is not None and shard.first > upto
            if count and later and self.manifest.ranks == 1:
                return
            if not count or later:
                first += count
                continue
            size = -(-count // -(-count // rows))  # as few parts as possible, and equal ones
            for begin in range(0, count, size):
                yield self._block(shard, layer, first, begin, min(begin + size, count), errors)
            first += count

    def step_rows(self, layer: str, step: int) -> int:
        """How many slots of a layer a step used."""
        return sum(end - begin for _, begin, end in self._slots_of_step(layer, step))

    def step_block(self, layer: str, step: int) -> Block | None:
        """The slots of a layer that a step used, with their errors; None if there are none."""
        found = []
        for at, begin, end in self._slots_of_step(layer, step):
            first = int(self._ends(layer)[at - 1]) if at else 0
            found.append(self._block(self.manifest.shards[at], layer, first, begin - first, end - first, errors=True))
        return join_blocks(found) if found else None

    def _slots_of_step(self, layer: str, step: int) -> list[tuple[int, int, int]]:
        """Where the slots of a step lie: in one shard of each process that had any. Its place, and from where to where
        in the layer.
        """
        calls, calls_of, found = self.calls(layer), self._first_calls(layer), []
        for at in np.flatnonzero((self._stretches[0] <= step) & (step <= self._stretches[1])).tolist():
            first, last = calls_of[at : at + 2]
            begin, end = first + np.searchsorted(calls.step[first:last], [step, step + 1])
            if begin < end:
                found.append((at, int(calls.start[begin]), int(calls.start[end - 1] + calls.rows[end - 1])))
        return found

    @cached_property
    def _stretches(self) -> Int[np.ndarray, "2 s"]:
        """The first and the last step of each shard."""
        shards = self.manifest.shards
        return np.array([[shard.first for shard in shards], [shard.last for shard in shards]], np.int64)

    def _first_calls(self, layer: str) -> Int[np.ndarray, " s1"]:
        """The first call of each shard, and the number of all calls."""
        return self.cache.first_calls(
            layer,
            lambda: np.searchsorted(self.calls(layer).start, np.append(0, self._ends(layer))),
        )

    def _ends(self, layer: str) -> Int[np.ndarray, " s"]:
        """The number of slots of a layer up to each shard's end."""
        return self.cache.slot_ends(
            layer, lambda: np.cumsum([shard.slots.get(layer, 0) for shard in self.manifest.shards])
        )

    def _block(self, shard: Shard, layer: str, first: int, begin: int, end: int, errors: bool) -> Block:
        """Some slots of a shard, whose first is slot ``first`` of the layer."""
        tensors, cut = self._shard_tensors(shard), slice(begin, end)

        def scale(what: str) -> Tensor | None:
            exponents = tensors.get(f"{layer}.{what}_exponents")
            return None if exponents is None else row_scale(exponents[cut], self.compute)

        return Block(
            slots=np.arange(first + begin, first + end),
            keys=tensors[f"{layer}.keys"][cut],
            key_scale=scale("key"),
            errors=tensors[f"{layer}.errors"][cut] if errors else None,
            error_scale=scale("error") if errors else None,
            calls=self.calls(layer),
            layer=self.layer(layer)[0],
        )

    def gather(self, layer: str, slots: Int[np.ndarray, " m"], what: str = "error") -> Float[Tensor, "m d"]:
        """The errors (or keys) of the given slots."""
        ends = self._ends(layer)
        info, _ = self.layer(layer)
        out = torch.empty(len(slots), info.d_out if what == "error" else info.key_size, dtype=self.compute)
        which = np.searchsorted(ends, slots, side="right")
        for i in np.unique(which):
            shard = self.manifest.shards[i]
            here = np.flatnonzero(which == i)
            local = torch.from_numpy(slots[here] - (ends[i - 1] if i else 0))
            tensors = self._shard_tensors(shard)
            rows = tensors[f"{layer}.{what}s"][local].to(self.compute)
            exponents = tensors.get(f"{layer}.{what}_exponents")
            scale = None if exponents is None else row_scale(exponents[local], self.compute)
            out[torch.from_numpy(here)] = rows if scale is None else rows * scale.unsqueeze(1)
        return out

    def _shard_tensors(self, shard: Shard) -> dict[str, Tensor]:
        file = shard.file("shards")
        assert file is not None
        return self._tensors(file)

    def _tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file, mapped once, after its content was checked: a changed byte is found in time."""
        if name not in self._mapped:
            if name in self._files:
                verify(self.path / name, self._files[name], content=True)
            with outside_inference_mode():
                self._mapped[name] = map_tensors(self.path / name)
        return self._mapped[name]

    def initial(self, name: str) -> Tensor:
        """A parameter or buffer as recording began."""
        first = self._tensors("init.safetensors").get(name)
        if first is None and name in self.manifest.frozen:  # kept when an optimiser was given it
            first = self.kept_at(name, 0)
            if first is None:
                raise FrozenWeights(
                    f"the memory at {self.path} holds a fingerprint of the frozen weight '{name}', not the weight "
                    "itself. Pass the model that has it: memory.predict(model, inputs), memory.weights(model), "
                    "memory.load_into(model)."
                )
        assert first is not None, name
        return first

    def not_kept(self, step: int) -> list[str]:
        """The frozen parameters of which the memory holds fingerprints alone up to a step."""
        return [name for name in self.manifest.frozen if self._snapshots.last(name, step) is None]

    def initial_states(self, name: str) -> dict[str, Tensor]:
        """All that the optimiser kept of a parameter as recording began."""
        rule = self.rules.get(self.parameters[name].rule or "")
        found = {key: self.initial_state(name, key) for key in ("buffer", *(rule.shared if rule else ()))}
        return {key: tensor for key, tensor in found.items() if tensor is not None}

    def initial_state(self, name: str, key: str) -> Tensor | None:
        """The optimiser's state of a parameter ("buffer" or by its own name) as recording began, if it had one."""
        return self._tensors("init.safetensors").get(f"{name}#{key}")

    @cached_property
    def _snapshots(self) -> Snapshots:
        return Snapshots(self.manifest, self._tensors)

    def snapshot(self, name: str, step: int) -> Tensor:
        """A tensor that was kept whole, as it stood after ``step``."""
        self._snapshots.need(name, step)
        return self.last_kept(name, step)

    def last_kept(self, name: str, step: int) -> Tensor:
        """A tensor as it was last kept up to ``step``."""
        found = self._snapshots.last(name, step)
        return self.initial(name) if found is None else found

    def kept_at(self, name: str, step: int) -> Tensor | None:
        """A tensor that was kept at this very step."""
        return self._snapshots.last(name, step) if self._snapshots.has(name, step) else None

    @property
    def kept_steps(self) -> list[int]:
        """The steps at which anything was kept whole."""
        return self._snapshots.steps

    def weights_kept_at(self, step: int) -> bool:
        """Whether all parameters were kept whole at this step (the end)."""
        return all(self._snapshots.has(p.name, step) for p in self.manifest.parameters if p.kind != "rest")

    def horizon(self, step: int | None) -> int:
        """A step that the memory can be read at."""
        if step is None:
            return self.steps
        if not 0 <= step <= self.steps:
            raise HorizonError(
                f"the memory at {self.path} cannot be read at step {step}: it holds steps 0 to {self.steps}."
            )
        return int(step)


def _require_picklable(rule: Rule, path: Path) -> None:
    """A rule that was taught holds functions, which another process must be able to import."""
    try:
        pickle.dumps(rule)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise StoreError(
            f"the memory at {path} cannot be pickled with the rule '{rule.name}' that it was opened with: {error}. "
            "Define the rule's functions at the top of a module, or open the memory where it is needed: "
            "dualform.open(path, rules=[…])."
        ) from error
