"""An explorer that is being opened in the background, stage by stage, each with an estimate of its time."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dualform.explain import open_memory
from dualform.progress import in_words
from dualform.store import is_factory_name

from ..described import Described, MemoryToOpen
from ..views import ExamplePlace, Explorer, PredictionQuestion, TimedProgress, predict

READING = {".csv": 20e6, ".parquet": 60e6, ".npz": 120e6, ".json": 20e6, ".txt": 20e6}
"""Bytes a second in which files of examples are read and decoded; 300 MB/s where nothing is decoded."""

CHECKING, A_FILE = 500e6, 1e-4
"""Bytes a second of checksums, and the seconds that each file of a memory takes."""

FACTORY, NETWORK, QUESTION = 3.0, 0.5, 0.5
"""Seconds that are announced where nothing tells how long it takes: code of the user's own, a network, a question."""

SCORING = 2e-9
"""Seconds for each number of a slot that the first question reads."""


@dataclass(frozen=True)
class OpeningStage:
    """Something that has to be done before pages can be shown: ``title`` as in "reading the memory"."""

    title: str
    seconds: float
    work: Callable[[], None]


@dataclass(frozen=True)
class OpeningState:
    """What a waiting visitor sees."""

    state: str
    """opening, failed or done."""
    says: str
    """What is being done and how long it takes, or why it failed."""
    share: float
    left: float


class Opening:
    """Makes an explorer in a thread of its own. ``explorer`` is there when all stages are done."""

    def __init__(self, title: str, stages: Sequence[OpeningStage], made: Callable[[], Explorer]) -> None:
        self.title, self._stages, self._made = title, tuple(stages), made
        self.explorer: Explorer | None = None
        self.error: BaseException | None = None
        self.seconds = 0.0
        """How long it took."""
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._number = 0
        self._stage = TimedProgress(self._stages[0].seconds)
        self._whole = TimedProgress(sum(stage.seconds for stage in self._stages))
        self._looking = threading.Lock()
        self._ended = threading.Event()

    def start(self, then: Callable[["Opening"], None] | None = None) -> None:
        """Begin in the background, and call ``then`` when it is done or has failed."""

        def run() -> None:
            self.run()
            if then is not None and not self._is_stopped:
                then(self)

        self._thread = threading.Thread(target=run, name="dualform opening", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Do all stages, one after the other. An error ends them and is kept."""
        self._whole.begin()
        try:
            for number, stage in enumerate(self._stages):
                if self._is_stopped:
                    return
                with self._looking:
                    self._number, self._stage = number, TimedProgress(stage.seconds)
                    self._stage.begin()
                stage.work()
            self.explorer = self._made()
        except BaseException as error:
            self.error = error
        finally:
            self.seconds = self._whole.elapsed
            self._ended.set()

    def stop(self, wait: float = 2.0) -> bool:
        """Begin no other stage. Whether the present one ended within some seconds."""
        self._is_stopped = True
        if self._thread is None:
            return True
        self._thread.join(wait)
        return not self._thread.is_alive()

    def wait(self) -> Explorer:
        """Wait until it is open; the error if it cannot be opened."""
        self._ended.wait()
        if self.error is not None:
            raise self.error
        assert self.explorer is not None
        return self.explorer

    def state(self) -> OpeningState:
        """What is being done now, and how long it will take."""
        if self.error is not None:
            return OpeningState("failed", str(self.error) or type(self.error).__name__, 0.0, 0.0)
        if self.explorer is not None:
            return OpeningState("done", "", 1.0, 0.0)
        with self._looking:
            number, count = self._number, len(self._stages)
            left = self._stage.left + sum(later.seconds for later in self._stages[number + 1 :])
            self._whole.seconds = self._whole.elapsed + left
            title = self._stages[number].title
            says = f"{title[:1].upper()}{title[1:]} ({number + 1} of {count}) … about {in_words(max(1.0, left))} left"
            return OpeningState("opening", says, self._whole.share, left)


def opening_from_disk(source: MemoryToOpen, others: Sequence[Path] = ()) -> Opening:
    """The opening of a memory of which only the manifest was read: memory, network, examples, a first question.

    ``others`` are memories of the same network, to compare with.
    """
    opened = _Opened(source, others)
    stages = [
        OpeningStage("reading the memory", _seconds_of_memory(source), opened.read_memory),
        OpeningStage("making the network", _seconds_of_network(source), opened.make_network),
    ]
    if (name := source.name_of("train")) is not None:
        stages.append(OpeningStage("reading the training examples", _seconds_of(name), opened.read_training))
    if (name := source.name_of("test")) is not None:
        stages.append(OpeningStage("reading the examples to ask about", _seconds_of(name), opened.read_tests))
    stages.append(OpeningStage("answering a first question", _seconds_of_question(source), opened.ask))
    return Opening(source.path.name, stages, opened.explorer)


class _Opened:
    """What the stages have read so far."""

    def __init__(self, source: MemoryToOpen, others: Sequence[Path]) -> None:
        self.source, self.others = source, others
        self._described: Described | None = None
        self._explorer: Explorer | None = None

    @property
    def described(self) -> Described:
        assert self._described is not None
        return self._described

    def read_memory(self) -> None:
        self._described = self.source.open()

    def make_network(self) -> None:
        _ = self.described.network

    def read_training(self) -> None:
        _ = self.described.train

    def read_tests(self) -> None:
        _ = self.described.test

    def ask(self) -> None:
        first_question(self.explorer())

    def explorer(self) -> Explorer:
        if self._explorer is None:
            self._explorer = self.described.explorer()
            self._explorer.compare_with(map(open_memory, self.others))
        return self._explorer


def first_question(explorer: Explorer) -> None:
    """Ask what the first page asks, so that the first visitor does not wait; longer work is announced there."""
    first = next((name for name in ("test", "train") if explorer.count(name)), None)
    if first is not None:
        predict(explorer, ExamplePlace(first, 0), PredictionQuestion())


def _seconds_of_memory(source: MemoryToOpen) -> float:
    """Tables and first weights are read and checked, of all other files only the size."""
    files = source.manifest.files
    checked = source.manifest.init.bytes + sum(
        entry.bytes for name, entry in files.items() if name.endswith(".parquet")
    )
    return 0.1 + checked / CHECKING + A_FILE * len(files)


def _seconds_of_network(source: MemoryToOpen) -> float:
    sizes = sum(parameter.size for parameter in source.manifest.parameters)
    return (NETWORK if source.is_own_network else FACTORY) + 2e-8 * sizes


def _seconds_of(name: str) -> float:
    """How long it takes to read examples, by the size and the kind of their file."""
    path = Path(name)
    if is_factory_name(name) and not path.exists():
        return FACTORY
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return 0.2 + sum(file.stat().st_size / READING.get(file.suffix, 300e6) for file in files if file.exists())


def _seconds_of_question(source: MemoryToOpen) -> float:
    manifest = source.manifest
    numbers = sum(
        shard.slots.get(layer.name, 0) * (layer.key_size + layer.d_out)
        for shard in manifest.shards
        for layer in manifest.layers
    )
    return min(5.0, QUESTION + SCORING * numbers)
