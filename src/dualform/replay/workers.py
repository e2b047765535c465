"""Independent tasks in processes: results in the order they are ready, a bounded number in flight, nothing left behind.

A task is a function of its number. Everything that it uses (models, data, functions of the user that cannot be pickled)
is in the process already: a worker is a *fork* of it, one for each task, and sends its result back through a pipe.
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
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

import torch

from dualform.errors import DualformError, QueryError, RetrainingFailed
from dualform.progress import Progress, bar

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
    shown = bar(name, len(numbers), progress, worth=2, period=float("inf"))
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
    if sentence not in _warned:
        _warned.add(sentence)
        print(f"dualform: {sentence}", file=sys.stderr)


@dataclass(frozen=True)
class _Worker:
    number: int
    attempt: int
    process: BaseProcess
    end: float


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
                    self._start(*waiting.popleft())
                for pipe in wait(list(self.workers), timeout=self._patience()):
                    worker = self.workers.pop(pipe)
                    message = _receive(pipe)
                    worker.process.join()
                    if message is not None:
                        yield worker.number, _result_of(message)
                    elif worker.attempt < TRIES:
                        waiting.appendleft((worker.number, worker.attempt + 1))
                    else:
                        raise RetrainingFailed(_death_of(worker))
                self._stop_late_ones()
        finally:
            for pipe, worker in self.workers.items():
                worker.process.kill()
                worker.process.join()
                pipe.close()
            self.workers.clear()

    def _start(self, number: int, attempt: int) -> None:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_work, args=(self.task, number, sender), daemon=True)
        with warnings.catch_warnings():  # Python warns of threads; those of torch are never used in the fork
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            process.start()
        sender.close()  # the fork alone holds it now, so that its death ends the pipe
        self.workers[receiver] = _Worker(number, attempt, process, time.monotonic() + (self.seconds or float("inf")))

    def _patience(self) -> float | None:
        """The seconds until the first of the workers is late."""
        first = min(worker.end for worker in self.workers.values())
        return None if first == float("inf") else max(0.0, first - time.monotonic())

    def _stop_late_ones(self) -> None:
        """Kill the processes that take too long; their pipes end, and they count as died."""
        for worker in self.workers.values():
            if time.monotonic() > worker.end:
                worker.process.kill()


def _work(task: Callable[[int], Any], number: int, sender: Any) -> None:
    """Run a task in a fork, send what came out, and leave without any clean-up of what belongs to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends its workers itself
    torch.set_num_threads(1)  # before any operation: a fork cannot use the threads of its parent
    try:
        sender.send_bytes(pickle.dumps((True, task(number))))
    except BrokenPipeError:  # the parent is gone
        pass
    except BaseException as error:
        sender.send_bytes(pickle.dumps((False, _as_message(error))))
    finally:
        sender.close()
        os._exit(0)


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
    finally:
        pipe.close()


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
