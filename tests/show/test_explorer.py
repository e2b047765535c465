"""What the explorer shows is what the memory says."""

import subprocess
import sys
import time
from collections import Counter

import pytest
import torch

from dualform.errors import QueryError
from dualform.explain import Memory, open_memory
from dualform.explain.groups import stretch_edges
from dualform.models import MLP
from dualform.show.commands import demo
from dualform.show.examples import Examples
from dualform.show.views.attention import AttentionQuestion, attention
from dualform.show.views.explorer import ExamplePlace, Explorer
from dualform.show.views.prediction import PredictionQuestion, PredictionView, predict
from dualform.show.views.run import run
from dualform.show.views.what_if import (
    REMOVED,
    WhatIfMasks,
    edges_of,
    ledger_of,
    ledger_of_time,
    what_if,
)
from dualform.show.views.what_if.masks import STRETCHES
from dualform.show.views.work import PendingWork, WorkQueue

THIRD = ExamplePlace("test", 3)


def answer_of(explorer: Explorer, question: PredictionQuestion, place: ExamplePlace = THIRD) -> PredictionView:
    view = predict(explorer, place, question)
    assert isinstance(view, PredictionView)
    return view


MASKS = {
    "groups": (WhatIfMasks(groups=("1", "7")), "label in (1, 7)"),
    "one group": (WhatIfMasks(groups=("3",)), "label = 3"),
    "time": (WhatIfMasks(after=30, upto=60), "step > 30 and step <= 60"),
    "a crooked time": (WhatIfMasks(after=31, upto=58), "step > 31 and step <= 58"),
    "examples": (WhatIfMasks(examples=(3043, 3393)), "index in (3043, 3393)"),
    "a filter": (WhatIfMasks(filter="label = 4 and step < 20"), "label = 4 and step < 20"),
    "all of them": (
        WhatIfMasks(groups=("1",), after=0, upto=15, examples=(3043,), filter="label = 9"),
        "label in (1, 9) or step <= 15 or index = 3043",
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_shows_what_the_memory_says_without_it(digits_explorer, name):
    masks, filter = MASKS[name]
    view = what_if(digits_explorer, THIRD, masks)
    memory = open_memory(digits_explorer.memory.path).without(filter)
    logits = memory.predict(MLP(*demo.WIDTHS), digits_explorer.input(THIRD))[0]
    assert view.without is not None
    for each in view.without:
        assert each.logit == pytest.approx(float(logits[each.number]), abs=1e-3)
    assert view.hidden == view.visits - len(memory.visits)
    assert REMOVED in view.note and [each.number for each in view.without] == [each.number for each in view.says]
    assert view.changed == (int(logits.argmax()) != view.says[0].number)


def test_the_top_examples_of_a_prediction_can_be_masked(digits_explorer):
    best = answer_of(digits_explorer, PredictionQuestion(k=3)).examples
    assert best
    offered = what_if(digits_explorer, THIRD, WhatIfMasks(examples=(17,))).examples
    assert offered[0].index == 17 and offered[0].ticked and offered[1].index == best[0].index
    assert not any(each.ticked for each in offered[1:]) and len({each.index for each in offered}) == len(offered)


def test_undoing_a_mask_gives_the_network_back(digits_explorer):
    before = what_if(digits_explorer, THIRD, WhatIfMasks())
    what_if(digits_explorer, THIRD, WhatIfMasks(groups=("1",)))
    after = what_if(digits_explorer, THIRD, WhatIfMasks())
    assert before == after and after.without is None


def test_masks_that_make_no_sense_are_refused(digits_explorer):
    for masks, words in (
        (WhatIfMasks(groups=("eleven",)), "no group 'eleven'"),
        (WhatIfMasks(filter="drop table visits"), "cannot read"),
        (WhatIfMasks(filter="x" * 501), "longer than"),
        (WhatIfMasks(after=40, upto=40), "no step lies"),
    ):
        view = what_if(digits_explorer, THIRD, masks)
        assert words in " ".join(view.problems.values()) and view.without is None and view.hidden == 0


def test_one_end_of_a_time_is_enough(digits_explorer):
    first, last = (
        what_if(digits_explorer, THIRD, WhatIfMasks(upto=30)),
        what_if(digits_explorer, THIRD, WhatIfMasks(after=30)),
    )
    assert (first.masks.after, first.masks.upto, last.masks.after, last.masks.upto) == (0, 30, 30, 60)
    assert first.hidden + last.hidden == first.visits and first.without and last.without


def test_stretches_cover_training():
    for steps in (1, 2, 19, 20, 3000):
        edges = stretch_edges(steps, STRETCHES).tolist()
        assert edges[0] == 0 and edges[-1] == steps and edges == sorted(set(edges))


# ---------------------------------------------------------------- text, attention, the run


def test_the_heads_of_attention_are_those_of_the_layer(attention_explorer):
    explorer = attention_explorer
    view = attention(explorer, ExamplePlace("test", 4), AttentionQuestion(head=1, token=2))
    explorer.memory.load_into(explorer.model)
    with torch.no_grad():
        x = explorer.model.embedding(explorer.input(ExamplePlace("test", 4)))
        _, weights = explorer.model.attention(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(torch.tensor(view.weights).double(), weights[0, 1].double(), atol=1e-5, rtol=0)
    assert view.heads == 2 and view.tokens == list(view.shown.tokens) and view.looking.token == 2
    assert view.projections and isinstance(view.recalled, PredictionView) and view.recalled.examples
    mean = attention(explorer, ExamplePlace("test", 4), AttentionQuestion())
    torch.testing.assert_close(torch.tensor(mean.weights).double(), weights[0].mean(0).double(), atol=1e-5, rtol=0)
    for looking in (
        AttentionQuestion("nothing"),
        AttentionQuestion(head=2),
        AttentionQuestion(token=6),
        AttentionQuestion(recalled="out"),
    ):
        with pytest.raises(QueryError):
            attention(explorer, ExamplePlace("test", 4), looking)
    assert answer_of(explorer, PredictionQuestion(), ExamplePlace("test", 4)).says[0].name in ("red", "green", "blue")


def test_a_network_without_attention_says_so(digits_explorer):
    with pytest.raises(QueryError, match="no attention layer"):
        attention(digits_explorer, THIRD, AttentionQuestion())


def test_the_run_tells_what_was_recorded(digits_explorer):
    view = run(digits_explorer)
    assert view.steps == 60 and view.rates is None and view.rate == 0.1 and view.worst is not None and view.worst < 1e-4
    assert {each.name for each in view.layers} == {"fc1", "fc2"} and view.marks == []


# ---------------------------------------------------------------- what takes a while


def wait(queue: WorkQueue, pending: PendingWork) -> None:
    for _ in range(400):
        if queue.state(pending.name) is None or pending.state == "failed":
            return
        time.sleep(0.02)
    raise AssertionError("it never ends")


def test_what_takes_long_is_announced_done_behind_and_kept(text_explorer):
    explorer = text_explorer
    explorer.work_queue.patience = 0.0
    question = PredictionQuestion("output", "contribution", k=3, per="visit")
    first = answer_of(explorer, question, ExamplePlace("test", 40))
    assert first.pending is not None and first.pending.seconds > 0 and first.examples is None
    assert first.says, "what the network says is shown at once"
    started = explorer.work_queue.start(first.pending.name)
    assert started is first.pending
    wait(explorer.work_queue, started)
    second = answer_of(explorer, question, ExamplePlace("test", 40))
    assert second.pending is None and second.examples and started.share == 1.0
    assert explorer.work_queue.start(first.pending.name) is None


def test_what_fails_says_why_and_can_be_tried_again():
    queue, tries = WorkQueue(patience=0.0), []

    def work(progress):
        tries.append(1)
        if len(tries) == 1:
            raise QueryError("not today.")
        return "found"

    pending = queue.result("key", "something", 5.0, work)
    assert isinstance(pending, PendingWork) and queue.result("key", "something", 5.0, work) is pending
    queue.start(pending.name)
    wait(queue, pending)
    assert pending.state == "failed" and pending.error == "not today."
    queue.start(pending.name)
    wait(queue, pending)
    assert queue.result("key", "something", 5.0, work) == "found" and len(tries) == 2
    assert queue.start("nothing") is None


def test_masks_of_groups_and_times_start_from_the_cached_ledger_and_rebuild_nothing(
    digits_run, digits_explorer, monkeypatch
):
    path, data = digits_run
    queue = digits_explorer.work_queue
    ledger_of(digits_explorer, "label")
    ledger_of_time(digits_explorer)
    examples = Examples(data.x, data.labels), Examples(data.x[data.test], data.labels[data.test])
    later = Explorer(open_memory(path), MLP(*demo.WIDTHS), *examples, work_queue=queue)  # with nothing in its store
    queue.patience = 0.0
    edges = edges_of(later)
    for masks, hidden in (
        (WhatIfMasks(by="label", groups=("1", "7")), "label in (1, 7)"),
        (WhatIfMasks(after=edges[2], upto=edges[5]), f"step > {edges[2]} and step <= {edges[5]}"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Memory, "held_weights", lambda *_, **__: pytest.fail("weights are rebuilt in the request"))
            view = what_if(later, THIRD, masks)
        expected = digits_explorer.memory.without(hidden).predict(digits_explorer.model, digits_explorer.input(THIRD))
        assert view.pending is None and view.without is not None
        assert [score.logit for score in view.without] == pytest.approx(
            [float(expected[0, score.number]) for score in view.without], abs=1e-5
        )


def test_a_mask_by_slots_is_announced_twice_first_the_whole_sum_then_the_hidden_part(digits_explorer):
    queue = digits_explorer.work_queue
    queue.patience = 0.0
    titles = []
    for _ in range(2):
        pending = what_if(digits_explorer, THIRD, WhatIfMasks(filter="label = 3 and step < 20")).pending
        assert pending is not None and pending.seconds > 0
        titles.append(pending.what)
        queue.start(pending.name)
        wait(queue, pending)
    assert titles[0] == "the weights as a sum" and titles[1].startswith("the weights without")
    assert what_if(digits_explorer, THIRD, WhatIfMasks(filter="label = 3 and step < 20")).without is not None


def test_few_results_that_hold_weights_are_cached():
    queue = WorkQueue(patience=1.0)
    for i in range(10):
        queue.result(("ledger", i), "a ledger", 0.0, lambda _, i=i: i)
        queue.result(("answer", i), "an answer", 0.0, lambda _, i=i: i)
    kinds = Counter(key[0] for key in queue.results if isinstance(key, tuple))
    assert kinds == {"ledger": 3, "answer": 10} and ("ledger", 9) in queue.results


FORWARD_PASSES = """
import sys
import torch
from dualform.explain import Memory, open_memory
from dualform.models import MLP
from dualform.show.views import Explorer

passes = []
explorer = Explorer(open_memory(sys.argv[1]), MLP(16, 8, 3))
torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: passes.append(module))
explorer.spot(explorer.memory, torch.ones(1, 16))
print(len(passes))
"""


@pytest.mark.parametrize("options", [(), ("-O",)])
def test_a_spotlight_has_run_its_forward_pass_also_where_python_drops_assertions(recorded, options):
    command = [sys.executable, *options, "-c", FORWARD_PASSES, str(recorded.path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 0


def test_own_inputs_are_asked_about_like_others(digits_explorer):
    place = digits_explorer.bring("a drawing", digits_explorer.input(THIRD)[0])
    own, theirs = (
        answer_of(digits_explorer, PredictionQuestion(), place),
        answer_of(digits_explorer, PredictionQuestion()),
    )
    assert own.says == theirs.says and own.label is None
    assert own.examples == theirs.examples
