"""Long passes say how long they take: once, on standard error, within a factor of two, and never where all is quiet."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dualform import progress
from dualform.explain import open_memory
from dualform.progress import LONG, PassTime, bar, in_words, quietly
from dualform.record import record


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(total: int, block: int, seconds: float, before: float = 0.0, slower: float = 1.0) -> tuple[list[str], PassTime]:
    """A pass of so many slots in blocks, each slot ``seconds`` long, the first block ``slower``, after a set-up."""
    said: list[str] = []
    clock = Clock()
    watch = PassTime("attending", total, 0, said.append, clock)
    clock.now += before
    for first in range(0, total, block):
        slots = min(block, total - first)
        clock.now += slots * seconds * (slower if first == 0 else 1.0)
        watch(slots)
    return said, watch


def seconds_in(sentence: str) -> float:
    number, unit = sentence.split("about ")[1].rstrip(".").split()
    return float(number) * {"s": 1, "min": 60, "h": 3600}[unit]


@given(st.integers(100, 5000), st.floats(0, 0.1), st.floats(0, 50), st.floats(0.5, 20), st.floats(12, 20_000))
def test_a_steady_pass_is_announced_once_within_a_factor_of_two(blocks, share, before, slower, seconds):
    block = 10
    said, _ = run(blocks * block, block, seconds / (blocks * block), before, slower)
    took = before + seconds + (slower - 1) * seconds / blocks
    if said:
        assert len(said) == 1 and took / 2 <= seconds_in(said[0]) <= took * 2
    else:
        assert before > took / 4, "a long set-up leaves nothing to announce"


@given(st.integers(1, 500), st.floats(0.1, LONG * 0.9))
def test_a_short_pass_says_nothing(blocks, seconds):
    assert run(blocks * 10, 10, seconds / (blocks * 10))[0] == []


@given(st.integers(1, 8), st.integers(2, 60), st.floats(3, 1000))
def test_tasks_side_by_side_are_announced_when_the_first_of_each_process_have_ended(at_once, tasks, each):
    said: list[str] = []
    clock = Clock()
    watch = PassTime("training again", tasks, at_once, said.append, clock)
    rounds = -(-tasks // at_once)
    for task in range(tasks):
        clock.now = each * (task // at_once + 1)
        watch(1)
    if rounds * each >= 1.1 * LONG and rounds >= 3:
        assert len(said) == 1 and rounds * each / 2 <= seconds_in(said[0]) <= rounds * each * 2
    if rounds * each < LONG:
        assert not said


@given(st.floats(1, 1e6))
def test_the_words_are_near_the_number(seconds):
    assert seconds_in(f"about {in_words(seconds)}.") == pytest.approx(seconds, rel=0.35, abs=4)


@pytest.mark.parametrize("text", ["12 s", "40 s", "60 s", "3 min", "2 h"])
def test_the_words_are_short(text):
    assert in_words(seconds_in(f"about {text}.")) == text


@pytest.fixture
def memory(tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    with record(model, optimizer, tmp_path / "m", progress=False) as tape:
        for _ in range(50):
            tape.note(label=torch.arange(4) % 2)
            model(torch.randn(4, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return open_memory(tmp_path / "m"), model


QUESTIONS = {
    "a question": lambda memory, model, show: memory.attend(model, torch.ones(2, 4)).top(
        3, layer="0", per="slot", progress=show
    ),
    "a ledger": lambda memory, model, show: memory.ledger("label", progress=show),
    "a check": lambda memory, model, show: memory.check(model, full=True, progress=show),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_it_is_said_on_standard_error_unless_progress_is_off_or_all_is_quiet(name, memory, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LONG", 0.0)
    monkeypatch.setattr(progress, "LEAST", 0.0)
    monkeypatch.setattr(PassTime, "_estimated", lambda self, seconds, elapsed: announce(self, seconds))

    def announce(self: PassTime, seconds: float) -> None:
        self.seconds = seconds
        self.say(f"{self.task}: this will take about {in_words(seconds)}.")

    opened, model = memory
    QUESTIONS[name](opened, model, True)
    out, said = capsys.readouterr()
    assert not out and said.count("this will take about") == 1 and said.startswith("dualform: ")
    opened = open_memory(opened.path)
    QUESTIONS[name](opened, model, False)
    with quietly():
        QUESTIONS[name](open_memory(opened.path), model, True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_function_is_called_with_whole_numbers_that_reach_the_total(name, memory, capsys):
    calls: list[tuple[str, int, int]] = []
    opened, model = memory
    with quietly():
        QUESTIONS[name](opened, model, lambda *call: calls.append(call))
    (total,) = {total for _, _, total in calls}
    done = [count for _, count, _ in calls]
    assert done == sorted(done) and done[-1] == total and all(type(count) is int for count in done)
    assert capsys.readouterr() == ("", "")


def test_only_the_outermost_of_several_passes_speaks(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LONG", 0.0)
    with bar("outer", 100, True), bar("inner", 100, True) as inner:
        assert inner is None
    with bar("outer", 100, False), bar("inner", 100, True) as inner:
        assert inner is not None
    assert not sys.stderr.isatty()
