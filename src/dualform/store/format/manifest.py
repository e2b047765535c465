"""The format of a memory on disk, described well enough for another program to read it.

A memory is a folder::

    manifest.json                the content of the memory; written last: a file counts once it is listed here
    init.safetensors             the initial value of every parameter and buffer of the model (by its name), and the
                                 initial optimiser state of each recorded parameter: its buffer M ("<name>#buffer") and
                                 the state that all examples share ("<name>#exp_avg_sq").
                                 The first tensor is empty and named "#dualform-memory", so that the folder is
                                 recognised without a manifest. Large frozen parameters (no gradient, in no optimiser)
                                 are not stored: "frozen" in the manifest has a fingerprint of each, and a question
                                 takes their weights from the user's model
    shards/000000.safetensors    for each layer L the slots of consecutive steps: "L.keys" (rows, d_in), "L.errors"
                                 (rows, d_out); the keys of an embedding are token numbers
                                 (rows, 1) in int32; in float16 also "L.error_exponents" and, where needed,
                                 "L.key_exponents" (rows,): the row is multiplied by 2**exponent. Every tensor begins on
                                 a page of 4096 bytes; "#pad1", "#pad2", … between them are zeros
    calls/000000.parquet         which rows belong to which step, module, visits: one line per call (columns below)
    visits/000000.parquet        one line per visit: visit, step, row (its index in the batch), then the noted columns
    steps/000000.parquet         one line per step and parameter: the transition (ww wm mw mm wg mg wp mp pw pm pg), the
                                 gradient scale, the optimiser's settings ("opt_lr", "opt_step", …), the machine
                                 precision of the gradient (gradient_eps), and a few entries of the parameter and of
                                 its optimiser state after the step
    snapshots/000000.safetensors the rest: "<name>@<step>" for parameters and buffers that no rule explains; all
                                 parameters at the end; and from time to time parameters under a preconditioned rule,
                                 with their optimiser state ("<name>#buffer@<step>"). If a frozen parameter is passed
                                 to an optimiser later, its initial value is stored then, as "<name>@0"
    ledger/000100.safetensors    the ledger after a step: "<name>#parts" (1 + groups, *shape), first what is left of the
                                 initial weights, and the same for the optimiser's buffer, "<name>#buffers"
    run_log/000000.parquet       only in a memory that keeps what training needs to run again: one line per step and
                                 parameter group (step, optimizer, group), with the settings of the group ("opt_lr", …),
                                 the norm of a few entries of two gradients of the step ("gradient"), and a checksum of
                                 the trained weights after it ("weights_checksum", see ``WeightsChecksum``)
    states/000100.safetensors    a whole state after a step, as often as the budget allows: parameters and buffers by
                                 name, the optimiser's state of each ("<name>#exp_avg"; numbers: "<name>#step#number"),
                                 and the state of torch's generator ("#generator")
    generators/000000.safetensors
                                 the state of torch's generator before the backward pass whose first visit is v ("v"),
                                 where the training loop moved it since the pass before
    ranks/0001/                  the part of process 1, if several processes recorded ("ranks" in the manifest): its
                                 shards, calls, visits and its part of a ledger, with a manifest of its own. A step
                                 counts when all processes hold it; the parts of a ledger are added up

The rows of a call are in memory order over its leading axes (pre, batch, stride): row r of a call belongs to visit
``visit + (r // stride) % batch`` and position ``(r // (stride * batch)) * stride + r % stride`` (visit −1: unknown).
Its coefficient is ``c_step × factor`` in the weight and ``c_step × bias_factor`` in the bias, where c comes from a
backward sweep over the transitions of that parameter (rules/sweep.py).

The rest is checked after every ``snapshot_every``-th step and after the last step of a shard; tensors that changed
since the last check are stored.

Only the steps ``first … last`` in the manifest's entry of a shard count; a resume dropped later lines of its files. A
shard may hold only snapshots: the parameters at the end, or the rest at a step that was resumed from and had not been
checked. ``checksum``, on the first line of the manifest, is the xxh3-128 of all lines after it.

``ended`` says how the recording ended: ``{"how": "closed", "step": 300, "by": ""}``, or "interrupted" with the name of
the exception (Ctrl-C is a KeyboardInterrupt). It is null while recording goes on, and stays so after a kill.

``survey`` lists the passes of a survey (one pass over the examples for each checkpoint of a network that was trained
before): the learning rate of the checkpoint and its first and last step. The steps of a survey are batches, and no
weight changes in them. In a recorded training the list is empty.

``recipe`` says how the model is made and where its examples are, as plain text: ``model`` (package.module:factory),
``train``, ``test`` and ``tokenizer`` (each has a ``file``, relative to this folder where possible, or a ``factory``),
``classes``, ``columns`` of a table (names in order, label, words of categories, classes, mean and deviation of scaled
ones), ``index`` and ``length``. It is null if nobody described the memory. Whoever reads it must not run what it names
without asking. ``command`` is the command that recorded, for people to read.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from dualform.errors import CorruptMemory, FormatVersionError, MemoryNotFound, NotAMemory
from dualform.types import DType, Ended, LayerInfo, Mark, ModuleInfo, ParameterInfo, Piece

from ..io import FileEntry, retry_while_in_use, write_bytes
from .ledger_file import LedgerEntry
from .recipe import Recipe, recipe_of_json
from .run_log import Modes, OptimizerInfo, RunLog, StateEntry

NAME = "manifest.json"
FORMAT = "dualform-memory"
VERSION = 2


@dataclass(frozen=True)
class Shard:
    """Consecutive complete steps, and the files that hold them."""

    number: int
    first: int
    last: int
    visits: int
    slots: Mapping[str, int]
    files: Mapping[str, FileEntry]

    def file(self, kind: str) -> str | None:
        """The file of a kind ("calls", "snapshots", …), if there is one."""
        return next((name for name in self.files if name.rsplit("/", 2)[-2] == kind), None)


@dataclass(frozen=True)
class SurveyPass:
    """One pass of a survey: the learning rate of its checkpoint, and the numbers of its first and last batch."""

    learning_rate: float
    first: int
    last: int


@dataclass(frozen=True)
class Manifest:
    """The content of a memory: layers, parameters, shards, marks and the certificate."""

    dtype: DType
    layers: tuple[LayerInfo, ...]
    parameters: tuple[ParameterInfo, ...]
    columns: Mapping[str, str] = field(default_factory=dict)
    init: FileEntry = field(default_factory=lambda: FileEntry(0, ""))
    shards: tuple[Shard, ...] = ()
    marks: tuple[Mark, ...] = ()
    certificate: Mapping[str, Any] | None = None
    snapshot_every: int = 1
    by: str | None = None
    """The column whose values are the groups of the ledger."""
    ledgers: tuple[LedgerEntry, ...] = ()
    """The last two ledgers."""
    frozen: Mapping[str, str] = field(default_factory=dict)
    """The fingerprints of frozen parameters that are not stored (xxh3-64 of their bytes, hexadecimal)."""
    rank: int = 0
    """The rank of the process that wrote this part."""
    ranks: int = 1
    """The number of processes that recorded together."""
    demoted: tuple[str, ...] = ()
    """Parameters that were moved to the rest because, in training, no linear map of their layer used them."""
    versions: Mapping[str, str] = field(default_factory=dict)
    ended: Ended | None = None
    """How the recording ended; None while it goes on, and after a kill."""
    run_log: RunLog | None = None
    """What is kept so that training can be run again, besides its tables."""
    survey: tuple[SurveyPass, ...] = ()
    """The passes of a survey; none in a recorded training."""
    recipe: Recipe | None = None
    """How the model is made and where its examples are, if the user said it."""
    command: str = ""
    """The command that recorded, as one would type it; empty where there was none."""

    @property
    def steps(self) -> int:
        """The last complete step."""
        return self.shards[-1].last if self.shards else 0

    @property
    def files(self) -> dict[str, FileEntry]:
        """The files of all shards."""
        return {name: entry for shard in self.shards for name, entry in shard.files.items()}

    @property
    def visits(self) -> int:
        """The number of visits in all steps."""
        return sum(shard.visits for shard in self.shards)

    @property
    def ending(self) -> str:
        """A sentence on how the recording ended; empty if it was closed."""
        if self.ended is None:
            return f"Recording was not closed: it goes on, or was killed. Step {self.steps} is the last one on disk."
        if self.ended.how != "interrupted":
            return ""
        return (
            f"Recording was interrupted ({self.ended.by}): the memory ends with the last complete step, {self.steps}."
        )

    def upto(self, step: int, shards: Iterable[Shard]) -> "Manifest":
        """The manifest up to ``step``: with these shards, and with the marks and ledgers up to then."""
        shards = tuple(shards)
        return replace(
            self,
            shards=shards,
            columns=self.columns if shards else {},
            marks=tuple(mark for mark in self.marks if mark.first_step <= step),
            certificate=self.certificate if step == self.steps else None,
            ledgers=tuple(entry for entry in self.ledgers if entry.step <= step),
            ended=None,
            run_log=None if self.run_log is None else self.run_log.upto(step),
        )

    def save(self, folder: Path) -> None:
        """Write the manifest: the files it lists count from then on. One line for each field and each shard."""
        fields = {"format": FORMAT, "version": VERSION, "steps": self.steps, "visits": self.visits}
        fields |= {name: value for name, value in vars(self).items() if name != "shards"}
        lines = [f"{json.dumps(name)}: {json.dumps(value, default=_fields)}" for name, value in fields.items()]
        shards = ",\n  ".join(_shard_text(shard) for shard in self.shards)
        body = ",\n ".join([*lines, f'"shards": [\n  {shards}]']) + "}\n"
        head = f'{{"checksum": "{xxhash.xxh3_128_hexdigest(body.encode())}",\n '
        write_bytes(folder / NAME, (head + body).encode())


SPELLINGS = {"transposed": "turned"}
"""Fields that have another name in the file than in the code: names in the file never change."""


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass (and of those inside it) under their names in the file."""
    return asdict(value, dict_factory=lambda fields: {SPELLINGS.get(name, name): content for name, content in fields})


@lru_cache(maxsize=1 << 16)
def _cached_shard_text(number: int, first: int, last: int, visits: int, rest: tuple) -> str:
    slots, files = rest
    value = {
        "number": number, "first": first, "last": last, "visits": visits, "slots": dict(slots),
        "files": {name: asdict(entry) for name, entry in files},
    }  # fmt: skip
    return json.dumps(value)


def _shard_text(shard: Shard) -> str:
    """The line of a shard, cached because it is written again with every manifest."""
    rest = tuple(shard.slots.items()), tuple(shard.files.items())
    return _cached_shard_text(shard.number, shard.first, shard.last, shard.visits, rest)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest in a folder; raise an error that says why if that is impossible."""
    if not folder.exists():
        raise MemoryNotFound(
            f"there is no memory at {folder}: no such folder. Record one with dualform.record(model, optimizer, path)."
        )
    file = folder / NAME
    if not file.is_file():
        names = sorted(p.name for p in folder.iterdir())[:4] if folder.is_dir() else "a file"
        raise NotAMemory(f"{folder} is not a dualform memory: it has no {NAME} (found: {names or 'nothing'}).")
    try:
        text = retry_while_in_use(lambda: file.read_text(encoding="utf-8"))
        value = json.loads(text)
    except (ValueError, UnicodeDecodeError) as error:
        raise CorruptMemory(f"{file} is not valid JSON ({error}). Restore it from a copy.") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise NotAMemory(f"{folder} is not a dualform memory: its {NAME} does not say format '{FORMAT}'.")
    if value.get("version") != VERSION:
        raise FormatVersionError(
            f"the memory at {folder} has format version {value.get('version')!r}; this dualform reads {VERSION}. "
            "Open it with the version that wrote it, or upgrade: pip install -U dualform"
        )
    checksum = value.pop("checksum", None)
    if checksum != xxhash.xxh3_128_hexdigest(text.partition("\n ")[2].encode()):
        raise CorruptMemory(
            f"{file} does not have the checksum that it states ({checksum}): it was changed. Restore it from a copy."
        )
    return _manifest(value)


def _manifest(value: Mapping[str, Any]) -> Manifest:
    return Manifest(
        dtype=value["dtype"],
        layers=tuple(_layer(v) for v in value["layers"]),
        parameters=tuple(ParameterInfo(**{**v, "shape": tuple(v["shape"])}) for v in value["parameters"]),
        columns=value["columns"],
        init=FileEntry(**value["init"]),
        shards=tuple(_shard(v) for v in value["shards"]),
        marks=tuple(Mark(**v) for v in value["marks"]),
        certificate=value["certificate"],
        snapshot_every=value["snapshot_every"],
        by=value["by"],
        ledgers=tuple(_ledger(v) for v in value["ledgers"]),
        frozen=value.get("frozen", {}),
        rank=value.get("rank", 0),
        ranks=value.get("ranks", 1),
        demoted=tuple(value.get("demoted", ())),
        versions=value["versions"],
        ended=_ended(value),
        run_log=_run_log(value.get("run_log")),
        survey=tuple(SurveyPass(**v) for v in value.get("survey", ())),
        recipe=recipe_of_json(value.get("recipe")),
        command=str(value.get("command", "")),
    )


def _ended(value: Mapping[str, Any]) -> Ended | None:
    if "ended" not in value:  # written by a version that did not store this
        return Ended("unknown", value["steps"])
    return None if value["ended"] is None else Ended(**value["ended"])


def _run_log(value: Mapping[str, Any] | None) -> RunLog | None:
    if value is None:
        return None
    optimizers = tuple(OptimizerInfo(v["kind"], tuple(map(tuple, v["groups"]))) for v in value["optimizers"])
    modes = tuple(Modes(v["step"], tuple(v["evaluating"]), tuple(v["without_gradient"])) for v in value["modes"])
    states = tuple(StateEntry(v["step"], v["name"], FileEntry(**v["file"])) for v in value["states"])
    return RunLog(value["only"], value["threads"], optimizers, modes, value["broken"], states)


def _layer(value: Mapping[str, Any]) -> LayerInfo:
    modules = (ModuleInfo(**{**module, "biases": tuple(module["biases"])}) for module in value["modules"])
    names = {spelling: name for name, spelling in SPELLINGS.items()}
    pieces = (
        Piece(**{names.get(str(name), str(name)): content for name, content in piece.items()})
        for piece in value["pieces"]
    )
    return LayerInfo(**{**value, "modules": tuple(modules), "pieces": tuple(pieces)})


def _ledger(value: Mapping[str, Any]) -> LedgerEntry:
    lists = {name: tuple(value[name]) for name in ("groups", "visits")}
    return LedgerEntry(**{**value, **lists, "file": FileEntry(**value["file"])})


def _shard(value: Mapping[str, Any]) -> Shard:
    return Shard(**{**value, "files": {name: FileEntry(**entry) for name, entry in value["files"].items()}})
