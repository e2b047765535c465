"""Independent tasks in processes: results in the order they are ready, a bounded number in flight, nothing left behind.

A task is a function of its number. Everything that it uses (models, data, functions of the user that cannot be pickled)
is in the process already: a worker is a *fork* of it, which gets numbers and sends results back through a pipe.
:func:`run_tasks` is the one place that knows how tasks are run. A cluster is another :data:`Runner` with the same
signature as :func:`forked` and :func:`one_by_one`.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

import torch

from dualform.errors import DualformError, QueryError, RetrainingFailed
from dualform.progress import Progress, bar, is_quiet

TaskResult = TypeVar("TaskResult")

Outcomes = Generator[tuple[int, TaskResult], None, None]
"""Pairs of number and result, as they are ready. Closing it ends what is under way."""

Runner = Callable[[Callable[[int], TaskResult], Sequence[int]], Outcomes[TaskResult]]
"""Runs a task for each of these numbers, and gives pairs of number and result as they are ready."""

TRIES = 2
"""How often a task is started whose process ends without a result."""


def run_tasks(
    task: Callable[[int], TaskResult],
    numbers: Sequence[int],
    *,
    processes: int | None = None,
    seconds: float | None = None,
    progress: Progress = True,
    name: str = "training again",
) -> Outcomes[TaskResult]:
    """Run ``task(number)`` for each of ``numbers``: pairs of number and result, as they are ready.

    ``processes`` is how many run at a time (default: one a core, where the platform can fork). The results do not
    depend on it. A task that takes longer than ``seconds`` in a process of its own is stopped and counts as died.
    """
    if processes is not None and processes < 1:
        raise QueryError(f"processes={processes} must be 1 or more: the number of trainings at a time.")
    processes = min(processes or cores(), max(1, len(numbers)))
    reason = None if processes == 1 else why_not_forked()
    if reason is not None and len(numbers) > 1:
        warn_once(f"The {len(numbers)} trainings run one after the other: {reason}")
    runner: Runner[TaskResult] = one_by_one if processes == 1 or reason else forked(processes, seconds)
    several = len(numbers) > 1 or callable(progress)  # a training alone has a bar of its own
    shown = bar(name, len(numbers), progress if several else False, worth=2, period=float("inf"), at_once=processes)
    with shown as watch, closing(runner(task, numbers)) as outcomes:
        for number, result in outcomes:
            if watch is not None:
                watch(1)
            yield number, result


def one_by_one(task: Callable[[int], TaskResult], numbers: Sequence[int]) -> Outcomes[TaskResult]:
    """Run the tasks in this process, one after the other."""
    for number in numbers:
        yield number, task(number)


def forked(processes: int, seconds: float | None = None) -> Runner[Any]:
    """Run the tasks in forks of this process, as many at a time."""
    return lambda task, numbers: _Forks(task, processes, seconds).run(numbers)


def why_not_forked() -> str | None:
    """The reason why a training cannot run in a fork of this process; None if it can."""
    if "fork" not in multiprocessing.get_all_start_methods() or sys.platform == "darwin":
        return "this operating system has no safe way to fork a process."
    if torch.cuda.is_initialized():
        return "this process has used a GPU, and a forked process cannot."
    if torch.get_num_threads() > 1:
        return (
            f"torch uses {torch.get_num_threads()} threads, which a forked process cannot start, and another number of "
            "threads would round differently. Call torch.set_num_threads(1) before memory.replay(…), and they run side "
            "by side."
        )
    return None


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_warned: set[str] = set()


def warn_once(sentence: str) -> None:
    """Print a sentence on standard error, once in the life of a process."""
    if sentence not in _warned and not is_quiet():
        _warned.add(sentence)
        print(f"dualform: {sentence}", file=sys.stderr)


@dataclass
class _Worker:
    process: BaseProcess
    number: int = 0
    attempt: int = 0
    end: float = float("inf")
    """When the task under way counts as hanging."""


class _Forks(Generic[TaskResult]):
    """The processes under way. Whatever ends the loop ends them too."""

    def __init__(self, task: Callable[[int], TaskResult], processes: int, seconds: float | None) -> None:
        self.task, self.processes, self.seconds = task, processes, seconds
        self.workers: dict[Any, _Worker] = {}

    def run(self, numbers: Sequence[int]) -> Outcomes[TaskResult]:
        waiting = deque((number, 1) for number in numbers)
        try:
            while waiting or self.workers:
                while waiting and len(self.workers) < self.processes:
                    self._give(self._start(), *waiting.popleft())
                for pipe in wait(list(self.workers), timeout=self._patience()):
                    worker, message = self.workers[pipe], _receive(pipe)
                    number = worker.number
                    if message is not None and waiting:
                        self._give(pipe, *waiting.popleft())
                    else:
                        self._end(pipe)
                    if message is not None:
                        yield number, _result_of(message)
                    elif worker.attempt < TRIES:
                        waiting.appendleft((number, worker.attempt + 1))
                    else:
                        raise RetrainingFailed(_death_of(worker))
                self._stop_late_ones()
        finally:
            for pipe, worker in list(self.workers.items()):
                worker.process.kill()
                self._end(pipe)

    def _start(self) -> Any:
        """A new worker. Its pipe is held by this process and that fork alone, so that either sees the other's end."""
        own, fork_side = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_work, args=(self.task, fork_side, [own, *self.workers]), daemon=True)
        with warnings.catch_warnings():  # Python warns of threads; those of torch are never used in the fork
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            process.start()
        fork_side.close()
        self.workers[own] = _Worker(process)
        return own

    def _give(self, pipe: Any, number: int, attempt: int) -> None:
        """Hand a task to a worker."""
        worker = self.workers[pipe]
        worker.number, worker.attempt = number, attempt
        worker.end = time.monotonic() + (self.seconds or float("inf"))
        with suppress(OSError):  # a worker that has died meanwhile is seen when its pipe is read
            pipe.send(number)

    def _end(self, pipe: Any) -> None:
        """A worker whose pipe ends has nothing more to do."""
        pipe.close()
        self.workers.pop(pipe).process.join()

    def _patience(self) -> float | None:
        """The seconds until the first of the workers is late."""
        first = min(worker.end for worker in self.workers.values())
        return None if first == float("inf") else max(0.0, first - time.monotonic())

    def _stop_late_ones(self) -> None:
        """Kill the processes that take too long; their pipes end, and they count as died."""
        for worker in self.workers.values():
            if time.monotonic() > worker.end:
                worker.process.kill()


def _work(task: Callable[[int], Any], pipe: Any, pipes_of_others: Sequence[Any]) -> None:
    """Run tasks in a fork until no more come, and leave without any clean-up of what belongs to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends its workers itself
    torch.set_num_threads(1)  # before any operation: a fork cannot use the threads of its parent
    try:
        for other_pipe in pipes_of_others:
            other_pipe.close()
        while True:
            pipe.send_bytes(_outcome(task, pipe.recv()))
    except (EOFError, OSError):  # the parent has no more tasks, or is gone
        pass
    finally:
        os._exit(0)


def _outcome(task: Callable[[int], Any], number: int) -> bytes:
    try:
        return pickle.dumps((True, task(number)))
    except BaseException as error:
        return pickle.dumps((False, _as_message(error)))


def _as_message(error: BaseException) -> DualformError:
    """An error of a worker as one that can be raised in the parent: those of ours as they are, others in words."""
    if isinstance(error, DualformError):
        return type(error)(str(error))
    lines = "".join(traceback.format_exception(error))
    return RetrainingFailed(f"a training raised {type(error).__name__}: {error}\nIn the process of its own:\n{lines}")


def _receive(pipe: Any) -> bytes | None:
    """What a worker sent; None if it ended without a word."""
    try:
        return pipe.recv_bytes()
    except (EOFError, OSError):
        return None


def _result_of(message: bytes) -> Any:
    is_result, content = pickle.loads(message)
    if not is_result:
        raise content
    return content


def _death_of(worker: _Worker) -> str:
    code = worker.process.exitcode
    if code == -signal.SIGKILL:
        cause = "it was killed, most likely because the memory of the machine was full, or it took far too long"
    else:
        cause = f"it was ended by signal {-code}" if code is not None and code < 0 else f"its exit code was {code}"
    return (
        f"training {worker.number + 1} ended {worker.attempt} times without a result: {cause}. With folder=… the "
        "finished ones are kept, and the next call does what is missing; processes=1 runs in this process."
    )
