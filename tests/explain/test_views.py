"""Which visits a filter means."""

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from helpers import Run, assert_whole, batches, mlp, sgd, trained
from hypothesis import given
from hypothesis import strategies as st

from dualform.errors import FilterError, HorizonError, QueryError, UnknownColumn
from dualform.explain import filters


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    model = mlp(5, 4, 3)
    return trained(tmp_path_factory.mktemp("memory"), model, sgd(model), batches(6, 4, 5, 3))


FILTERS = {
    "label": ("label = 1", pc.field("label") == 1, lambda v: v["label"] == 1),
    "source": ("source = 'odd'", pc.field("source") == "odd", lambda v: v["source"] == "odd"),
    "two columns": (
        "label <> 0 and step > 2",
        (pc.field("label") != 0) & (pc.field("step") > 2),
        lambda v: v["label"] != 0 and v["step"] > 2,
    ),
    "a list": ("index in (0, 5, 23)", pc.field("index").isin([0, 5, 23]), lambda v: v["index"] in (0, 5, 23)),
    "a modulus": ("visit % 3 = 0", None, lambda v: v["visit"] % 3 == 0),
    "a pattern": ("source like 'o%'", pc.field("source") == "odd", lambda v: v["source"].startswith("o")),
}


HOSTILE = [
    "1); drop view visits; --",
    "1) from visits; select (1",
    "(select count(*) from read_csv('/etc/passwd')) > 0",
    "(select count(*) from run) > 0",
    "exists(select * from 'visits.parquet')",
    "true) from visits; copy visits to 'stolen.csv'; select (true",
    "true; set enable_external_access = true",
]


@pytest.mark.parametrize("filter", HOSTILE)
def test_a_filter_sees_the_visits_and_nothing_else(filter, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FilterError):
        run.memory.without(filter)
    assert not list(tmp_path.iterdir())
    assert len(run.memory.only("visit >= 0").visits) == len(run.memory.visits)


def test_a_filter_that_never_ends_is_stopped(run, monkeypatch):
    monkeypatch.setattr(filters, "LONGEST", 0.3)
    with pytest.raises(FilterError, match="takes more than"):
        run.memory.without("(select count(*) from range(100000000) a, range(100000) b) > label")


@pytest.mark.parametrize("name", FILTERS)
def test_sql_expressions_and_masks_mean_the_same(name, run):
    sql, expression, python = FILTERS[name]
    memory = run.memory
    mask = np.array([bool(python(line)) for line in memory.visits.to_pylist()])
    views = [memory.only(sql), memory.only(mask), memory.only(torch.from_numpy(mask)), memory.without(~mask)]
    views += [memory.only(expression)] if expression is not None else []
    expected = [line for line, shown in zip(memory.visits.to_pylist(), mask, strict=True) if shown]
    for view in views:
        assert view.visits.to_pylist() == expected
        for parameter, tensor in view.weights().items():
            assert torch.equal(tensor, views[0].weights()[parameter])
    hidden = [line for line, shown in zip(memory.visits.to_pylist(), mask, strict=True) if not shown]
    assert memory.without(sql).visits.to_pylist() == hidden


@given(bits=st.lists(st.booleans(), min_size=24, max_size=24), step=st.integers(1, 6))
def test_a_view_shows_the_visits_of_its_mask_up_to_its_step(run, bits, step):
    mask = np.array(bits)
    steps = np.array(run.memory.visits["step"].to_pylist())
    shown = mask & (steps <= step)
    if not shown.any():
        with pytest.raises(FilterError, match="matches none"):
            run.memory.at(step).only(mask)
        return
    view = run.memory.at(step).only(mask)
    assert view.visits["visit"].to_pylist() == np.flatnonzero(shown).tolist()
    assert f"step {step} of 6" in repr(view)


@pytest.mark.parametrize(
    "filter",
    [
        "label = 9",
        "colour = 'red'",
        "label =",
        "drop table visits",
        "1; 2",
        np.ones(3, bool),
        np.ones(24),
        pc.field("label") == 9,
        pc.field("colour") == 1,
    ],
)
def test_a_filter_that_means_nothing_is_refused(filter, run):
    for ask in (run.memory.only, run.memory.without):
        with pytest.raises(FilterError):
            ask(filter)


def test_masking_everything_leaves_the_first_weights(run):
    memory = run.memory.without("true")
    assert len(memory.visits) == 0
    spot = memory.attend(run.model, run.inputs[:2])
    assert not spot.by("label", layer="2").values.any()
    assert_whole(spot.by("label", layer="2"))


@pytest.mark.parametrize("step", [-1, 7, 100])
def test_a_step_outside_the_memory_is_refused(step, run):
    with pytest.raises(HorizonError, match=f"step {step}: it holds steps 0 to 6"):
        run.memory.at(step)


def test_an_unknown_column_is_refused_with_those_there_are(run):
    with pytest.raises(UnknownColumn, match=r"'colour'.*'label'"):
        run.memory.attend(run.model, run.inputs[:1]).by("colour", layer="2")
    with pytest.raises(UnknownColumn, match="colour"):
        run.memory.ledger("colour")


def test_a_ledger_takes_a_group_for_each_visit_in_place_of_a_column(run):
    label = run.memory.visits["label"].to_pylist()
    noted, given = run.memory.ledger("label"), run.memory.ledger(label)
    assert set(noted) == set(given)
    for group in noted:
        for name, part in noted[group].items():
            assert torch.equal(part, given[group][name])
    assert set(run.memory.ledger(np.array(label) == 1)) == {False, True}
    with pytest.raises(QueryError, match="3 groups were given for the 24 visits"):
        run.memory.ledger([1, 2, 3])
