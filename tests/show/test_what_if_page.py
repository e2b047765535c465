"""The page What if: without some training, directly, predicted, and trained again."""

import numpy as np
import pytest
import torch
from torch import nn

from dualform.explain import open_memory
from dualform.models import MLP
from dualform.record import record
from dualform.show.examples import Examples
from dualform.show.views.explorer import ExamplePlace, Explorer
from dualform.show.views.what_if import WhatIfMasks, what_if
from dualform.show.views.work import PendingWork, WorkQueue
from dualform.tasks import classification

PLACE = ExamplePlace("test", 3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small classifier, trained on one thread, and its data."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, model = torch.randn(60, 8), MLP(8, 12, 3)
    labels = (x @ torch.randn(8, 3)).argmax(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    path = tmp_path_factory.mktemp("what-if") / "memory"
    with record(model, optimizer, path, dtype="float32", progress=False) as tape:
        for step in range(40):
            index = torch.arange(6 * step, 6 * step + 6) % 50
            tape.note(index=index, label=labels[index])
            nn.functional.cross_entropy(model(x[index]), labels[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    yield path, x, labels
    torch.set_num_threads(threads)


@pytest.fixture
def explorer(trained):
    path, x, labels = trained
    examples = Examples(x, labels)
    torch.set_num_threads(1)
    return Explorer(
        open_memory(path), MLP(8, 12, 3), examples, examples, ["cat", "dog", "cow"], work_queue=WorkQueue(1e9)
    )


@pytest.mark.parametrize(
    ("masks", "filter"),
    [
        (WhatIfMasks(examples=(7, 11)), "index in (7, 11)"),
        (WhatIfMasks(groups=("1",)), "label = 1"),
        (WhatIfMasks(after=10, upto=20), "step > 10 and step <= 20"),
    ],
)
def test_the_three_answers_are_those_of_the_run(trained, explorer, masks, filter):
    path, x, labels = trained
    view = what_if(explorer, PLACE, masks)
    memory, model = open_memory(path), MLP(8, 12, 3)
    memory.load_into(model)
    run = memory.replay(model, *classification(x, labels), progress=False)
    comparison = run.compare(x[3:4].repeat(3, 1), without=filter, target=torch.arange(3), progress=False)
    assert [answer.name for answer in view.answers] == ["direct", "predicted", "retrained"] and view.caveat == ""
    numbers = [score.number for score in view.says]
    for answer, changes in zip(view.answers[1:], (comparison.predicted, comparison.retrained), strict=True):
        assert answer.scores and [score.number for score in answer.scores] == numbers
        assert answer.changes == pytest.approx(changes[numbers].tolist(), abs=2e-4)
        assert sum(score.probability or 0 for score in answer.scores) == pytest.approx(1)
        logits = comparison.before + changes
        assert answer.answer == ("cat", "dog", "cow")[int(logits.argmax())]
        assert answer.changed == (int(logits.argmax()) != view.says[0].number)
    direct = memory.without(filter).predict(MLP(8, 12, 3), x[3:4], progress=False)[0]
    assert view.answers[0].scores
    assert [score.logit for score in view.answers[0].scores] == pytest.approx(direct[numbers].tolist(), abs=1e-3)
    assert view.best is view.answers[2]


def test_one_run_and_one_influence_serve_all_masks(explorer, monkeypatch):
    what_if(explorer, PLACE, WhatIfMasks(examples=(7,)))
    done = set(explorer.work_queue.results)
    what_if(explorer, PLACE, WhatIfMasks(examples=(8,)))
    new = {key[0] for key in set(explorer.work_queue.results) - done if isinstance(key, tuple)}
    assert new == {"without", "retrained"}


def test_the_selection_can_be_left_out(explorer):
    indices = (2, 9, 30)
    explorer.selected.add(indices)
    by_hand = what_if(explorer, PLACE, WhatIfMasks(examples=indices), again=False)
    selected = what_if(explorer, PLACE, WhatIfMasks(selected=True), again=False)
    assert selected.hidden == by_hand.hidden > 0 and selected.without == by_hand.without and selected.selected == 3


def test_a_problem_stands_beside_its_field(explorer):
    masks = WhatIfMasks(groups=("9",), after=20, upto=20, examples=(55,), filter="drop table")
    view = what_if(explorer, PLACE, masks)
    assert set(view.problems) == {"group", "time", "example", "filter"} and view.answers == [] and view.hidden == 0
    assert "never trained on" in view.problems["example"] and "no group '9'" in view.problems["group"]


def test_tiles_do_not_depend_on_what_somebody_else_looked_at(explorer):
    before = what_if(explorer, PLACE, WhatIfMasks()).examples
    what_if(explorer, ExamplePlace("test", 5), WhatIfMasks())
    assert what_if(explorer, PLACE, WhatIfMasks()).examples == before and before
    best = explorer.memory.attend(explorer.model, explorer.input(PLACE)).top(12)
    assert [example.index for example in before] == [hit.index for hit in best]
    assert {example.label for example in before} <= {"cat", "dog", "cow"}


def test_where_training_cannot_be_run_again_it_is_said(text_explorer, trained):
    text_explorer.work_queue.patience = 1e9
    view = what_if(text_explorer, ExamplePlace("test", 40), WhatIfMasks(by="source", groups=("first",)))
    assert view.answers[0].scores and [answer.scores for answer in view.answers[1:]] == [None, None]
    assert "run=memory.replay" in view.answers[1].reason and view.best is view.answers[0]
    path, x, labels = trained
    alone = Explorer(open_memory(path), MLP(8, 12, 3), None, Examples(x, labels), work_queue=WorkQueue(1e9))
    assert "--data" in what_if(alone, PLACE, WhatIfMasks(groups=("1",))).answers[2].reason


def test_another_loss_is_given_as_a_run(tmp_path):
    torch.manual_seed(0)
    x, model = torch.randn(30, 5), nn.Linear(5, 1)
    y = x.sum(1, keepdim=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with record(model, optimizer, tmp_path / "memory", dtype="float32", progress=False) as tape:
        for step in range(12):
            index = torch.arange(5 * step, 5 * step + 5) % 30
            tape.note(index=index, third=index % 3)
            (model(x[index]) - y[index]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = open_memory(tmp_path / "memory")
    run = memory.replay(
        model, lambda m, batch: (m(batch[0]) - batch[1]).square().mean(1) / len(batch[0]), lambda i: (x[i], y[i]),
        progress=False,
    )  # fmt: skip
    explorer = Explorer(memory, model, Examples(x), Examples(x), run=run, work_queue=WorkQueue(1e9))
    view = what_if(explorer, PLACE, WhatIfMasks(by="third", groups=("1",)))
    again = run.retrain(without="third = 1")
    assert view.answers[2].scores and view.answers[2].scores[0].logit == pytest.approx(again(x[3:4]).item(), abs=1e-5)


def test_what_takes_long_is_announced_one_after_the_other(explorer):
    explorer.work_queue.patience = 0.0
    view = what_if(explorer, PLACE, WhatIfMasks(examples=(7,)))
    assert isinstance(view.answers[1].pending, PendingWork) and view.answers[1].pending.seconds > 0
    assert np.isfinite(view.answers[1].pending.seconds) and view.says
