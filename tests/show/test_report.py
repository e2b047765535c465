"""The report: one page that needs nothing else."""

import base64
from html.parser import HTMLParser
from io import BytesIO

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image

from dualform.show.page import STYLE
from dualform.show.report import Asked, png, write_report


class Seen(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def page(recorded, tmp_path_factory):
    memory, x = recorded.memory, recorded.x[:2]
    spot = memory.attend(recorded.model, x)
    answer = spot.ask("fc2", top=5, by=["label"], timeline=6, timeline_by="label")
    masked = memory.without("label = 1").predict(recorded.model, x)
    recalled = spot.by("label", layer="fc2", score="abs")
    asked = [
        Asked(
            f"<b>{i}</b>", recorded.images[i], int(recorded.labels[i]), i, spot.prediction[i], answer.hits,
            answer.groups["label"], recalled, answer.timeline, "label = 1", masked[i],
        )
        for i in range(2)
    ]  # fmt: skip
    file = tmp_path_factory.mktemp("report") / "report.html"
    write_report(
        file, title="a < b", facts={"steps": "30"}, certificate=memory.certificate, asked=asked, images=recorded.images
    )
    seen = Seen()
    seen.feed(file.read_text(encoding="utf-8"))
    return seen


def test_nothing_is_loaded_from_elsewhere(page):
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object"})
    for tag, attributes in page.tags:
        assert "href" not in attributes
        assert tag != "img" or attributes["src"].startswith("data:image/png;base64,")
    assert "url(" not in STYLE and "@import" not in STYLE


def test_every_picture_has_a_text_for_those_who_cannot_see_it(page):
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(pictures) == 2 * (1 + 5)
    assert all(attributes["alt"] for attributes in pictures)
    assert all(attributes["aria-label"] for tag, attributes in page.tags if tag == "svg")


def test_it_is_for_phones_and_for_dark_rooms(page):
    assert any(attributes.get("name") == "viewport" for tag, attributes in page.tags if tag == "meta")
    assert "prefers-color-scheme: dark" in STYLE


def test_it_says_what_sums_to_what_and_what_a_mask_is(page):
    text = " ".join(page.text.split())
    assert "The parts sum to" in text and "residual" in text
    assert "removes direct contributions with everything else held fixed" in text
    assert "rounding floor" in text


def test_texts_are_escaped(page):
    assert "a < b" in page.text and "<b>0</b>" in page.text


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31))
def test_a_picture_comes_back_as_it_was(height, width, seed):
    pixels = torch.randint(0, 256, (height, width), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    data = base64.b64decode(png(pixels).partition(",")[2])
    seen = image.imread(BytesIO(data), format="png")
    torch.testing.assert_close(torch.from_numpy(255 - seen * 255).round().to(torch.uint8), pixels)
