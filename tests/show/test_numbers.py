"""Numbers as pages write them, and the axes of charts."""

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualform.show.views.charts import ChartScale, Curve, bar_chart, line_chart, stacked_chart, ticks_of
from dualform.show.views.numbers import number, percent, signed, signed_alike

FINITE = st.floats(-1e12, 1e12, allow_nan=False)
BACK = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def value_of(text: str) -> float:
    mantissa, _, exponent = text.replace("−", "-").replace(",", "").partition("·10")
    return float(mantissa) * 10.0 ** (int(exponent.translate(BACK)) if exponent else 0)


@given(FINITE)
def test_a_number_reads_back_to_its_digits(value):
    text = number(value)
    assert "e" not in text and "-" not in text
    assert value_of(text) == pytest.approx(value, rel=6e-2 if "·" in text else 6e-3, abs=1e-300)
    assert signed(value).lstrip("+") == text and signed(value).startswith("+") == (value > 0)


@given(st.lists(FINITE, min_size=1, max_size=8))
def test_a_column_has_as_many_decimals_everywhere(values):
    texts = signed_alike(values)
    assert all(re.fullmatch(r"[+−]?[\d,]+(\.\d+)?(·10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)?", text) for text in texts)
    largest = max(map(abs, values))
    for text, value in zip(texts, values, strict=True):
        assert value_of(text) == pytest.approx(value, abs=(6e-2 if "·" in text else 6e-3) * largest)
    if 1e-4 <= largest < 1e6:
        assert len({len(text.partition(".")[2]) for text in texts}) == 1


def test_what_is_not_a_number_and_what_is_nearly_all():
    assert (
        number(math.nan) == "–"
        and number(-math.inf) == "−∞"
        and number(0.0) == "0"
        and signed_alike([-1e-9, 1]) == ["0.00", "+1.00"]
    )
    assert (
        percent(0.9999) == "> 99.9 %"
        and percent(1.0) == "100.0 %"
        and percent(1e-6) == "< 0.1 %"
        and percent(0) == "0.0 %"
    )


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.integers(2, 9))
def test_ticks_are_round_and_few_and_where_they_say(values, most):
    scale = ChartScale.around(values)
    ticks = ticks_of(scale, most)
    assert len(ticks) <= most + 1
    for tick in ticks:
        assert -1e-6 <= tick.at <= 100 + 1e-6
        place = scale.low + (100 - tick.at) / 100 * (scale.high - scale.low)
        assert value_of(tick.text) == pytest.approx(place, abs=0.02 * (scale.high - scale.low))


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=40))
def test_bars_stand_on_the_line_of_zero(values):
    chart = bar_chart(values, ["x"] * len(values), alt="", x_name="", y_name="")
    for bar, value in zip(chart.bars, values, strict=True):
        edge = bar.y + bar.height if value >= 0 else bar.y
        assert edge == pytest.approx(chart.zero, abs=0.01)


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=12))
def test_stacked_bars_do_not_overlap(pairs):
    edges = [10 * i for i in range(len(pairs) + 1)]
    groups = [("own", "a", [a for a, _ in pairs]), ("rest", "b", [b for _, b in pairs])]
    chart = stacked_chart(edges, groups, alt="", y_name="")
    for i in range(len(pairs)):
        column = [bar for bar in chart.bars if edges[i] < (bar.x + bar.width / 2) / 100 * edges[-1] < edges[i + 1]]
        column.sort(key=lambda bar: bar.y)
        for above, below in pairwise(column):
            assert above.y + above.height <= below.y + 0.01


def test_lines_go_through_their_points_and_stairs_hold():
    chart = line_chart([Curve("rate", [1, 10, 20], [0.1, 0.05, 0.01])], alt="", x_name="step", y_name="", stairs=True)
    points = [tuple(map(float, point.split(","))) for point in chart.lines[0].points.split()]
    assert [y for _, y in points[:3]] == [points[0][1], points[0][1], points[2][1]] and points[-1][0] == 1000
    assert chart.bars[0].says == "step 1: rate: 0.100"
