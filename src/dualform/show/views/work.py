"""Work that takes long: announced with an estimate, run in the background, its progress shown, its result cached."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

from dualform.errors import DualformError, QueryError
from dualform.progress import Progress

WorkResult = TypeVar("WorkResult")

PATIENCE = 2.5
"""Work that is estimated to take at most this many seconds runs inside the request."""

MOST_PENDING = 64
"""The most pieces of work that wait or run at a time."""

MOST_RESULTS, LARGE_RESULTS = 256, {"ledger": 3, "without": 8}
"""The most results that are cached; fewer of the kinds that hold weights. The kind is the first part of a key."""


@dataclass
class PendingWork:
    """Work whose result is not there yet: its estimated time and its progress."""

    name: str
    what: str
    seconds: float
    state: str = "waiting"
    """waiting (nobody started it), running, failed, or done."""
    share: float = 0.0
    error: str = ""
    begun: float | None = field(default=None, repr=False)

    @property
    def left(self) -> float:
        """Estimated seconds until it is done."""
        if self.begun is None or self.share < 0.02:
            return self.seconds
        return (time.monotonic() - self.begun) * (1 - self.share) / self.share

    def show_progress(self, stage: str, done: int, total: int) -> None:
        """The progress callback of the work while it runs."""
        self.share = min(1.0, done / max(1, total))


class WorkQueue:
    """Caches results and runs long work in one background thread.

    Work above ``patience`` seconds waits until somebody starts it. With ``patience=inf`` all work runs at once, and
    ``progress`` says how its progress is shown.
    """

    def __init__(self, patience: float = PATIENCE, progress: Progress = False) -> None:
        self.patience, self.progress = patience, progress
        self.results: OrderedDict[Hashable, Any] = OrderedDict()
        self.pending: dict[str, tuple[PendingWork, Hashable, Callable[[Progress], Any]]] = {}
        self._lock = threading.RLock()
        self._worker = ThreadPoolExecutor(1, "dualform")

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
                return self.pending[name][0]
            if seconds > self.patience:
                self._drop_idle()
                self.pending[name] = PendingWork(name, title, seconds), key, work
                return self.pending[name][0]
        return self._cache(key, work(self.progress))

    def _drop_idle(self) -> None:
        """Drop the oldest work that nobody started, as long as too much is pending."""
        while len(self.pending) >= MOST_PENDING:
            idle = next((name for name, (pending, *_) in self.pending.items() if pending.state != "running"), None)
            if idle is None:
                raise QueryError("too much work is running at once. Wait until some of it is done.")
            del self.pending[idle]

    def latest(self, *beginning: Hashable) -> list[Any]:
        """The most recent result whose key begins so, in a list; an empty list if there is none."""
        with self._lock:
            keys = [key for key in self.results if isinstance(key, tuple) and key[: len(beginning)] == beginning]
            return [self.results[keys[-1]]] if keys else []

    def _cache(self, key: Hashable, value: WorkResult) -> WorkResult:
        """Cache a result, and drop the oldest ones above the limit."""
        with self._lock:
            self.results[key] = value
            while len(self.results) > MOST_RESULTS:
                self.results.popitem(last=False)
            kind = str(key[0]) if isinstance(key, tuple) else ""
            alike = [cached for cached in self.results if isinstance(cached, tuple) and cached[0] == kind]
            for oldest in alike[: max(0, len(alike) - LARGE_RESULTS.get(kind, MOST_RESULTS))]:
                del self.results[oldest]
        return value

    def start(self, name: str) -> PendingWork | None:
        """Start waiting work in the background; None if there is no work of that name (it may be done)."""
        with self._lock:
            if name not in self.pending:
                return None
            pending = self.pending[name][0]
            if pending.state in ("waiting", "failed"):
                pending.state, pending.share, pending.error = "running", 0.0, ""
                self._worker.submit(self._run, name)
            return pending

    def state(self, name: str) -> PendingWork | None:
        """The state of pending work; None if nothing of that name waits or runs."""
        with self._lock:
            return self.pending[name][0] if name in self.pending else None

    def close(self) -> None:
        """Cancel what has not started yet, and start nothing more."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _run(self, name: str) -> None:
        pending, key, work = self.pending[name]
        pending.begun = time.monotonic()
        try:
            self._cache(key, work(pending.show_progress))
        except (DualformError, RuntimeError, OSError) as error:
            pending.state, pending.error = "failed", str(error)
            return
        pending.state = "done"
        with self._lock:
            self.pending.pop(name, None)
