"""Work that takes long: announced with an estimate, run in the background, its progress shown, its result cached."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, is_dataclass
from hashlib import blake2b
from typing import Any, TypeVar

from dualform.errors import DualformError, QueryError
from dualform.progress import Progress, in_words

from .timed_progress import TimedProgress

WorkResult = TypeVar("WorkResult")

PATIENCE, SOON = 2.5, 20.0
"""Work that is estimated to take at most ``PATIENCE`` seconds runs inside the request. Up to ``SOON`` seconds it starts
by itself when its page is opened, and above that when somebody asks for it."""

UNWATCHED = 15.0
"""Work that started by itself leaves the line if nobody has looked at it for so many seconds."""

MOST_PENDING, MOST_IN_LINE = 64, 8
"""The most pieces of work that are pending at a time, and the length of the line that none joins by itself."""

MOST_RESULTS, LARGE_RESULTS = 256, {"ledger": 3, "without": 8}
"""The most results that are cached; fewer of the kinds that hold weights. The kind is the first part of a key."""

WORTH_LEARNING, MOST_WRONG = 0.3, 10.0
"""Estimates are corrected by work of at least so many seconds, and by at most this factor."""

log = logging.getLogger("dualform")


class WorkStopped(Exception):
    """Ends work that somebody stopped, at its next report of progress."""


@dataclass
class PendingWork:
    """Work whose result is not there yet: its estimated time and its progress, as of the last look."""

    name: str
    what: str
    seconds: float
    state: str = "waiting"
    """waiting (nobody started it), queued, running, stopped, failed, or done."""
    share: float = 0.0
    left: float = 0.0
    """Estimated seconds until it is done, with the work that is in line before it."""
    place: int = 0
    """Its place in line: 0 if it runs, 1 if it is next."""
    error: str = ""

    def __post_init__(self) -> None:
        self.progress = TimedProgress(self.seconds)
        self.left = self.seconds
        self.looked, self.by_itself, self.is_stopped = time.monotonic(), False, False

    @property
    def is_under_way(self) -> bool:
        """Whether it is in line or runs."""
        return self.state in ("queued", "running")

    @property
    def says(self) -> str:
        """How far it is, in words."""
        if self.state == "queued":
            ordinal = {1: "next", 2: "2nd", 3: "3rd"}.get(self.place, f"{self.place}th")
            return f"{ordinal} in line, ready in about {in_words(max(1.0, self.left))}"
        if self.state == "running":
            return "stopping …" if self.is_stopped else f"about {in_words(max(1.0, self.left))} left"
        return {"failed": self.error, "stopped": "stopped"}.get(self.state, "")

    def show_progress(self, stage: str, done: int, total: int) -> None:
        """The progress callback of the work while it runs; it raises an error if somebody stopped the work."""
        if self.is_stopped:
            raise WorkStopped
        self.progress.report(done / max(1, total))


def pending_in(view: Any) -> list[PendingWork]:
    """All pending work that a view shows."""
    if isinstance(view, PendingWork):
        return [view]
    if isinstance(view, list | tuple):
        parts = [part for part in view if is_dataclass(part)]
    else:
        parts = [getattr(view, part.name) for part in fields(view)] if is_dataclass(view) else []
    return [pending for part in parts for pending in pending_in(part)]


class WorkQueue:
    """Caches results and runs long work in one background thread.

    Work above ``patience`` seconds waits until somebody starts it. With ``patience=inf`` all work runs at once, and
    ``progress`` says how its progress is shown. Estimates are corrected by the time that finished work took.
    """

    def __init__(self, patience: float = PATIENCE, progress: Progress = False) -> None:
        self.patience, self.progress = patience, progress
        self.results: OrderedDict[Hashable, Any] = OrderedDict()
        self.pending: dict[str, tuple[PendingWork, Hashable, Callable[[Progress], Any]]] = {}
        self._estimated: dict[str, float] = {}
        self._pace: dict[str, float] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._line: list[str] = []
        self._behind: list[str] = []
        self._running: PendingWork | None = None
        self._worker: threading.Thread | None = None
        self._closed = False

    # ------------------------------------------------------------------------------------------- results

    def result(
        self, key: Hashable, title: str, seconds: float, work: Callable[[Progress], WorkResult]
    ) -> "WorkResult | PendingWork":  # fmt: skip
        """The cached result of a key; else run the work now if it is quick, or return it as pending."""
        with self._lock:
            if key in self.results:
                self.results.move_to_end(key)
                return self.results[key]
            name = blake2b(repr(key).encode(), digest_size=8).hexdigest()
            if name in self.pending:
                return self._seen(name)
            said = seconds * self._pace.get(_kind(key), 1.0)
            if said > self.patience:
                self._drop_idle()
                self.pending[name] = PendingWork(name, title, said), key, work
                self._estimated[name] = seconds
                return self._seen(name)
        begun = time.perf_counter()
        answer = work(self.progress)
        self._learn(key, seconds, time.perf_counter() - begun)
        return self._cache(key, answer)

    def latest(self, *beginning: Hashable) -> list[Any]:
        """The most recent result whose key begins so, in a list; an empty list if there is none."""
        with self._lock:
            keys = [key for key in self.results if isinstance(key, tuple) and key[: len(beginning)] == beginning]
            return [self.results[keys[-1]]] if keys else []

    # ------------------------------------------------------------------------------------------- the line

    def start(self, name: str, *, by_itself: bool = False, behind: bool = False) -> PendingWork | None:
        """Put pending work into the line; None if there is no work of that name (it may be done).

        What starts ``by_itself`` was not asked for: it does not join a long line nor follow a failure, and leaves the
        line when nobody looks at it any longer. What is ``behind`` runs when there is nothing else to do.
        """
        with self._lock:
            if name not in self.pending:
                return None
            pending = self.pending[name][0]
            allowed = ("waiting",) if by_itself else ("waiting", "stopped", "failed")
            is_refused = by_itself and (pending.seconds > SOON or len(self._line) >= MOST_IN_LINE)
            if pending.state in allowed and not is_refused and not self._closed:
                pending.state, pending.error, pending.is_stopped, pending.by_itself = "queued", "", False, by_itself
                (self._behind if behind else self._line).append(name)
                if self._worker is None:
                    self._worker = threading.Thread(target=self._work, name="dualform work", daemon=True)
                    self._worker.start()
                self._changed.notify_all()
            elif name in self._behind and not behind:
                self._behind.remove(name)
                self._line.append(name)
            elif pending.is_under_way and not by_itself:
                pending.by_itself = False
            return self._seen(name)

    def stop(self, name: str) -> PendingWork | None:
        """Take work out of the line, or stop it at its next report of progress; None if there is no such work."""
        with self._lock:
            if name not in self.pending:
                return None
            pending = self.pending[name][0]
            if pending.state == "queued":
                self._leave_line(name)
                pending.state = "stopped"
            elif pending.state == "running":
                pending.is_stopped = True
            return self._seen(name)

    def state(self, name: str) -> PendingWork | None:
        """The state of pending work; None if nothing of that name waits or runs."""
        with self._lock:
            return self._seen(name) if name in self.pending else None

    def is_busy(self) -> bool:
        """Whether work runs or is in line."""
        with self._lock:
            return self._running is not None or bool(self._line or self._behind)

    def close(self, wait: float = 10.0) -> None:
        """Stop all work, start nothing more, and wait some seconds until what runs has noticed it.

        Python ends badly while another thread computes.
        """
        with self._lock:
            self._closed = True
            for name in [*self._line, *self._behind]:
                self._leave_line(name)
                self.pending[name][0].state = "stopped"
            if self._running is not None:
                self._running.is_stopped = True
            self._changed.notify_all()
            worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join(wait)

    # ------------------------------------------------------------------------------------------- inside

    def _seen(self, name: str) -> PendingWork:
        """Pending work with its progress as of now."""
        pending = self.pending[name][0]
        pending.looked = time.monotonic()
        pending.place, before = 0, 0.0
        if pending.state == "queued":
            line = [*self._line, *self._behind]
            place = line.index(name)
            before = sum(self.pending[other][0].seconds for other in line[:place])
            if self._running is not None:
                before += self._running.progress.left
            pending.place = place + 1
        is_running = pending.state == "running"
        pending.share = pending.progress.share if is_running else 0.0
        pending.left = pending.progress.left if is_running else before + pending.seconds
        return pending

    def _leave_line(self, name: str) -> None:
        for line in (self._line, self._behind):
            if name in line:
                line.remove(name)

    def _drop_idle(self) -> None:
        """Drop the oldest work that nobody started, as long as too much is pending."""
        while len(self.pending) >= MOST_PENDING:
            idle = next((name for name, (pending, *_) in self.pending.items() if not pending.is_under_way), None)
            if idle is None:
                raise QueryError("too much work is running at once. Wait until some of it is done.")
            del self.pending[idle]
            self._estimated.pop(idle, None)

    def _cache(self, key: Hashable, value: WorkResult) -> WorkResult:
        """Cache a result, and drop the oldest ones above the limit."""
        with self._lock:
            self.results[key] = value
            while len(self.results) > MOST_RESULTS:
                self.results.popitem(last=False)
            kind = _kind(key)
            alike = [cached for cached in self.results if isinstance(cached, tuple) and cached[0] == kind]
            for oldest in alike[: max(0, len(alike) - LARGE_RESULTS.get(kind, MOST_RESULTS))]:
                del self.results[oldest]
        return value

    def _learn(self, key: Hashable, estimated: float, took: float) -> None:
        """Correct the next estimates of a kind by half of what this one was wrong, as a ratio."""
        if estimated <= 0 or max(estimated, took) < WORTH_LEARNING:
            return
        kind, ratio = _kind(key), took / estimated
        with self._lock:
            corrected = (self._pace.get(kind, 1.0) * ratio) ** 0.5
            self._pace[kind] = min(MOST_WRONG, max(1 / MOST_WRONG, corrected))

    def _work(self) -> None:
        """Run what is in line, until the queue is closed."""
        while True:
            with self._lock:
                while not (self._line or self._behind or self._closed):
                    self._changed.wait()
                if self._closed:
                    return
                name = (self._line or self._behind).pop(0)
                pending = self.pending[name][0]
                if pending.by_itself and time.monotonic() - pending.looked > UNWATCHED:
                    pending.state = "waiting"
                    continue
                pending.state, self._running = "running", pending
                pending.progress.begin()
            try:
                self._run(name)
            finally:
                with self._lock:
                    self._running = None

    def _run(self, name: str) -> None:
        pending, key, work = self.pending[name]
        try:
            self._cache(key, work(pending.show_progress))
        except WorkStopped:
            pending.state = "stopped"
            return
        except (DualformError, RuntimeError, OSError) as error:
            pending.state, pending.error = "failed", str(error)
            return
        except Exception as error:  # a visitor would wait forever for what has died silently
            log.exception("%s failed", pending.what, exc_info=error)
            pending.state, pending.error = "failed", "this is a bug in dualform. See the terminal of the explorer."
            return
        self._learn(key, self._estimated.get(name, pending.seconds), pending.progress.elapsed)
        with self._lock:
            pending.progress.end()
            pending.state, pending.share, pending.left = "done", 1.0, 0.0
            self.pending.pop(name, None)
            self._estimated.pop(name, None)


def _kind(key: Hashable) -> str:
    """The kind of work: the first part of its key."""
    return str(key[0]) if isinstance(key, tuple) and key else ""


class SharedQueue(WorkQueue):
    """The work queue of another memory: work goes to the queue of the first one, under keys that end with a name."""

    def __init__(self, first: WorkQueue, name: str) -> None:
        super().__init__(first.patience, first.progress)
        self._first, self._name = first, name

    def result(
        self, key: Hashable, title: str, seconds: float, work: Callable[[Progress], WorkResult]
    ) -> "WorkResult | PendingWork":  # fmt: skip
        """The result, from the first queue."""
        parts = key if isinstance(key, tuple) else (key,)
        return self._first.result((*parts, self._name), title, seconds, work)

    def latest(self, *beginning: Hashable) -> list[Any]:
        """The most recent result of this memory whose key begins so."""
        with self._first._lock:
            keys = [key for key in self._first.results if isinstance(key, tuple) and key[-1] == self._name]
            keys = [key for key in keys if key[: len(beginning)] == beginning]
            return [self._first.results[keys[-1]]] if keys else []
