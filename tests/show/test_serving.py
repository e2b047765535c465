"""The explorer while it is opened and while it works: the port answers at once, and pages say what takes how long."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from serving import serving
from torch import nn

from dualform.errors import ModelMismatch, QueryError
from dualform.explain import Memory, open_memory
from dualform.models import MLP, TransformerLM
from dualform.progress import bar
from dualform.record import record
from dualform.show.described import DataOptions, MemoryToOpen
from dualform.show.examples import Examples
from dualform.show.views import Explorer, PendingWork, TimedProgress, WorkQueue
from dualform.show.views.estimates import Estimates, MachineSpeed
from dualform.show.web import opening_from_disk, token_in
from dualform.show.web.opening import Opening, OpeningStage

pytest.importorskip("uvicorn", reason="the extra web is not installed")


# ---------------------------------------------------------------- opening


@pytest.fixture
def explorer(recorded) -> Explorer:
    examples = Examples(recorded.x, recorded.labels)
    return Explorer(recorded.memory, recorded.model, examples, examples)


def slow_opening(explorer: Explorer, go_on: threading.Event) -> Opening:
    """An opening whose first stage ends when it is told to."""

    def wait_for() -> None:
        go_on.wait(30)

    stages = [
        OpeningStage("reading the memory", 11.0, wait_for),
        OpeningStage("making the network", 1.0, lambda: None),
    ]
    return Opening("slow", stages, lambda: explorer)


def test_until_the_explorer_is_open_every_page_says_what_is_done_and_how_long_it_takes(explorer):
    go_on = threading.Event()
    opening = slow_opening(explorer, go_on)
    with serving(opening) as served:
        opening.start()
        for path in ("/", "/prediction/test/3?layer=fc1", "/nothing/like/this", "/run"):
            page = served.get(path)
            assert page.status == 503 and page.headers["retry-after"] == "1"
            assert re.search(r"Reading the memory \(1 of 2\) … about 1[12] s left", page.text), page.text
            assert '<noscript><meta http-equiv="refresh"' in page.text and "<progress" in page.text
            assert "default-src 'none'" in page.headers["content-security-policy"] and "style=" not in page.text
        assert served.get("/prediction/test/3.json").json["state"] == "opening"
        assert served.post("/own/text", b"1").status == 503
        assert served.get("/static/style.css").status == served.get("/static/waiting.js").status == 200
        shares = []
        for _ in range(4):
            shares.append(served.get("/opening.json").json["share"])
            time.sleep(0.05)
        assert sorted(set(shares)) == shares and shares[0] >= 0 and shares[-1] < 1, "the bar moves"
        go_on.set()
        opening.wait()
        assert served.get("/opening.json").json["state"] == "done" and served.get("/opening.json").status == 200
        assert served.get("/prediction/test/3?layer=fc1").status == 200
        assert served.get("/nothing/like/this").status == 404


def test_what_is_asked_of_a_waiting_page_cannot_become_part_of_it(explorer):
    opening = slow_opening(explorer, threading.Event())
    with serving(opening) as served:
        page = served.get("/%3Cscript%3Ealert(1)%3C/script%3E?x=%3Cb%3E")
        assert "<script>" not in page.text and "<b>" not in page.text


def test_waiting_pages_want_the_token_too(explorer):
    with serving(slow_opening(explorer, threading.Event()), "0.0.0.0", "s3cret") as served:
        assert served.get("/").status == served.get("/opening.json").status == 401
        let_in = served.get("/run?token=s3cret")
        assert let_in.status == 303 and let_in.headers["location"] == "/run"
        assert served.get("/run", Cookie="dualform=s3cret").status == 503


def test_a_page_says_why_the_explorer_cannot_be_opened(recorded):
    source = MemoryToOpen(recorded.path, DataOptions(model="dualform.models:MLP(16, 9, 3)"))
    opening = opening_from_disk(source)
    opening.run()
    with serving(opening) as served:
        page = served.get("/prediction/test/3")
        assert page.status == 503 and "cannot be opened" in page.text and "does not fit" in page.text
        assert "refresh" not in page.text
        assert served.get("/opening.json").json["state"] == "failed"
    with pytest.raises(ModelMismatch, match="does not fit"):
        opening.wait()


def test_a_memory_is_opened_stage_by_stage(recorded, tmp_path):
    files = tmp_path / "examples.npy"
    np.save(files, recorded.x.numpy())
    options = DataOptions(model="dualform.models:MLP(16, 8, 3)", train=str(files))
    opening = opening_from_disk(MemoryToOpen(recorded.path, options))
    opening.run()
    explorer = opening.wait()
    assert explorer.count("train") == 60 and explorer.work_queue.latest("answer"), "the first question was asked"


def run_serve(*words: str, **environment: str) -> "subprocess.Popen[str]":
    """The command in a process of its own."""
    command = [sys.executable, "-m", "dualform", "serve", *words, "--no-open"]
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **environment}, **options)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ask(port: int, path: str) -> tuple[int, str] | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    except OSError:
        return None
    finally:
        connection.close()


@pytest.fixture
def slow_factory(tmp_path) -> Path:
    """A module whose network takes three seconds to make, or never gets made."""
    code = (
        "import time\nfrom dualform.models import MLP\n"
        "def slow():\n    time.sleep(3)\n    return MLP(16, 8, 3)\n"
        "def wrong():\n    time.sleep(3)\n    return MLP(16, 9, 3)\n"
    )
    (tmp_path / "slow_factory.py").write_text(code, encoding="utf-8")
    return tmp_path


def test_the_command_answers_before_the_network_is_made_and_ends_cleanly(recorded, slow_factory):
    port = free_port()
    path = os.pathsep.join([str(slow_factory), os.environ.get("PYTHONPATH", "")])
    process = run_serve(str(recorded.path), "--model", "slow_factory:slow", "--port", str(port), PYTHONPATH=path)
    said = []
    try:
        while not said or said[-1][0] == 503:
            if (answer := ask(port, "/run")) is not None:
                said.append(answer)
            assert process.poll() is None
            time.sleep(0.05)
        assert any("Making the network (2 of 3) … about" in page for _, page in said)
        assert said[-1][0] == 200
    finally:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert f"The explorer is at http://localhost:{port}/" in out and "Ready after" in out
    assert process.returncode == 130 and "Traceback" not in err and "terminate" not in err


def test_the_command_fails_on_the_terminal_and_on_the_page(recorded, slow_factory):
    port = free_port()
    path = os.pathsep.join([str(slow_factory), os.environ.get("PYTHONPATH", "")])
    process = run_serve(str(recorded.path), "--model", "slow_factory:wrong", "--port", str(port), PYTHONPATH=path)
    last = None
    while process.poll() is None:
        last = ask(port, "/run") or last
        time.sleep(0.05)
    assert process.returncode == 1 and "does not fit" in process.communicate()[1]
    assert last is not None and last[0] == 503 and "does not fit" in last[1]


def test_consent_is_asked_for_before_anything_is_served(slow_factory, tmp_path):
    model = MLP(16, 8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, optimizer, tmp_path / "foreign", progress=False) as tape:
        tape.describe(model="slow_factory:slow")
        nn.functional.cross_entropy(model(torch.ones(2, 16)), torch.tensor([0, 1])).backward()
        optimizer.step()
    process = run_serve(str(tmp_path / "foreign"), "--port", "0", XDG_CONFIG_HOME=str(tmp_path / "config"))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "--trust" in err and "The explorer is at" not in out


def test_a_token_can_come_from_a_file(tmp_path):
    file = tmp_path / "token"
    file.write_text("s3cret\n", encoding="utf-8")
    assert token_in(file) == "s3cret"
    file.write_text(" \n", encoding="utf-8")
    with pytest.raises(QueryError, match="holds no token"):
        token_in(file)


def test_small_answers_are_sent_at_once(explorer):
    """Without TCP_NODELAY a kept connection waits for the visitor's delayed acknowledgement, 40 ms a page."""
    with serving(explorer) as served:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
        times = []
        for _ in range(12):
            begin = time.perf_counter()
            connection.request("GET", "/work/nothing.json")
            connection.getresponse().read()
            times.append(time.perf_counter() - begin)
        connection.close()
    assert min(times[2:]) < 0.03


# ---------------------------------------------------------------- progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(
    estimate=st.floats(0.1, 1e4),
    events=st.lists(st.tuples(st.floats(0.01, 50.0), st.none() | st.floats(0.0, 1.0)), min_size=1, max_size=30),
)
def test_a_bar_always_moves_and_never_arrives_before_the_work_does(estimate, events):
    clock = Clock()
    progress = TimedProgress(estimate, clock)
    assert progress.share == 0.0 and progress.left == pytest.approx(estimate)
    progress.begin()
    last = 0.0
    for pause, reported in events:
        clock.now += pause
        if reported is not None:
            progress.report(reported)
        share = progress.share
        assert last < share < 1.0 or share == last > 1 - 1e-12
        assert progress.left > 0.0
        last = share


@given(total=st.floats(1.0, 1e3), wrong=st.floats(0.2, 5.0), at=st.floats(0.3, 0.95))
def test_what_is_left_follows_the_work_when_the_estimate_was_wrong(total, wrong, at):
    clock = Clock()
    progress = TimedProgress(total * wrong, clock)
    progress.begin()
    clock.now += at * total
    progress.report(at)
    assert progress.left == pytest.approx(max((1 - at) * total, 0.15 * at * total), rel=1e-6)


@given(total=st.floats(1.0, 1e3))
def test_without_reports_a_bar_follows_a_true_estimate(total):
    clock = Clock()
    progress = TimedProgress(total, clock)
    progress.begin()
    for tenth in range(1, 8):
        clock.now += total / 10
        assert progress.share == pytest.approx(tenth / 10, abs=0.02)


# ---------------------------------------------------------------- the line


def steps(gate: threading.Semaphore, done: list[str], name: str, count: int = 100) -> Callable:
    """Work that reports a hundred times, each time somebody lets it."""

    def work(progress):
        with bar(name, count, progress) as watch:
            assert watch is not None
            for _ in range(count):
                gate.acquire(timeout=30)
                watch(1)
        done.append(name)
        return name

    return work


@pytest.fixture
def line() -> Iterator[tuple[WorkQueue, threading.Semaphore, list[str]]]:
    queue, gate = WorkQueue(patience=0.0), threading.Semaphore(0)
    yield queue, gate, []
    gate.release(100_000)
    queue.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never happens"
        time.sleep(0.01)


def test_several_pieces_of_work_stand_in_line_and_say_so(line):
    queue, gate, done = line
    names = ["a", "b", "c"]
    works = [queue.result((name, 1), name, 10.0, steps(gate, done, name)) for name in names]
    for work in works:
        queue.start(work.name)
    until(lambda: works[0].state == "running")
    said = [queue.state(work.name).says for work in works]
    assert (
        "left" in said[0] and said[1].startswith("next in line, ready in about") and said[2].startswith("2nd in line")
    )
    assert works[1].left > works[0].left and works[2].left > works[1].left
    gate.release(300)
    until(lambda: not queue.is_busy())
    assert done == names and queue.result(("b", 1), "b", 10.0, steps(gate, done, "b")) == "b"


def test_work_that_runs_can_be_stopped_and_begun_again(line):
    queue, gate, done = line
    work = queue.result(("a", 1), "a", 10.0, steps(gate, done, "a"))
    queue.start(work.name)
    gate.release(10)
    until(lambda: queue.state(work.name).share >= 0.1)
    assert queue.stop(work.name).says == "stopping …"
    gate.release(1)
    until(lambda: work.state == "stopped")
    assert not done and not queue.results
    gate.release(200)
    queue.start(work.name)
    until(lambda: work.state == "done")
    assert done == ["a"]


def test_work_in_line_can_be_taken_out_of_it(line):
    queue, gate, done = line
    first, second = (queue.result((name, 1), name, 10.0, steps(gate, done, name)) for name in ("a", "b"))
    queue.start(first.name)
    until(lambda: first.state == "running")
    queue.start(second.name)
    assert queue.stop(second.name).state == "stopped"
    gate.release(200)
    until(lambda: not queue.is_busy())
    assert done == ["a"]


def test_visitors_come_before_what_is_made_in_advance(line):
    queue, gate, done = line
    works = {name: queue.result((name, 1), name, 10.0, steps(gate, done, name, 1)) for name in "abcd"}
    queue.start(works["a"].name)
    until(lambda: works["a"].state == "running")
    queue.start(works["b"].name, behind=True)
    queue.start(works["c"].name, behind=True)
    queue.start(works["d"].name)
    queue.start(works["c"].name)  # somebody asks for it after all
    gate.release(4)
    until(lambda: not queue.is_busy())
    assert done == ["a", "d", "c", "b"]


def test_short_work_starts_by_itself_and_long_work_does_not(line):
    queue, gate, done = line
    short, long = (queue.result((name, 1), name, s, steps(gate, done, name)) for name, s in (("a", 19.0), ("b", 21.0)))
    assert queue.start(short.name, by_itself=True).state in ("queued", "running")
    assert queue.start(long.name, by_itself=True).state == "waiting"
    assert queue.start(long.name).state == "queued"


def test_what_somebody_stopped_does_not_start_by_itself(line):
    queue, gate, done = line
    work = queue.result(("a", 1), "a", 5.0, steps(gate, done, "a"))
    queue.start(work.name, by_itself=True)
    queue.stop(work.name)
    gate.release(1)
    until(lambda: work.state == "stopped")
    assert queue.start(work.name, by_itself=True).state == "stopped"


def test_what_nobody_waits_for_any_longer_leaves_the_line(line, monkeypatch):
    queue, gate, done = line
    first, second, third = (queue.result((name, 1), name, 5.0, steps(gate, done, name)) for name in "abc")
    queue.start(first.name)
    until(lambda: first.state == "running")
    queue.start(second.name, by_itself=True)
    queue.start(third.name)
    monkeypatch.setattr("dualform.show.views.work.UNWATCHED", 0.0)
    gate.release(300)
    until(lambda: not queue.is_busy())
    assert done == ["a", "c"] and second.state == "waiting"


def test_a_bug_ends_the_work_and_is_shown(line, caplog):
    queue, _, _ = line
    work = queue.result(("a", 1), "a", 5.0, lambda progress: [][1])
    queue.start(work.name)
    until(lambda: work.state == "failed")
    assert "bug" in work.says and "list index out of range" in caplog.text


def test_estimates_learn_from_what_work_took():
    queue = WorkQueue(patience=10.0)
    for n in range(3):
        queue.result(("kind", n), "work", 0.1, lambda progress: time.sleep(0.5))
    queue.patience = 0.05
    learned = queue.result(("kind", "new"), "work", 0.1, lambda progress: None)
    assert isinstance(learned, PendingWork) and 0.35 < learned.seconds <= 1.0
    other = queue.result(("other", 1), "work", 0.06, lambda progress: None)
    assert isinstance(other, PendingWork) and other.seconds == 0.06
    queue.close()


def test_closing_ends_work_that_runs(line):
    queue, gate, done = line
    work = queue.result(("a", 1), "a", 5.0, steps(gate, done, "a"))
    queue.start(work.name)
    until(lambda: work.state == "running")
    gate.release(1)
    threading.Timer(0.1, gate.release, [1]).start()
    queue.close()
    assert work.state == "stopped" and "dualform work" not in [t.name for t in threading.enumerate() if t.is_alive()]


# ---------------------------------------------------------------- work on pages


def test_short_work_is_started_by_opening_its_page(text_explorer):
    text_explorer.work_queue.patience = 0.0
    with serving(text_explorer) as served:
        address = "/prediction/test/40?layer=output"
        page = served.get(address)
        (name,) = re.findall(r'data-pending="(\w+)"', page.text)
        assert "takes about" in page.text and '<meta http-equiv="refresh"' in page.text
        until(lambda: served.get(f"/work/{name}.json").json["state"] == "done")
        assert "data-pending" not in served.get(address).text


def test_long_work_waits_for_a_click_and_can_be_stopped(text_explorer, monkeypatch):
    text_explorer.work_queue.patience = 0.0
    monkeypatch.setattr(Explorer, "question_seconds", lambda *args, **options: 300.0)
    with serving(text_explorer) as served:
        page = served.get("/prediction/test/40?layer=output")
        (name,) = re.findall(r'data-pending="(\w+)"', page.text)
        assert "5 min" in page.text and served.get(f"/work/{name}.json").json["state"] == "waiting"
        assert served.send("POST", f"/work/{name}", b"").status == 403, "other sites cannot start work"
        assert served.post(f"/work/{name}").json["state"] in ("queued", "running", "done")
        assert served.post(f"/work/{name}/stop").json["state"] in ("running", "stopped", "done")
        until(lambda: served.get(f"/work/{name}.json").json["state"] in ("stopped", "done"))


def test_a_ledger_stops_when_it_is_told_to(text_explorer):
    """The engine passes the error of a progress callback on, from wherever it counts."""
    queue, memory = text_explorer.work_queue, text_explorer.memory
    queue.patience = 0.0

    def work(progress):
        while True:  # until it is stopped
            open_memory(memory.path).ledger("source", progress=progress)

    pending = queue.result(("ledger", "endless"), "the ledger", 100.0, work)
    queue.start(pending.name)
    until(lambda: queue.state(pending.name).share > 0)
    queue.stop(pending.name)
    until(lambda: pending.state == "stopped")


def test_pages_are_shown_while_work_runs(explorer):
    gate = threading.Semaphore(0)
    queue = explorer.work_queue
    with serving(explorer) as served:
        served.get("/prediction/test/3")
        queue.patience = 0.0
        work = queue.result(("a", 1), "a", 100.0, steps(gate, [], "a"))
        queue.start(work.name)
        until(lambda: work.state == "running")
        queue.patience = 2.5
        for path in ("/prediction/test/4", "/what-if/test/5", "/run"):
            assert served.get(path).status == 200
        assert work.state == "running"
        gate.release(100)


# ---------------------------------------------------------------- estimates

OPTIMISERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def make_mlp() -> nn.Module:
    return MLP(128, 64, 10)


def make_lm() -> nn.Module:
    return TransformerLM(40, 16, width=32, heads=4, layers=1)


@pytest.fixture(scope="module", params=["mlp-sgd", "mlp-adamw", "lm-sgd", "lm-adamw"])
def estimated(request, tmp_path_factory) -> tuple[Path, Callable[[], nn.Module], torch.Tensor]:
    kind, _, optimiser = request.param.partition("-")
    torch.manual_seed(0)
    make = make_mlp if kind == "mlp" else make_lm
    model = make()
    x = torch.randn(400, 128) if kind == "mlp" else torch.randint(40, (400, 17))
    o = OPTIMISERS[optimiser](model.parameters())
    path = tmp_path_factory.mktemp("estimates") / "memory"
    with record(model, o, path, dtype="float32", progress=False) as tape:
        for step in range(150):
            index = torch.arange(16 * step, 16 * step + 16) % 400
            tape.note(index=index, label=index % 10)
            out, y = (model(x[index]), index % 10) if kind == "mlp" else (model(x[index, :-1]), x[index, 1:])
            nn.functional.cross_entropy(out.flatten(0, -2), y.flatten()).backward()
            o.step()
            o.zero_grad()
    return path, make, x if kind == "mlp" else x[:, :-1]


def cpu_seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def test_estimates_are_right_within_a_factor_of_four(estimated):
    """In seconds of this process, as other programs of this machine may take any share of its time."""
    path, make, x = estimated
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        memory, model = open_memory(path), make()
        examples = Examples(x, torch.arange(400) % 10 if x.is_floating_point() else None)
        explorer = Explorer(memory, model, examples)
        seconds: Estimates = explorer.estimates
        seconds.speed = MachineSpeed.measured(loaded=False)
        last = memory.layers[-1]

        def fresh() -> Memory:
            return open_memory(path)

        def ask_all(layer: str | None, n: int) -> Callable[[], object]:
            spot = fresh().attend(model, x[:n], target=lambda out: out.flatten(1)[:, -1])
            _ = spot.prediction
            per: Any = {} if layer is None else {"per": "slot"}
            return lambda: spot.ask(
                layer, top=300, by=["label", "index"], timeline=40, progress=False, **per
            )  # fmt: skip

        cases = {
            "the whole network": (explorer.question_seconds(None), ask_all(None, 1)),
            "the whole network, 8 queries": (explorer.question_seconds(None, "contribution", 8), ask_all(None, 8)),
            "the last layer": (explorer.question_seconds(last), ask_all(last, 1)),
            "a ledger of 10 groups": (explorer.ledger_seconds(10), lambda: fresh().ledger("label", progress=False)),
            "a ledger of 400 groups": (explorer.ledger_seconds(400), lambda: fresh().ledger("index", progress=False)),
            "all weights": (explorer.rebuild_seconds, lambda: fresh().held_weights(progress=False)),
        }
        fresh().held_weights(progress=False)  # what is loaded only once
        wrong = {}
        for what, (said, work) in cases.items():
            took = cpu_seconds(work)
            if not took / 4 <= said + 0.02 <= 4 * took + 0.04:
                wrong[what] = f"said {said:.3f} s, took {took:.3f} s"
        assert not wrong, wrong
    finally:
        torch.set_num_threads(threads)


def test_a_ledger_of_many_groups_and_a_question_to_many_layers_are_announced_as_longer(estimated):
    path, make, x = estimated
    explorer = Explorer(open_memory(path), make(), Examples(x))
    assert explorer.ledger_seconds(4000) > 2 * explorer.ledger_seconds(10)
    layers = list(explorer.layers)
    whole = explorer.estimates.scan(None, "abs")
    assert whole == pytest.approx(sum(explorer.estimates.scan(layer, "abs") for layer in layers))
    layer = layers[-1]
    assert explorer.question_seconds(layer, "contribution", 64) > explorer.question_seconds(layer, "contribution", 1)


def test_the_state_of_work_is_plain_json(text_explorer):
    text_explorer.work_queue.patience = 0.0
    with serving(text_explorer) as served:
        pending = served.get("/prediction/test/40.json?layer=output").json["pending"]
        assert json.dumps(pending) and {"state", "share", "left", "place", "seconds"} <= set(pending)
        assert urlsplit(served.address).port
