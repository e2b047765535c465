"""How long a visitor of the explorer waits: 384,000 visits in three layers, pages asked for over a real connection.

    python benchmarks/explorer.py [--repeats 5] [--folder runs] [--adam-steps 300]

Makes runs/mnist-float16 (SGD, 3,000 steps) and runs/mnist-adam if they are not there.
"""

import argparse
import http.client
import json
import statistics
import threading
import time
from pathlib import Path

import torch
from paper_run import BATCH, images, machine, save, train
from torch import nn

import dualform
from dualform.models import MLP
from dualform.show.examples import Examples
from dualform.show.views.explorer import Explorer
from dualform.show.web.app import warm_up
from dualform.show.web.serve import make_server

WIDTHS = (784, 800, 800, 10)


class Visitor:
    """Asks a server for pages, and counts the seconds."""

    def __init__(self, explorer):
        self.server, address = make_server(explorer, "127.0.0.1", 0, None)
        begin = time.perf_counter()
        warm_up(explorer)
        self.warm = time.perf_counter() - begin
        threading.Thread(target=lambda: self.server.run(sockets=[self.server.dualform_socket]), daemon=True).start()
        self.port = int(address.rstrip("/").rsplit(":", 1)[1])
        while not self.server.started:
            time.sleep(0.01)

    def get(self, path, method="GET"):
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        begin = time.perf_counter()
        line.request(method, path, headers={"X-Dualform": "1", "Content-Length": "0"} if method == "POST" else {})
        response = line.getresponse()
        body = response.read()
        assert response.status == 200, body[:300]
        line.close()
        return time.perf_counter() - begin, body

    def wait_for(self, explorer):
        """Wait until all that was begun is done."""
        begin = time.perf_counter()
        while any(pending.state == "running" for pending, *_ in list(explorer.work_queue.pending.values())):
            time.sleep(0.05)
        return time.perf_counter() - begin


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--folder", type=Path, default=Path("runs"))
    options.add_argument("--adam-steps", type=int, default=300)
    asked = options.parse_args()
    torch.set_num_threads(2)
    data = {part: images(part) for part in ("train", "test")}
    lines = sgd(asked, data) + adam(asked, data)
    table = "\n".join(f"| {what} | {bar} | {value} |" for what, bar, value in lines)
    save(
        "explorer",
        f"""Pages of the explorer over a connection on this machine, each about another test image: median (and worst)
of {asked.repeats}.

| | bar | measured |
|---|---|---|
{table}

Machine: {machine()}, 2 threads.""",
    )


def sgd(asked, data):
    path = asked.folder / "mnist-float16"
    if not path.exists():
        train(*data["train"], path)
    explorer = Explorer(dualform.open(path), MLP(*WIDTHS), Examples(*data["train"]), Examples(*data["test"]))
    visits = len(explorer.memory.visits)
    visitor = Visitor(explorer)
    waited = visitor.wait_for(explorer)
    lines = [
        (f"SGD, {visits:,} visits: warm-up before the first page", "", f"{visitor.warm:.1f} s"),
        ("ledgers by label and by time, behind the pages", "", f"{waited:.0f} s"),
    ]
    rows = iter(range(1, 10_000))
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
    paths = [f"/what-if/test/{next(rows)}?after={150 * i}&upto={150 * (i + 4)}" for i in range(asked.repeats)]
    lines.append(timed("masking a fifth of the time", "0.3 s", paths, visitor))
    rebuilt, _ = started(visitor, f"/what-if/test/{next(rows)}?example=17", explorer)
    lines.append(("all weights as a sum, once, before single examples can be masked", "", rebuilt))
    paths = [f"/what-if/test/{next(rows)}?example={100 + i}" for i in range(asked.repeats)]
    lines.append(timed("masking one example", "", paths, visitor))
    text, _ = started(visitor, f"/prediction/test/{next(rows)}?step=1500", explorer)
    lines.append(("travelling to step 1,500, the first time", "", text))
    text, _ = started(visitor, "/training?rows=200", explorer)
    lines.append(("weighing the training set by 200 test images", "", text))
    visitor.server.should_exit = True
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
    waited = visitor.wait_for(explorer)
    lines = [
        (
            f"AdamW, {len(explorer.memory.visits):,} visits: ledgers by label and by time, behind the pages",
            "",
            f"{waited:.0f} s",
        ),
        timed("masking a class", "", [f"/what-if/test/{i}?group={i % 10}" for i in range(asked.repeats)], visitor),
    ]
    for layer in explorer.layers:
        paths = [f"/prediction/test/{100 + i}?layer={layer}&score=abs" for i in range(asked.repeats)]
        lines.append(timed(f"layer {layer}, score abs", "", paths, visitor))
        text, _ = started(visitor, f"/prediction/test/7?layer={layer}&score=contribution", explorer)
        lines.append((f"layer {layer}, what each visit adds", "", text))
    visitor.server.should_exit = True
    return lines


def timed(what, bar, paths, visitor):
    took = [visitor.get(path)[0] for path in paths]
    print(what, [f"{each:.2f}" for each in took], flush=True)
    return what, bar, f"{statistics.median(took):.2f} s ({max(took):.2f})"


def started(visitor, path, explorer):
    """Start all that a page waits for; what it said it would take, and what it took."""
    said, took = 0.0, 0.0
    for _ in range(4):
        seconds, page = visitor.get(path)
        took += seconds
        names = [name for name in explorer.work_queue.pending if name.encode() in page]
        if not names:
            break
        state = json.loads(visitor.get(f"/work/{names[0]}", "POST")[1])
        said += state["seconds"]
        begin = time.perf_counter()
        while explorer.work_queue.state(names[0]) is not None:
            time.sleep(0.02)
        took += time.perf_counter() - begin
    print(path, f"said {said:.1f}, took {took:.1f}", flush=True)
    return f"{took:.1f} s" + (f" (announced: {said:.0f} s)" if said else ""), took


if __name__ == "__main__":
    main()
