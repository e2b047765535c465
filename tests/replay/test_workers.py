"""Tasks in processes: in any number of them the same results, and no process is left behind or waited for."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from dualform.errors import QueryError, RetrainingFailed
from dualform.replay import workers
from dualform.replay.workers import forked, one_by_one, run_tasks, why_not_forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def product(number):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(60, 60, generator=generator, requires_grad=True)
    (x @ x).exp().mean().backward()
    return x.grad.clone()  # pyright: ignore[reportOptionalMemberAccess]


def test_results_are_the_same_in_one_process_and_in_several():
    here = dict(one_by_one(product, range(9)))
    there = dict(run_tasks(product, range(9), processes=3, progress=False))
    assert here.keys() == there.keys() and all(torch.equal(here[n], there[n]) for n in here)


def test_as_many_tasks_run_at_a_time_as_are_allowed(tmp_path):
    def alive(number):
        (tmp_path / str(number)).touch()
        count = len(list(tmp_path.iterdir()))
        time.sleep(0.05)
        (tmp_path / str(number)).unlink()
        return count, os.getpid()

    results = dict(run_tasks(alive, range(8), processes=2, progress=False))
    assert max(count for count, _ in results.values()) <= 2
    pids = {pid for _, pid in results.values()}
    assert len(pids) == 2 and os.getpid() not in pids


def test_a_killed_worker_is_tried_once_more(tmp_path):
    def dies_once(number):
        if number == 2 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number * 10

    assert dict(run_tasks(dies_once, range(5), processes=2, progress=False)) == {n: n * 10 for n in range(5)}


def test_a_worker_that_always_dies_is_reported_and_the_others_are_ended():
    def dies(number):
        if number == 1:
            os._exit(7)
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RetrainingFailed, match=r"training 2 ended 2 times.*exit code was 7"):
        list(run_tasks(dies, range(3), processes=3, progress=False))
    assert time.monotonic() - start < 20
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_worker_that_hangs_is_stopped():
    with pytest.raises(RetrainingFailed, match="it took far too long"):
        list(forked(2, seconds=0.2)(lambda number: time.sleep(60), range(2)))


def test_errors_of_a_task_arrive_with_their_class_or_in_words():
    def refuses(number):
        raise QueryError("losses(model, batch) gave nothing")

    def divides(number):
        return 1 / 0

    with pytest.raises(QueryError, match="gave nothing"):
        list(run_tasks(refuses, range(3), processes=2, progress=False))
    with pytest.raises(RetrainingFailed, match="ZeroDivisionError: division by zero"):
        list(run_tasks(divides, range(3), processes=2, progress=False))


def test_ctrl_c_ends_all_workers():
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(run_tasks(lambda number: time.sleep(60), range(4), processes=2, progress=False))
    assert time.monotonic() - start < 20
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_with_several_threads_tasks_run_one_after_the_other_and_a_sentence_says_so(capsys, monkeypatch):
    monkeypatch.setattr(workers, "_warned", set())
    torch.set_num_threads(2)
    reason = why_not_forked()
    assert reason is not None and "2 threads" in reason
    pids = dict(run_tasks(lambda number: os.getpid(), range(3), processes=3, progress=False))
    assert set(pids.values()) == {os.getpid()}
    assert "The 3 trainings run one after the other: torch uses 2 threads" in capsys.readouterr().err


def test_progress_counts_finished_tasks():
    calls = []
    list(run_tasks(product, range(3), processes=2, progress=lambda *call: calls.append(call)))
    assert calls == [("training again", done, 3) for done in (1, 2, 3)]


def test_a_number_of_processes_below_one_is_refused():
    with pytest.raises(QueryError, match="processes=0"):
        list(run_tasks(product, range(3), processes=0))


ORPHANS = """
import os, sys, time, torch
from dualform.replay import run_tasks
torch.set_num_threads(1)
def task(number):
    print(os.getpid(), flush=True)
    time.sleep(0.3 if number else 1.0)
list(run_tasks(task, range(6), processes=3, progress=False))
"""


def test_workers_end_when_their_parent_is_killed():
    process = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = {int(process.stdout.readline()) for _ in range(4)}
    process.send_signal(signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(pids) == 3 and not any(is_alive(pid) for pid in pids)
    process.stdout.close()


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
