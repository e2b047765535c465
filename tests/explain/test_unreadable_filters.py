"""A filter that cannot be read is answered in our words: what is wrong, the columns there are, an example."""

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualform.errors import FilterError
from dualform.explain.filters import matching
from dualform.explain.unreadable_filter import unreadable

VISITS = pa.table(
    {"visit": [0, 1, 2], "step": [1, 1, 2], "label": [0, 3, 3], "source": ["web", "book", "web"], "index": [4, 5, 6]}
)
DUCKDB_WORDS = ("Binder", "Parser", "Conversion", "Catalog", "FROM clause", "INT32", "INT64", "LINE 1", "VARCHAR")


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("colour = 3", "there is no column 'colour'. Write"),
        ("lable = 3", "Do you mean 'label'?"),
        ('source = "web"', "single quotes, as in source = 'web'"),
        ("label =", "ends too early"),
        ("label = 3 and", "ends too early"),
        ("(label = 3", "every bracket"),
        ("source = 'web", "never closed"),
        ("label = 3 order by step", "not understood from 'order' on"),
        ("label = 3; select 1", "more than one statement"),
        ("source = 3", "holds 'web', which is not a whole number"),
        ("label = 'three'", "'three' is not a whole number"),
        ("web.label = 3", "no table 'web'"),
        ("label in 3", "of another kind"),
        (" ", "it is empty"),
    ],
)
def test_a_filter_that_cannot_be_read_is_answered_in_our_words(text, says, plain):
    with pytest.raises(FilterError) as refused:
        matching(VISITS, text, plain=plain)
    message = str(refused.value)
    assert says in message and repr(text) in message
    assert "['visit', 'step', 'label', 'source', 'index']" in message and "'label = 3 and step < 100'" in message
    assert not any(word in message for word in DUCKDB_WORDS), message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sum(label) > 3", "a condition is about one visit"),
        ("nice(label) = 1", "there is no function 'nice'"),
        ("read_csv('x.csv')", "a filter sees the visits alone"),
        ("label = ?", "placeholder"),
    ],
)
def test_functions_that_are_no_part_of_a_condition_are_named(text, says):
    with pytest.raises(FilterError, match=says):
        matching(VISITS, text)


def test_the_example_of_the_message_can_be_used():
    example = unreadable("label =", "", VISITS.column_names).split("such as '")[1].rstrip("'.")
    assert matching(VISITS, example).tolist() == [False, True, True]
    assert "'step < 100'" in unreadable("x", "", ["visit", "step"])


@given(st.text(st.sampled_from("label step source'\"=<>()+-*,;. 0123andor")))
def test_any_text_is_a_mask_or_an_error_of_ours(text):
    try:
        assert len(matching(VISITS, text, plain=True)) == 3
    except FilterError as error:
        assert not isinstance(error.__context__, duckdb.Error) or repr(text) in str(error)
