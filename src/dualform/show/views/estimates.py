"""How long questions to a memory take, from what they read and compute and from the speed of this machine."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter, thread_time

import torch

from dualform.explain import FEW_GROUPS, is_preconditioned
from dualform.store import Store
from dualform.types import LayerInfo, Score


@dataclass(frozen=True)
class MachineSpeed:
    """What this machine needs, in seconds, for three kinds of work that all questions are made of."""

    product: float
    """One multiplication and addition inside a large matrix product."""
    number: float
    """Adding one number to another one in memory."""
    call: float
    """Calling an operation on a small tensor."""

    @classmethod
    def measured(cls, loaded: bool = True) -> "MachineSpeed":
        """The speed of this process now; measuring takes about a tenth of a second.

        With ``loaded`` it is what other programs leave of this machine, else what the machine can do.
        """
        left, right, small = torch.randn(256, 1024), torch.randn(1024, 256), torch.zeros(8)
        large, other = torch.zeros(1 << 20), torch.zeros(1 << 20)
        wall, own = perf_counter(), thread_time()
        speed = cls(
            _fastest(lambda: torch.mm(left, right)) / (256 * 1024 * 256),
            _fastest(lambda: large.add_(other)) / (1 << 20),
            _fastest(lambda: [small.add_(1.0) for _ in range(200)], 40) / 200,
        )
        load = (perf_counter() - wall) / max(1e-3, thread_time() - own) if loaded else 1.0
        load = min(MOST_LOAD, max(1.0, load))
        return cls(load * speed.product, load * speed.number, load * speed.call)


MOST_LOAD = 4.0
"""What measured time may be of the time that this process computed: other programs come and go."""


def _fastest(work: Callable[[], object], times: int = 5) -> float:
    """The seconds that the fastest of some runs took, as other programs may have slowed down the others."""
    seconds = []
    for _ in range(times + 1):  # the first run allocates memory and starts threads
        start = perf_counter()
        work()
        seconds.append(perf_counter() - start)
    return max(1e-9, min(seconds[1:]))


@dataclass(frozen=True)
class AmountOfWork:
    """Products, numbers that are read or written, and calls of small operations."""

    products: float = 0.0
    numbers: float = 0.0
    calls: float = 0.0

    def __add__(self, other: "AmountOfWork") -> "AmountOfWork":
        return AmountOfWork(
            self.products + other.products, self.numbers + other.numbers, self.calls + other.calls
        )  # fmt: skip

    def __mul__(self, times: float) -> "AmountOfWork":
        return AmountOfWork(times * self.products, times * self.numbers, times * self.calls)

    def seconds(self, speed: MachineSpeed) -> float:
        """The time it takes."""
        return self.products * speed.product + self.numbers * speed.number + self.calls * speed.call


class Estimates:
    """How many seconds questions to a memory take. ``positions`` says how many rows an example has in a layer."""

    def __init__(self, store: Store, positions: Callable[[str], int]) -> None:
        self.store, self.positions = store, positions

    @cached_property
    def speed(self) -> MachineSpeed:
        """The speed of this machine, measured once."""
        return MachineSpeed.measured()

    def scan(
        self, layer: str | None, score: Score = "contribution", queries: int = 1, *, groups: int = 1, rows: int = 0
    ) -> float:  # fmt: skip
        """Seconds to score every slot of a layer (None: of all layers) for some queries, and sum scores over groups.

        A query asks with one row of the layer for each position of its example, or with as many ``rows`` as are given.
        """
        infos = self._layers(layer)
        swept = [info for info in infos if score == "contribution" and self.is_swept(info)]
        amount = self._sweep(swept, queries)
        if (
            layer is not None
        ):  # the first weights, and the groups' parts of the biases, are split off by runs of their own
            amount += self._parts(swept, 1) + self._parts(swept, groups, only_biases=True)
        for info in infos:
            if info not in swept:
                amount += self._scan_of(info, score, queries, queries * (rows or self._positions_of(info)))
        return amount.seconds(self.speed)

    def sums(self, layer: str | None, groups: int, queries: int = 1) -> float:
        """Seconds to sum contributions over the groups of a column, and nothing else.

        Many queries are cheaper through the part that each group has in the weights, where these parts fit in memory.
        """
        infos = self._layers(layer)
        weights = sum(map(self._weights, infos))
        fits, swept = 8 * groups * weights <= MOST_PARTS, any(map(self.is_swept, infos))
        through_parts = self._parts(infos, groups)
        for info in infos:
            products = groups * self._weights(info) * queries * self._positions_of(info)
            through_parts += AmountOfWork(2 * PRODUCT * products, 0.0, GROUP_CALLS * groups)  # in float64
        if fits and swept and queries > 1 and groups <= max(FEW_GROUPS, queries):
            return through_parts.seconds(self.speed)
        passes = -(-8 * groups * queries // MOST_SUMS)
        scan = self.scan(layer, "contribution", queries, groups=groups) * passes
        if swept or not fits or layer is None:
            return scan
        return min(scan, through_parts.seconds(self.speed))

    def ledger(self, groups: int) -> float:
        """Seconds to split all weights by the groups of a column."""
        return self._parts(self._layers(None), groups).seconds(self.speed)

    def rebuilding(self) -> float:
        """Seconds to sum all slots to the weights."""
        return self.ledger(1)

    def is_swept(self, info: LayerInfo) -> bool:
        """Whether contributions of a layer need a backward sweep, because its rule is preconditioned."""
        return is_preconditioned(self.store, info)

    # ------------------------------------------------------------------------------------------- amounts

    def _scan_of(self, info: LayerInfo, score: Score, queries: int, rows: int) -> AmountOfWork:
        """One pass over the slots of a layer: read and decode, two products with every row, and the sums."""
        slots = self.store.slots(info.name)
        size = info.key_size + (info.d_out if score == "contribution" else 0)
        return AmountOfWork(
            PRODUCT * slots * size * rows,
            READ * slots * size + SCORE * slots * (queries + rows),
            SCAN_CALLS + BLOCK_CALLS * self._blocks(info),
        )

    def _sweep(self, infos: list[LayerInfo], queries: int) -> AmountOfWork:
        """Training run forwards for its preconditioners, and backwards with one matrix for each query.

        It runs forwards twice where the preconditioners of all steps do not fit into memory.
        """
        amount, steps = AmountOfWork(), self.store.steps
        size = sum(map(self._weights, infos)) * self.store.compute.itemsize
        forwards = 2 if steps * size > MOST_PRECONDITIONERS else 1
        for info in infos:
            slots, weights = self.store.slots(info.name), self._weights(info)
            amount += AmountOfWork(
                PRODUCT * slots * self._columns(info) * info.d_out * (forwards + queries),
                steps * weights * (STEP * (forwards + 1) + TARGET * queries)
                + READ * slots * (info.key_size + info.d_out) * (forwards + 1)
                + SCORE * slots * queries,
                SCAN_CALLS + STEP_CALLS * steps * (forwards + 1),
            )
        return amount

    def _parts(self, infos: list[LayerInfo], groups: int, only_biases: bool = False) -> AmountOfWork:
        """The part of each group in the weights.

        Under a preconditioned rule every step takes the parts of all groups along, so they cost groups × weights ×
        steps; otherwise only slots are summed, and every group costs its weights once or a few times.
        """
        amount, steps, visits = AmountOfWork(), max(1, self.store.steps), len(self.store.visits)
        for info in infos:
            if info.in_ledger:
                continue
            slots, weights = self.store.slots(info.name), info.d_out if only_biases else self._weights(info)
            products = PRODUCT * slots * (1 if only_biases else self._columns(info)) * info.d_out
            reading = slots * (info.key_size + info.d_out)
            if self.is_swept(info):
                present = min(groups, max(1.0, visits / steps)) if groups > 1 else 0
                amount += AmountOfWork(
                    products,
                    READ * reading + steps * weights * (STEP + CARRIED * (1 + groups) + ADDED * present),
                    SCAN_CALLS + steps * (STEP_CALLS + GROUP_CALLS * present),
                )
                continue
            blocks = self._blocks(info)
            a_block = min(groups, max(1.0, visits / blocks))
            flushes = max(slots / STRETCH, groups * -(-4 * reading // WAITING))
            amount += AmountOfWork(
                products,
                READ * reading + SUMMED * weights * (flushes + groups),
                SCAN_CALLS + BLOCK_CALLS * blocks + (GROUP_CALLS * (blocks * a_block + flushes) if groups > 1 else 0),
            )
        return amount

    # ------------------------------------------------------------------------------------------- sizes

    def _layers(self, layer: str | None) -> list[LayerInfo]:
        if layer is not None:
            return [self.store.layer(layer)[0]]
        return [info for info in self.store.manifest.layers if info.keep != "nothing"]

    def _positions_of(self, info: LayerInfo) -> int:
        return max(self.positions(module.name) for module in info.modules)

    def _weights(self, info: LayerInfo) -> int:
        return sum(self.store.parameters[name].size for name in info.weights)

    def _columns(self, info: LayerInfo) -> int:
        """The numbers of a key that a product reads; the keys of an embedding are row numbers."""
        return 1 if info.indexed else info.width

    def _blocks(self, info: LayerInfo) -> int:
        """How many blocks a pass reads: at least one from each shard."""
        rows = self.store.block_rows(info.name)
        return sum(-(-count // rows) for count in self._shards(info)) or 1

    def _shards(self, info: LayerInfo) -> Iterator[int]:
        for shard in self.store.manifest.shards:
            if shard.slots.get(info.name):
                yield shard.slots[info.name]


MOST_PARTS, MOST_SUMS, MOST_PRECONDITIONERS = 4 << 30, 1 << 30, 1 << 28
"""The most bytes of parts of the weights, of sums (queries × groups) and of preconditioners in memory at a time."""

STRETCH, WAITING = 512, 64 << 20
"""How many slots of a group, and how many bytes of slots, wait until they are summed in one product."""

# Factors between the bare amounts and what the passes really need, fitted to measured questions.
PRODUCT = 1.2
READ, SCORE = 12.0, 27.0
"""Numbers that count for reading and decoding one number, and for one score in all sums."""
SCAN_CALLS, BLOCK_CALLS, STEP_CALLS, GROUP_CALLS = 2600.0, 800.0, 260.0, 33.0
"""Calls for a pass over a layer, a block of slots, a step of training run again, and a group in one of these."""
STEP, TARGET, CARRIED, ADDED, SUMMED = 23.0, 22.0, 59.0, 7.0, 3.0
"""Numbers that count for one weight: in a step, in a query, in a group that a step takes along, that a step adds to,
and that a pass sums."""
