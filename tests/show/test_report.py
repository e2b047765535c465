"""The report: the views, frozen in one page that needs nothing else."""

import base64
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image

from dualform.show.examples import data_address
from dualform.show.report import choose, write_report
from dualform.show.views.explorer import ExamplePlace
from dualform.show.views.render import style
from dualform.show.views.what_if import REMOVED
from dualform.show.views.work import WorkQueue


class Seen(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def page(digits_explorer, tmp_path):
    digits_explorer.work_queue = WorkQueue(patience=float("inf"))
    rows = {ExamplePlace("test", 0): "<b>first</b>", ExamplePlace("test", 1): "second"}
    file = write_report(tmp_path / "report.html", digits_explorer, rows, title="a < b", facts={"steps": "60"}, weigh=40)
    seen = Seen()
    seen.feed(file.read_text(encoding="utf-8"))
    return seen


def test_nothing_is_loaded_from_elsewhere(page):
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object", "form"})
    for tag, attributes in page.tags:
        assert attributes.get("href", "#").startswith("#") and "style" not in attributes
        assert tag != "img" or attributes["src"].startswith("data:image/png;base64,")
    assert "url(" not in style() and "@import" not in style()
    policy = next(
        a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'")


def test_every_picture_has_a_text_for_those_who_cannot_see_it(page):
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(pictures) > 2 * 2 * 8 and all(attributes["alt"] for attributes in pictures)
    for tag, attributes in page.tags:
        assert tag != "svg" or attributes.get("aria-hidden") == "true" or attributes.get("aria-label")


def test_it_says_what_it_must(page, digits_explorer):
    for words in ("a < b", "<b>first</b>", "second", REMOVED, "The parts sum to", "Suspects", "counterfactual", "fc1"):
        assert words in page.text
    assert f"{digits_explorer.memory.step} steps" in page.text
    for name in digits_explorer.memory.certificate:
        assert name in page.text


def test_examples_that_are_worth_a_look(digits_explorer):
    rows = choose(digits_explorer, 9)
    assert len(rows) == 9 and [title.split(":")[0] for title in rows.values()][:3] == [
        "A mistake", "A close call", "A sure prediction",
    ]  # fmt: skip
    for place, title in rows.items():
        says = digits_explorer.says(digits_explorer.predict(place)[0])[0].number
        assert (says == digits_explorer.label(place)) == ("mistake" not in title)
    assert len(choose(digits_explorer, 10**6)) == len(digits_explorer.test)


def test_a_report_of_a_text(text_explorer, tmp_path):
    text_explorer.work_queue = WorkQueue(patience=float("inf"))
    file = write_report(tmp_path / "report.html", text_explorer, choose(text_explorer, 2), weigh=4)
    assert "<mark>" in file.read_text(encoding="utf-8")


def test_a_report_of_series(series_explorer, tmp_path):
    series_explorer.work_queue = WorkQueue(patience=float("inf"))
    file = write_report(tmp_path / "report.html", series_explorer, choose(series_explorer, 2), weigh=4)
    seen = Seen()
    seen.feed(file.read_text(encoding="utf-8"))
    drawn = [attributes for tag, attributes in seen.tags if tag == "svg" and "series" in attributes["class"]]
    assert len(drawn) > 2 * 8 and all("steps in 3 channels" in attributes["aria-label"] for attributes in drawn)
    assert all("style" not in attributes for _, attributes in seen.tags)


@given(shape=st.tuples(st.integers(1, 9), st.integers(1, 9)), colours=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_a_picture_is_what_any_reader_of_png_sees(shape, colours, seed):
    draw = torch.Generator().manual_seed(seed)
    picture = torch.randint(0, 256, (*shape, 3) if colours else shape, generator=draw, dtype=torch.uint8)
    data = base64.b64decode(data_address(picture).removeprefix("data:image/png;base64,"))
    assert np.array_equal((255 * image.imread(BytesIO(data))).round().astype(np.uint8), picture.numpy())
