"""Work that takes a while: announced with its time, done behind the page, told how far it is, kept when it is done."""

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
Tell = Progress

PATIENCE = 2.5
"""Seconds of work that are done while the page waits."""

MOST_PENDING = 64

KEPT = 256
"""Answers that are kept."""


@dataclass
class PendingWork:
    """Something that is not known yet: how long it takes, and how far it is."""

    name: str
    what: str
    seconds: float
    state: str = "waiting"
    """waiting (nobody asked for it), running, failed, or done."""
    share: float = 0.0
    error: str = ""
    begun: float | None = field(default=None, repr=False)

    @property
    def left(self) -> float:
        """Seconds that it will still take, as far as one can tell."""
        if self.begun is None or self.share < 0.02:
            return self.seconds
        return (time.monotonic() - self.begun) * (1 - self.share) / self.share

    def tell(self, what: str, done: int, total: int) -> None:
        """Told while it runs."""
        self.share = min(1.0, done / max(1, total))


class WorkDesk:
    """Keeps what was found, and does what takes long in a thread of its own. With no limit it does all at once."""

    def __init__(self, patience: float = PATIENCE, tell: Progress = False) -> None:
        self.patience, self.tell = patience, tell
        self.found: OrderedDict[Hashable, Any] = OrderedDict()
        self.pending: dict[str, tuple[PendingWork, Hashable, Callable[[Tell], Any]]] = {}
        self._lock = threading.RLock()
        self._worker = ThreadPoolExecutor(1, "dualform")

    def need(
        self, key: Hashable, what: str, seconds: float, work: Callable[[Tell], WorkResult]
    ) -> "WorkResult | PendingWork":  # fmt: skip
        """What was found under a key; else it is found now if that is quick, or can be started and waited for."""
        with self._lock:
            if key in self.found:
                self.found.move_to_end(key)
                return self.found[key]
            name = blake2b(repr(key).encode(), digest_size=8).hexdigest()
            if name in self.pending:
                return self.pending[name][0]
            if seconds > self.patience:
                self._make_room()
                self.pending[name] = PendingWork(name, what, seconds), key, work
                return self.pending[name][0]
        return self.keep(key, work(self.tell))

    def _make_room(self) -> None:
        """Forget the oldest thing that nobody started, where many wait."""
        while len(self.pending) >= MOST_PENDING:
            idle = next((name for name, (each, *_) in self.pending.items() if each.state != "running"), None)
            if idle is None:
                raise QueryError("too much is being worked on. Wait until some of it is done.")
            del self.pending[idle]

    def latest(self, *beginning: Hashable) -> list[Any]:
        """What was found last under keys that begin so; at most one."""
        with self._lock:
            keys = [key for key in self.found if isinstance(key, tuple) and key[: len(beginning)] == beginning]
            return [self.found[keys[-1]]] if keys else []

    def keep(self, key: Hashable, value: WorkResult) -> WorkResult:
        """Remember what was found."""
        with self._lock:
            self.found[key] = value
            while len(self.found) > KEPT:
                self.found.popitem(last=False)
        return value

    def start(self, name: str) -> PendingWork | None:
        """Begin something that waits; None if nothing has that name (it may be done)."""
        with self._lock:
            if name not in self.pending:
                return None
            pending = self.pending[name][0]
            if pending.state in ("waiting", "failed"):
                pending.state, pending.share, pending.error = "running", 0.0, ""
                self._worker.submit(self._run, name)
            return pending

    def state(self, name: str) -> PendingWork | None:
        """How far something is; None if nothing of that name waits or runs."""
        with self._lock:
            return self.pending[name][0] if name in self.pending else None

    def close(self) -> None:
        """Begin nothing more."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _run(self, name: str) -> None:
        pending, key, work = self.pending[name]
        pending.begun = time.monotonic()
        try:
            self.keep(key, work(pending.tell))
        except (DualformError, RuntimeError, OSError) as error:
            pending.state, pending.error = "failed", str(error)
            return
        pending.state = "done"
        with self._lock:
            self.pending.pop(name, None)
