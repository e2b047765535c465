"""The pages Run and Compare."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dualform.errors import HorizonError, QueryError
from dualform.explain import open_memory
from dualform.models import MLP
from dualform.record import record
from dualform.show.examples import Examples
from dualform.show.views.compare import AnswersOfBoth, CompareQuestion, compare
from dualform.show.views.explorer import ExamplePlace, Explorer
from dualform.show.views.run import badge_of, run
from dualform.show.views.work import WorkQueue
from dualform.types import DType

PLACE = ExamplePlace("test", 3)


def trained(path: Path, seed: int = 0, dtype: DType = "float32", edit: bool = False, loss: bool = False):
    """A small classifier; with an edit beside its steps, or with its losses noted."""
    torch.manual_seed(0)
    x, labels = torch.randn(60, 8), torch.arange(60) % 3
    torch.manual_seed(seed)
    model = MLP(8, 12, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    with record(model, optimizer, path, dtype=dtype, progress=False) as tape:
        for step in range(30):
            index = torch.arange(6 * step, 6 * step + 6) % 60
            losses = nn.functional.cross_entropy(model(x[index]), labels[index], reduction="none")
            tape.note(index=index, label=labels[index], **({"loss": losses.detach()} if loss else {}))
            losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if edit and step == 15:
                with torch.no_grad():
                    model.get_parameter("fc2.weight").mul_(0.9)
    examples = Examples(x, labels)
    return Explorer(open_memory(path), MLP(8, 12, 3), examples, examples, ["a", "b", "c"], work_queue=WorkQueue(1e9))


def test_the_badge_says_how_exact_a_memory_is(tmp_path):
    exact = run(trained(tmp_path / "exact"))
    assert exact.badge.word == "Exact to rounding" and exact.badge.is_good and "e-" not in exact.badge.meaning
    halves = run(trained(tmp_path / "halves", dtype="float16"))
    assert halves.badge.word == "Exact to float16" and halves.badge.is_good and "float16" in halves.badge.meaning


@pytest.mark.filterwarnings("ignore")
def test_what_the_memory_cannot_explain_is_on_the_badge(tmp_path):
    view = run(trained(tmp_path / "edited", edit=True))
    assert view.badge.word == "Marked" and not view.badge.is_good and view.marks
    assert badge_of(open_memory(tmp_path / "edited").certificate, "float32") == view.badge


def test_loss_rate_and_size_are_drawn(tmp_path):
    explorer = trained(tmp_path / "memory", loss=True)
    view = run(explorer)
    visits = explorer.memory.visits
    means = visits.group_by("step").aggregate([("loss", "mean")]).sort_by("step")["loss_mean"].to_pylist()
    assert view.losses and len(view.losses.lines[0].points.split()) == 30
    heights = [float(point.split(",")[1]) for point in view.losses.lines[0].points.split()]
    assert (heights[0] < heights[-1]) == (means[0] > means[-1]), "smaller is lower"
    assert view.rates and view.rate is None and view.rates.bars[0].says == "step 1: 0.200"
    assert run(trained(tmp_path / "plain")).losses is None


def test_the_command_is_remembered_without_its_secrets(tmp_path):
    program = tmp_path / "train it.py"
    program.write_text(
        "import sys, torch, dualform\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "with dualform.record(model, optimizer, sys.argv[1], progress=False):\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    words = [str(tmp_path / "memory"), "--api-key", "hunter2", "--wandb-token=hunter3", "--lr", "0.1"]
    subprocess.run([sys.executable, str(program), *words], check=True, capture_output=True)
    command = open_memory(tmp_path / "memory").store.manifest.command
    assert command == f"python '{program}' {tmp_path / 'memory'} --api-key REMOVED --wandb-token=REMOVED --lr 0.1"


def test_two_steps_are_compared_by_what_they_say(tmp_path):
    explorer = trained(tmp_path / "memory")
    view = compare(explorer, PLACE, CompareQuestion(5, 30, rows=60))
    x = explorer.inputs("test", range(60))
    answers = []
    for step, side in ((5, view.left), (30, view.right)):
        memory = explorer.memory.at(step)
        spot = memory.attend(explorer.model, x[3:4])
        assert side.view is not None and side.view.examples
        assert [example.index for example in side.view.examples] == [hit.index for hit in spot.top(5)]
        answers.append(memory.predict(MLP(8, 12, 3), x, progress=False).argmax(1))
    assert isinstance(view.answers, AnswersOfBoth) and view.answers.compared == 60
    assert view.answers.changed == int((answers[0] != answers[1]).sum()) > 0
    labels = torch.arange(60) % 3
    assert view.answers.left_right == pytest.approx(float((answers[0] == labels).float().mean()))
    assert view.answers.right_right == pytest.approx(float((answers[1] == labels).float().mean()))
    for changed in view.answers.shown:
        assert (changed.left, changed.right) == tuple("abc"[int(part[changed.row])] for part in answers)
    again = compare(explorer, PLACE, CompareQuestion(30, 30))
    assert again.shared == 5 and isinstance(again.answers, AnswersOfBoth) and again.answers.changed == 0


def test_two_memories_are_compared_and_never_confused(tmp_path):
    explorer, second = trained(tmp_path / "one"), trained(tmp_path / "two", seed=1)
    alone = compare(second, PLACE, CompareQuestion(30, 30)).left.view
    explorer.compare_with([open_memory(tmp_path / "two"), open_memory(tmp_path / "one")])
    assert list(explorer.others) == ["two", "one (2)"]
    view = compare(explorer, PLACE, CompareQuestion(other="two"))
    assert view.left.view and view.right.view and alone
    assert view.right.view.examples == alone.examples != view.left.view.examples
    assert view.right.view.says == alone.says != view.left.view.says
    same = compare(explorer, PLACE, CompareQuestion(other="one (2)"))
    assert same.shared == 5 and isinstance(same.answers, AnswersOfBoth) and same.answers.changed == 0
    for question in (CompareQuestion(other="three"), CompareQuestion(rows=0), CompareQuestion(left=31)):
        with pytest.raises((QueryError, HorizonError)):
            compare(explorer, PLACE, question)


def test_another_network_is_refused_in_a_sentence(tmp_path):
    explorer = trained(tmp_path / "one")
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, optimizer, tmp_path / "other", progress=False) as tape:
        tape.note(index=torch.arange(4))
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    with pytest.raises(Exception, match="fc1"):
        explorer.compare_with([open_memory(tmp_path / "other")])
