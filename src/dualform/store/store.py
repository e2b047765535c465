"""Reading a memory: its tables of visits and steps, its snapshots, and its slots as a stream of blocks."""

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dualform.errors import FrozenWeights, HorizonError, LayerNotFound, NoSteps, StoreError, UnsupportedOptimizer
from dualform.rules import Rule, named_rules
from dualform.types import LayerInfo, ModuleInfo, ParameterInfo

from .answer_caches import AnswerCaches
from .blocks import Block, CallTable, join_blocks
from .folder import INIT
from .format import COMPUTED, STORED, LedgerState, Manifest, Shard, add_parts, map_tensors, read_ledger, row_scale
from .inference_mode import outside_inference_mode
from .io import verify
from .rank_folders import ledgers_by_rank, lines, load_manifest
from .snapshots import Snapshots
from .step_table import NO_STEPS, ParameterSteps, StepTable

BLOCK_ROWS = 4096
"""The most rows of a block."""

RowKind = Literal["key", "error"]

DECODED = 4 << 20
"""The most bytes of keys that are decoded at a time: few enough that they are multiplied while in the CPU cache."""


SlotSupply = Callable[[Shard], dict[str, Tensor]]
"""Gives the slots of a shard as tensors, where their file does not stay on disk."""


class Store:
    """A memory on disk, opened for reading. Each part is read when it is first needed.

    ``manifest`` says which of its shards count, if not all; ``rules`` are rules that the user defined. With a
    ``supply`` the files of slots may be missing: slots are asked for there.
    """

    def __init__(
        self,
        path: str | Path,
        manifest: Manifest | None = None,
        rules: Iterable[Rule] = (),
        *,
        supply: SlotSupply | None = None,
    ) -> None:
        self.path = Path(path)
        self._custom_rules = tuple(rules)
        self.rules = named_rules(self._custom_rules)
        self.manifest = load_manifest(self.path) if manifest is None else manifest
        self._files = self.manifest.files
        verify(self.path / INIT, self.manifest.init, content=True)
        self._files |= {entry.name: entry.file for entry in self.manifest.ledgers}
        if self.manifest.run_log is not None:
            self._files |= {entry.name: entry.file for entry in self.manifest.run_log.states}
        self._supply = supply
        for name, entry in self._files.items():
            if supply is not None and name.startswith("shards/"):
                continue
            verify(self.path / name, entry, content=name.endswith(".parquet"))
        self._mapped: dict[str, dict[str, Tensor]] = {}
        self._calls: dict[str, CallTable] = {}
        self.cache = AnswerCaches()
        """Answers that were computed from the memory, cached while it is open."""

    def __reduce__(self) -> tuple[type["Store"], tuple[Path, Manifest, tuple[Rule, ...]]]:
        """Pickle as the folder, the manifest and the rules: the copy opens the folder again."""
        if self._supply is not None:
            raise StoreError(
                "the slots of a replayed run are made in this process and cannot be sent to another one. Ask there: "
                "memory.replay(…).slots()."
            )
        for rule in self._custom_rules:
            _require_picklable(rule, self.path)
        return Store, (self.path.absolute(), self.manifest, self._custom_rules)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Store":
        """The store itself, since it is read-only."""
        return self

    @property
    def file_sizes(self) -> dict[str, int]:
        """The files that the manifest names, with their bytes."""
        return {INIT: self.manifest.init.bytes} | {name: entry.bytes for name, entry in self._files.items()}

    @property
    def compute(self) -> torch.dtype:
        """The precision that sums over slots are computed in."""
        return COMPUTED[self.manifest.dtype]

    @property
    def is_supplied(self) -> bool:
        """Whether slots may have to be made again when they are read, so that few passes over them count."""
        return self._supply is not None

    @property
    def steps(self) -> int:
        """The last complete step."""
        return self.manifest.steps

    def need_steps(self) -> None:
        """Raise an error if the memory holds no complete step."""
        if not self.steps:
            raise NoSteps(f"the memory at {self.path} holds no complete step: recording ended before the first one.")

    def need_training(self) -> None:
        """Raise an error if the slots of the memory are not those of a training, whose steps changed the weights."""
        if self.manifest.survey:
            raise NoSteps(
                f"the memory at {self.path} is a survey of a network that was trained before: it holds slots without "
                "steps, so it cannot say how the weights came about, and nothing in it can be rebuilt, checked or run "
                "again. Ask it for memory.scores(model, inputs), or for weights α: "
                "memory.attend(model, inputs).top(layer=…, score='weight'). For the rest record the training itself."
            )

    @cached_property
    def parameters(self) -> dict[str, ParameterInfo]:
        """Every tensor of the model by its name."""
        return {parameter.name: parameter for parameter in self.manifest.parameters}

    def layer(self, name: str | int) -> tuple[LayerInfo, ModuleInfo]:
        """The recorded layer that holds the module of this name, and that module; 2 means "2" in a Sequential."""
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
        """One line for each visit; line i is visit i."""
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
        """One line for each group of the ledger, for a memory that holds only a ledger."""
        last = self.ledger_state(max(entry.step for entry in self.manifest.ledgers))
        numbers = pa.array(range(len(last.groups)), pa.int64())
        first_steps = pa.array([1] * len(last.groups), pa.int64())
        columns = {"visit": numbers, "step": first_steps, "row": numbers, last.column: pa.array(list(last.groups))}
        return pa.table(columns).append_column("visits", pa.array(list(last.visits), pa.int64()))

    def ledger_state(self, step: int, rank: int | None = None) -> LedgerState:
        """The ledger after a step: summed over all processes, or the part of one."""
        entries = ledgers_by_rank(self.manifest.ledgers, step)
        if entries:
            names = [p.name for p in self.manifest.parameters if p.kind == "ledger"]
            first = {name: self.initial(name) for name in names}
            selected = entries.values() if rank is None else [entries[rank]]
            return add_parts([read_ledger(self._tensors(entry.name), entry, first) for entry in selected])
        steps = sorted({entry.step for entry in self.manifest.ledgers})
        raise HorizonError(
            f"the memory at {self.path} holds its ledger at the steps {steps} only, not at step {step}. Ask for one "
            "of these: memory.at(step)."
        )

    @cached_property
    def step_table(self) -> pa.Table:
        """One line for each step and parameter."""
        self.need_steps()
        return pa.concat_tables(self._tables("steps"), promote_options="permissive")

    @cached_property
    def _schedule(self) -> StepTable:
        return StepTable(self.step_table)

    def schedule(self, parameter: str) -> ParameterSteps:
        """The steps that changed a parameter (cached)."""
        return self.cache.step_tables(
            parameter, lambda: self._schedule.parameter_steps(parameter) if self.steps else NO_STEPS
        )

    def gradient_eps(self, parameter: str, step: int) -> float:
        """The machine precision of the gradients of a parameter up to a step."""
        if self.parameters[parameter].kind == "ledger":
            entries = [entry for entry in self.manifest.ledgers if entry.step == step]
            return max((entry.gradient_eps.get(parameter, 0.0) for entry in entries), default=0.0)
        return self._schedule.gradient_eps(parameter, step) if self.steps else 0.0

    def rule(self, parameter: str) -> Rule | None:
        """The rule that explains a parameter; None if there is none, or if reading the parameter needs none."""
        name = self.parameters[parameter].rule
        rule = self.rules.get(name) if name else None
        if rule is None and self.schedule(parameter).transitions[:, 6:].any():
            raise UnsupportedOptimizer(
                f"the memory at {self.path} was recorded with the rule '{name}' for '{parameter}', which is not "
                f"defined here. Pass it again: dualform.open(path, rules=[Rule({name!r}, …)])."
            )
        return rule

    def is_preconditioned(self, parameter: str) -> bool:
        """Whether a rule with a preconditioner explains a parameter, so that slots have no scalar coefficient in it."""
        rule = self.rule(parameter) if self.parameters[parameter].by_slots else None
        return rule is not None and rule.precondition is not None

    def sample(self, parameter: str, step: int) -> tuple[bytes, bytes] | None:
        """The sampled entries of a parameter and of its buffer after ``step``, or after the last change before it."""
        return self._schedule.sample(parameter, step) if self.steps else None

    def calls(self, layer: str) -> CallTable:
        """The table of the calls of a layer."""
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

    # ---------------------------------------------------------------------------------------- running again

    @cached_property
    def run_log(self) -> pa.Table:
        """One line for each step and parameter group, for a run that can be run again."""
        return pa.concat_tables(self._tables("run_log"), promote_options="permissive")

    def generators(self) -> dict[int, Tensor]:
        """States of torch's generator before backward passes, by the first visit of the pass."""
        files = [file for shard in self.manifest.shards if (file := shard.file("generators"))]
        views = [view for file in files for view in self._tensors(file).items()]
        return {int(visit): state.clone() for visit, state in views}  # torch reads whole storages

    def state(self, step: int) -> dict[str, Tensor]:
        """The whole state that was kept after a step: parameters, buffers, the optimiser's state, the generator."""
        assert self.manifest.run_log is not None
        (entry,) = [entry for entry in self.manifest.run_log.states if entry.step == step]
        return self._tensors(entry.name)

    # ---------------------------------------------------------------------------------------------- tensors

    def slots(self, layer: str) -> int:
        """The number of slots of a layer."""
        return sum(shard.slots.get(layer, 0) for shard in self.manifest.shards)

    def block_rows(self, layer: str) -> int:
        """The maximal number of rows in a block of a layer."""
        if self.compute == STORED[self.manifest.dtype]:
            return BLOCK_ROWS
        info, _ = self.layer(layer)
        return min(BLOCK_ROWS, max(64, DECODED // (info.key_size * self.compute.itemsize)))

    def blocks(
        self, layer: str, *, errors: bool, rows: int | None = None, upto: int | None = None,
        visible: Bool[np.ndarray, " V"] | None = None,
    ) -> Iterator[Block]:  # fmt: skip
        """The slots of a layer in order, in blocks of at most ``rows``, up to the end of the shard of step ``upto``.

        Shards without any slot of a ``visible`` or unknown visit are passed over.
        """
        first = 0
        rows = self.block_rows(layer) if rows is None else rows
        shown = None if visible is None else self._shows(layer, visible)
        for number, shard in enumerate(self.manifest.shards):
            count = shard.slots.get(layer, 0)
            later = upto is not None and shard.first > upto
            if count and later and self.manifest.ranks == 1:
                return
            if not count or later or (shown is not None and not shown[number]):
                first += count
                continue
            size = -(-count // -(-count // rows))  # as few blocks as possible, of equal size
            for begin in range(0, count, size):
                yield self._block(shard, layer, first, begin, min(begin + size, count), errors)
            first += count

    def _shows(self, layer: str, visible: Bool[np.ndarray, " V"]) -> Bool[np.ndarray, " s"]:
        """Whether each shard has slots of a layer whose visit is visible or unknown."""
        calls, before = self.calls(layer), np.append(0, np.cumsum(visible))
        begin = np.clip(calls.visit, 0, len(visible))
        end = np.clip(calls.visit + calls.batch, 0, len(visible))
        shown = np.append(0, np.cumsum((calls.visit < 0) | (before[end] > before[begin])))
        return np.diff(shown[self._first_calls(layer)]) > 0

    def step_rows(self, layer: str, step: int) -> int:
        """The number of slots of a layer in a step."""
        return sum(end - begin for _, begin, end in self._slots_of_step(layer, step))

    def step_block(self, layer: str, step: int) -> Block | None:
        """The slots of a layer in a step, with their errors; None if there are none."""
        blocks = []
        for number, begin, end in self._slots_of_step(layer, step):
            first = int(self._ends(layer)[number - 1]) if number else 0
            blocks.append(
                self._block(self.manifest.shards[number], layer, first, begin - first, end - first, errors=True)
            )
        return join_blocks(blocks) if blocks else None

    def _slots_of_step(self, layer: str, step: int) -> list[tuple[int, int, int]]:
        """Where the slots of a step lie: the number of a shard, and the first slot and the end in the layer.

        There is one shard for each process that had slots in this step.
        """
        calls, first_calls, ranges = self.calls(layer), self._first_calls(layer), []
        for number in np.flatnonzero((self._step_ranges[0] <= step) & (step <= self._step_ranges[1])).tolist():
            first, last = first_calls[number : number + 2]
            begin, end = first + np.searchsorted(calls.step[first:last], [step, step + 1])
            if begin < end:
                ranges.append((number, int(calls.start[begin]), int(calls.start[end - 1] + calls.rows[end - 1])))
        return ranges

    @cached_property
    def _step_ranges(self) -> Int[np.ndarray, "2 s"]:
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
        """The number of slots of a layer up to the end of each shard."""
        return self.cache.slot_ends(
            layer, lambda: np.cumsum([shard.slots.get(layer, 0) for shard in self.manifest.shards])
        )

    def _block(self, shard: Shard, layer: str, first: int, begin: int, end: int, errors: bool) -> Block:
        """Slots ``begin`` to ``end`` of a shard, whose first slot is slot ``first`` of the layer."""
        tensors, cut = self._shard_tensors(shard), slice(begin, end)

        def scale(row_kind: RowKind) -> Tensor | None:
            exponents = tensors.get(f"{layer}.{row_kind}_exponents")
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

    def gather(self, layer: str, slots: Int[np.ndarray, " m"], row_kind: RowKind = "error") -> Float[Tensor, "m d"]:
        """The errors (or keys) of single slots."""
        return self.gather_rows(layer, slots, (row_kind,))[0]

    def gather_rows(
        self, layer: str, slots: Int[np.ndarray, " m"], row_kinds: Sequence[RowKind]
    ) -> list[Float[Tensor, "m _"]]:
        """The keys and errors of single slots; each shard is read once."""
        ends = self._ends(layer)
        info, _ = self.layer(layer)
        sizes = {"key": info.key_size, "error": info.d_out}
        out = [torch.empty(len(slots), sizes[row_kind], dtype=self.compute) for row_kind in row_kinds]
        shard_numbers = np.searchsorted(ends, slots, side="right")
        for i in np.unique(shard_numbers):
            shard = self.manifest.shards[i]
            places = np.flatnonzero(shard_numbers == i)
            local = torch.from_numpy(slots[places] - (ends[i - 1] if i else 0))
            tensors = self._shard_tensors(shard)
            for row_kind, gathered in zip(row_kinds, out, strict=True):
                rows = tensors[f"{layer}.{row_kind}s"][local].to(self.compute)
                exponents = tensors.get(f"{layer}.{row_kind}_exponents")
                scale = None if exponents is None else row_scale(exponents[local], self.compute)
                gathered[torch.from_numpy(places)] = rows if scale is None else rows * scale.unsqueeze(1)
        return out

    def _shard_tensors(self, shard: Shard) -> dict[str, Tensor]:
        if self._supply is not None:
            return self._supply(shard)
        file = shard.file("shards")
        assert file is not None
        return self._tensors(file)

    def _tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file, mapped once, after its checksum was verified."""
        if name not in self._mapped:
            if name in self._files:
                verify(self.path / name, self._files[name], content=True)
            with outside_inference_mode():
                self._mapped[name] = map_tensors(self.path / name)
        return self._mapped[name]

    def initial(self, name: str) -> Tensor:
        """The initial value of a parameter or buffer."""
        first = self._tensors(INIT).get(name)
        if first is None and name in self.manifest.frozen:  # stored when it was passed to an optimiser
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
        """The frozen parameters of which the memory holds only fingerprints up to a step."""
        return [name for name in self.manifest.frozen if self._snapshots.last(name, step) is None]

    def initial_states(self, name: str) -> dict[str, Tensor]:
        """The initial optimiser state of a parameter."""
        rule = self.rules.get(self.parameters[name].rule or "")
        states = {key: self.initial_state(name, key) for key in ("buffer", *(rule.shared if rule else ()))}
        return {key: tensor for key, tensor in states.items() if tensor is not None}

    def initial_state(self, name: str, key: str) -> Tensor | None:
        """One tensor of the initial optimiser state of a parameter ("buffer", or by its own name), if there was one."""
        return self._tensors(INIT).get(f"{name}#{key}")

    @cached_property
    def _snapshots(self) -> Snapshots:
        return Snapshots(self.manifest, self._tensors)

    def snapshot(self, name: str, step: int) -> Tensor:
        """A tensor that is stored in snapshots, as it was after ``step``."""
        self._snapshots.need(name, step)
        return self.last_kept(name, step)

    def last_kept(self, name: str, step: int) -> Tensor:
        """The last snapshot of a tensor up to ``step``, else its initial value."""
        snapshot = self._snapshots.last(name, step)
        return self.initial(name) if snapshot is None else snapshot

    def kept_at(self, name: str, step: int) -> Tensor | None:
        """The snapshot of a tensor at exactly this step; None if there is none."""
        return self._snapshots.last(name, step) if self._snapshots.has(name, step) else None

    @property
    def kept_steps(self) -> list[int]:
        """The steps that have a snapshot of any tensor."""
        return self._snapshots.steps

    def weights_kept_at(self, step: int) -> bool:
        """Whether there are snapshots of all explained parameters at this step (the end)."""
        return all(self._snapshots.has(p.name, step) for p in self.manifest.parameters if p.kind != "rest")

    def horizon(self, step: int | None) -> int:
        """The step to read the memory at: ``step`` if the memory holds it, by default the last one."""
        if step is None:
            return self.steps
        if not 0 <= step <= self.steps:
            raise HorizonError(
                f"the memory at {self.path} cannot be read at step {step}: it holds steps 0 to {self.steps}."
            )
        return int(step)


def _require_picklable(rule: Rule, path: Path) -> None:
    """Raise an error if the functions of a custom rule cannot be imported by another process."""
    try:
        pickle.dumps(rule)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise StoreError(
            f"the memory at {path} cannot be pickled with the rule '{rule.name}' that it was opened with: {error}. "
            "Define the rule's functions at the top of a module, or open the memory where it is needed: "
            "dualform.open(path, rules=[…])."
        ) from error
