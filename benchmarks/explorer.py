"""How long a visitor of the explorer waits: 384,000 visits in three layers, pages asked for over a real connection.

    python benchmarks/explorer.py [--repeats 5] [--folder runs] [--steps 3000] [--adam-steps 300]

Makes mnist-float16 (SGD) and mnist-adam in the folder if they are not there.
"""

import argparse
import http.client
import json
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from paper_run import BATCH, STEPS, images, machine, save, train
from safetensors.torch import save_file
from torch import nn

import dualform
from dualform.models import MLP
from dualform.show.examples import Examples
from dualform.show.views import Explorer
from dualform.show.web.app import warm_up
from dualform.show.web.serve import make_server

WIDTHS = (784, 800, 800, 10)

LAUNCH = """
import sys, time
begin = time.perf_counter()
from dualform.show.commands.cli import app
print("imports", time.perf_counter() - begin, flush=True)
app(prog_name="dualform")
"""
"""The command, which says how long its imports took."""


class Visitor:
    """Asks a server for pages, and counts the seconds."""

    def __init__(self, explorer):
        self.explorer = explorer
        self.server, address = make_server(explorer, "127.0.0.1", 0, None)
        begin = time.perf_counter()
        warm_up(explorer)
        self.warm = time.perf_counter() - begin
        threading.Thread(target=lambda: self.server.run(sockets=[self.server.dualform_socket]), daemon=True).start()
        self.port = int(address.rstrip("/").rsplit(":", 1)[1])
        while not self.server.started:
            time.sleep(0.01)

    def get(self, path, method="GET"):
        begin = time.perf_counter()
        status, body = get(self.port, path, method)
        assert status == 200, body[:300]
        return time.perf_counter() - begin, body

    def wait(self):
        """Wait until all that was begun is done."""
        begin = time.perf_counter()
        while self.explorer.work_queue.is_busy():
            time.sleep(0.05)
        return time.perf_counter() - begin

    def close(self):
        self.server.should_exit = True
        self.explorer.work_queue.close()


def get(port, path, method="GET"):
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    line.request(method, path, headers={"X-Dualform": "1", "Content-Length": "0"} if method == "POST" else {})
    response = line.getresponse()
    body = response.read()
    line.close()
    return response.status, body


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--folder", type=Path, default=Path("runs"))
    options.add_argument("--steps", type=int, default=STEPS)
    options.add_argument("--adam-steps", type=int, default=300)
    asked = options.parse_args()
    torch.set_num_threads(2)
    data = {part: images(part) for part in ("train", "test")}
    lines = sgd(asked, data) + adam(asked, data)
    table = "\n".join(f"| {what} | {bar} | {value} |" for what, bar, value in lines)
    save(
        "explorer",
        f"""Pages of the explorer over a connection on this machine, each about another test image: median (and worst)
of {asked.repeats}. "Said" is the time that the page announces before.

| | bar | measured |
|---|---|---|
{table}

Machine: {machine()}, 2 threads.""",
    )


def opening(path, data):
    """What a visitor sees from the start of the command to the first page."""
    files = {}
    for part, (x, y) in data.items():
        files[part] = path.parent / f"explorer-{part}.safetensors"
        if not files[part].exists():
            save_file({"inputs": x.flatten(1), "labels": y}, files[part])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["serve", str(path), "--no-open", "--port", str(port), "--model", f"dualform.models:MLP{WIDTHS}"]
    command += ["--data", str(files["train"]), "--test", str(files["test"])]
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", LAUNCH, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    imports = float(process.stdout.readline().split()[1])
    imported = time.perf_counter()
    said, answered, status = [], None, 503
    while status == 503:
        try:
            status, body = get(port, "/opening.json")
        except OSError:
            assert process.poll() is None
            continue
        answered = answered or time.perf_counter()
        if status == 503 and (not said or said[-1][1] != json.loads(body)["says"]):
            said.append((time.perf_counter(), json.loads(body)["says"], json.loads(body)["left"]))
        time.sleep(0.01)
    opened = time.perf_counter()
    status, _ = get(port, "/prediction/test/0")
    first = time.perf_counter() - opened
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert status == 200
    print(*(f"{when - begin:.2f} {text}" for when, text, _ in said), sep="\n", flush=True)
    bits = f"{first:.2f} s"
    return [
        ("port open, after the imports of the process", "1 s", f"{answered - imported:.2f} s"),
        (
            "port open, after the start of the process, of which the imports",
            "",
            f"{answered - begin:.2f} s ({imports:.2f})",
        ),
        (
            "all pages open, after the port",
            "",
            f"{opened - answered:.1f} s (said: {said[0][2]:.0f} s)" if said else "0 s",
        ),
        ("first page, after that", "2 s", bits),
    ]


def beside_work(visitor, rows, repeats):
    """Pages while a ledger is made: of the label and of a forward pass alone."""
    queue, memory = visitor.explorer.work_queue, visitor.explorer.memory

    def ledgers(progress):
        while True:  # until it is stopped
            dualform.open(memory.path).ledger("label", progress=progress)

    work = queue.result(("ledger", "again and again"), "ledgers", 1e3, ledgers)
    queue.start(work.name)
    while work.state != "running":
        time.sleep(0.01)
    took = [visitor.get(f"/what-if/test/{next(rows)}")[0] for _ in range(2 * repeats)]
    queue.stop(work.name)
    begin = time.perf_counter()
    while work.state == "running":
        time.sleep(0.01)
    stopped = time.perf_counter() - begin
    return [
        ("a page that needs the forward pass alone, while a ledger is made", "0.5 s",
         f"{statistics.median(took):.2f} s ({max(took):.2f})"),
        ("stopping that ledger", "", f"{stopped:.2f} s"),
    ]  # fmt: skip


def sgd(asked, data):
    path = asked.folder / "mnist-float16"
    if not path.exists():
        train(*data["train"], path, steps=asked.steps)
    opened = opening(path, data)
    explorer = Explorer(dualform.open(path), MLP(*WIDTHS), Examples(*data["train"]), Examples(*data["test"]))
    visits = len(explorer.memory.visits)
    visitor = Visitor(explorer)
    waited = visitor.wait()
    lines = [
        (f"**SGD, {visits:,} visits**", "", ""),
        *opened,
        ("ledgers by label and by time, behind the pages", "", f"{waited:.0f} s"),
    ]
    rows = iter(range(1, 10_000))
    lines += beside_work(visitor, rows, asked.repeats)
    lines.append(
        timed(
            "first view of an example", "2 s", [f"/prediction/test/{next(rows)}" for _ in range(asked.repeats)], visitor
        )
    )
    for layer in explorer.layers:
        for score in ("contribution", "abs", "weight"):
            paths = [f"/prediction/test/{next(rows)}?layer={layer}&score={score}" for _ in range(asked.repeats)]
            lines.append(timed(f"layer {layer}, score {score}", "1 s", paths, visitor))
    paths = [f"/what-if/test/{next(rows)}?group={i % 10}" for i in range(asked.repeats)]
    lines.append(timed("masking a class", "0.3 s", paths, visitor))
    paths = [
        f"/what-if/test/{next(rows)}?group={i % 10}&group={(i + 3) % 10}&group={(i + 5) % 10}"
        for i in range(asked.repeats)
    ]
    lines.append(timed("masking three classes", "0.3 s", paths, visitor))
    fifth = asked.steps // 5
    paths = [
        f"/what-if/test/{next(rows)}?after={fifth * (i % 4)}&upto={fifth * (i % 4 + 1)}" for i in range(asked.repeats)
    ]
    lines.append(timed("masking a fifth of the time", "0.3 s", paths, visitor))
    rebuilt, _ = started(visitor, f"/what-if/test/{next(rows)}?example=17", explorer)
    lines.append(("all weights as a sum, once, before single examples can be masked", "", rebuilt))
    paths = [f"/what-if/test/{next(rows)}?example={100 + i}" for i in range(asked.repeats)]
    lines.append(timed("masking one example", "", paths, visitor))
    text, _ = started(visitor, f"/prediction/test/{next(rows)}?step={asked.steps // 2}", explorer)
    lines.append((f"travelling to step {asked.steps // 2:,}, the first time", "", text))
    text, _ = started(visitor, "/training?rows=200", explorer)
    lines.append(("weighing the training set by 200 test images", "", text))
    visitor.close()
    return lines


def adam(asked, data):
    path, (x, y) = asked.folder / "mnist-adam", data["train"]
    if not path.exists():
        torch.manual_seed(0)
        model = MLP(*WIDTHS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with dualform.record(model, optimizer, path, overwrite=True, progress=False) as tape:
            for index in torch.randperm(len(x)).split(BATCH)[: asked.adam_steps]:
                tape.note(index=index, label=y[index])
                nn.functional.cross_entropy(model(x[index]), y[index]).backward()
                optimizer.step()
                optimizer.zero_grad()
    explorer = Explorer(dualform.open(path), MLP(*WIDTHS), Examples(x, y), Examples(*data["test"]))
    visitor = Visitor(explorer)
    waited = visitor.wait()
    lines = [
        (f"**AdamW, {len(explorer.memory.visits):,} visits**", "", ""),
        ("ledgers by label and by time, behind the pages", "", f"{waited:.0f} s"),
        timed("masking a class", "", [f"/what-if/test/{i}?group={i % 10}" for i in range(asked.repeats)], visitor),
    ]
    text, _ = started(visitor, "/prediction/test/7", explorer)
    lines.append(("the whole network, what each example adds", "", text))
    for layer in explorer.layers:
        paths = [f"/prediction/test/{100 + i}?layer={layer}&score=abs" for i in range(asked.repeats)]
        lines.append(timed(f"layer {layer}, score abs", "", paths, visitor))
        text, _ = started(visitor, f"/prediction/test/7?layer={layer}&score=contribution", explorer)
        lines.append((f"layer {layer}, what each visit adds", "", text))
    visitor.close()
    return lines


def timed(what, bar, paths, visitor):
    took = [visitor.get(path)[0] for path in paths]
    print(what, [f"{each:.2f}" for each in took], flush=True)
    return what, bar, f"{statistics.median(took):.2f} s ({max(took):.2f})"


def started(visitor, path, explorer):
    """Start all that a page waits for; what it said it would take, and what it took."""
    queue, said, took = explorer.work_queue, 0.0, 0.0
    for _ in range(4):
        seconds, page = visitor.get(path)
        took += seconds
        names = [name for name in list(queue.pending) if name.encode() in page]
        if not names:
            break
        state = json.loads(visitor.get(f"/work/{names[0]}", "POST")[1])
        said += state.get("seconds", 0.0)
        begin = time.perf_counter()
        while queue.state(names[0]) is not None:
            time.sleep(0.02)
        took += time.perf_counter() - begin
    print(path, f"said {said:.1f}, took {took:.1f}", flush=True)
    return f"{took:.1f} s" + (f" (said: {said:.0f} s)" if said else ""), took


if __name__ == "__main__":
    main()
