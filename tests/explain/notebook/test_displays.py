"""Every answer shows itself: in a notebook, and where it is printed."""

import html
import math
import re
import unicodedata
from html.parser import HTMLParser

import pytest
import torch
from helpers import batches, mlp, sgd, trained
from hypothesis import given
from hypothesis import strategies as st

import dualform
from dualform.errors import QueryError
from dualform.explain.notebook import Displayed, visible_text

NAMES = [
    "examples", "visits", "slots", "places", "groups", "groups-of-layer", "timeline", "certificate", "influence",
    "comparison", "check", "scores", "memory", "masked", "survey", "spotlight", "ledger", "suspects",
]  # fmt: skip


ALLOWED = set("div span table thead tbody tr th td img svg line polyline title code".split())  # noqa: SIM905


class Elements(HTMLParser):
    """The elements of a display, and whether each that was opened was closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.names, self.attributes = [], set(), []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes += attrs
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def answers(recorded):
    return recorded.answers()


@pytest.fixture
def illustrated(recorded):
    """The same with pictures, forgotten afterwards."""
    from dualform.explain.notebook import illustrations

    before = dict(illustrations._ILLUSTRATIONS)
    yield recorded
    illustrations._ILLUSTRATIONS.clear()
    illustrations._ILLUSTRATIONS.update(before)


def test_the_list_of_answers_is_complete(answers):
    assert list(answers) == NAMES and all(isinstance(answer, Displayed) for answer in answers.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_display_is_plain_markup_without_scripts_or_styles_of_its_own(answers, name):
    elements = Elements(answers[name]._repr_html_())
    assert elements.names <= ALLOWED
    assert not [key for key, _ in elements.attributes if key.startswith("on") or key in ("href", "class", "id")]
    assert all(value.startswith("data:image/png;base64,") for key, value in elements.attributes if key == "src")
    colours = {value for key, value in elements.attributes if key == "style" if re.search(r"(?<![-\w])color:", value)}
    assert not colours, "text keeps the colour of the page around it"


@pytest.mark.parametrize("name", NAMES)
def test_what_was_noted_can_steer_neither_a_page_nor_a_terminal(answers, name):
    page, printed = answers[name]._repr_html_(), str(answers[name])
    assert "<b>" not in page
    for text in (page, printed):
        strange = {c for c in text if unicodedata.category(c) in ("Cc", "Cf") and c != "\n"}
        assert not strange
    if name in ("examples", "visits", "slots", "places", "groups-of-layer"):
        assert "&lt;b&gt;bold&lt;/b&gt;\\x1b[31m\\u202e" in page and "<b>bold</b>\\x1b[31m\\u202e" in printed


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_form_beside_the_html_is_what_print_shows(answers, name):
    texts: list[str] = []

    class Printer:
        text = staticmethod(texts.append)

    answers[name]._repr_pretty_(Printer, False)
    assert texts == [str(answers[name])] and "tensor(" not in texts[0]
    classes = [kind for kind in type(answers[name]).__mro__ if {"__repr__", "_repr_pretty_"} & vars(kind).keys()]
    assert "_repr_pretty_" in vars(classes[0]), "IPython would show the __repr__"


def test_hits_are_printed_and_shown_with_the_numbers_they_hold(answers):
    hits = answers["examples"]
    page, printed = html.unescape(hits._repr_html_()), str(hits)
    for query in range(len(hits)):
        best = hits[query].contribution[0, 0].item()
        number = re.findall(rf"query {query}\n  (\S+)", printed)[0]
        assert math.isclose(float(number), best, abs_tol=0.006) and f">{number}<" in page


def test_the_bars_of_groups_are_as_long_as_their_values(answers):
    groups = answers["groups"][0]
    widths = [float(w) for w in re.findall(r"width:([\d.]+)%;height:100%;background", groups._repr_html_())]
    values = [*groups.values[0].tolist(), groups.initial[0].item()]
    assert widths == pytest.approx([100 * abs(v) / max(map(abs, values)) for v in values], abs=0.06)


def test_the_printed_parts_sum_to_the_printed_whole(answers):
    for name in ("groups", "groups-of-layer"):
        numbers = [float(line.split()[0]) for line in str(answers[name][0]).splitlines() if line.startswith("  ")]
        assert sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=0.03)


def test_pictures_are_shown_where_they_are_known(illustrated):
    memory = illustrated.memory
    spot = memory.attend(illustrated.model, illustrated.x[:2])
    assert "<img" not in spot.top(3)._repr_html_()
    assert memory.illustrate(pictures=illustrated.images) is memory
    assert spot.top(3)._repr_html_().count("<img") == 6
    assert spot._repr_html_().count("<img") == 2 + 2 * 6  # the inputs themselves, too
    assert dualform.open(memory.path).attend(illustrated.model, illustrated.x[:1]).top(3)._repr_html_().count("<img")
    influence = illustrated.run.influence(illustrated.x[:1])._repr_html_()
    assert "<img" in influence and "no picture" not in influence
    few = {0: illustrated.images[0]}
    assert (
        "no picture"
        in memory.illustrate(pictures=few).attend(illustrated.model, illustrated.x[:2]).top(3)._repr_html_()
    )


def test_a_picture_is_shown_as_it_is(illustrated):
    pillow, io, base64 = pytest.importorskip("PIL.Image"), __import__("io"), __import__("base64")
    memory = illustrated.memory.illustrate(pictures=illustrated.images)
    hits = memory.attend(illustrated.model, illustrated.x[:1]).top(1)
    encoded = re.findall(r"base64,([^\"]+)", hits._repr_html_())[0]
    shown = torch.tensor(list(pillow.open(io.BytesIO(base64.b64decode(encoded))).tobytes())).view(8, 8)
    assert shown.equal(illustrated.images[next(iter(hits)).index].long())


def test_an_input_is_shown_like_the_picture_that_it_is(illustrated):
    memory = illustrated.memory.illustrate(pictures=illustrated.images.float() - 3)
    best = next(iter(memory.attend(illustrated.model, illustrated.x[:1]).top(1))).index
    everything = memory.attend(illustrated.model, torch.cat([illustrated.x[best : best + 1], illustrated.x]))
    first, *rest = re.findall(r"base64,([^\"]+)", everything._repr_html_())
    assert first in rest


@pytest.mark.parametrize("shape", [(8, 8), (1, 8, 8), (3, 8, 8), (8, 8, 3), (64,)])
def test_pictures_of_every_arrangement_can_be_given(illustrated, shape):
    memory = illustrated.memory.illustrate(pictures=torch.rand(60, *shape))
    assert memory.attend(illustrated.model, illustrated.x[:1]).top(2)._repr_html_().count("<img") == 2


def test_passages_and_tables_are_columns_of_their_own(illustrated):
    texts = [f"passage <i>{i}</i>\x07" for i in range(60)]
    memory = illustrated.memory.illustrate(passages=texts)
    hits = memory.attend(illustrated.model, illustrated.x[:1]).top(2)
    page = hits._repr_html_()
    assert all(f"passage &lt;i&gt;{hit.index}&lt;/i&gt;\\x07" in page for hit in hits)
    pandas = pytest.importorskip("pandas")
    memory.illustrate(table=pandas.DataFrame({"age <b>": range(100, 160)}))
    page = hits._repr_html_()
    assert "age &lt;b&gt;" in page and all(f">{100 + hit.index}<" in page for hit in hits)


def test_what_cannot_illustrate_is_refused(illustrated):
    memory = illustrated.memory
    with pytest.raises(QueryError, match="one of pictures=, passages= or table="):
        memory.illustrate()
    with pytest.raises(QueryError, match="one of pictures=, passages= or table=, not"):
        memory.illustrate(pictures=illustrated.images, passages=["a"])
    with pytest.raises(QueryError, match=r"not \(5, 7, 9\)"):
        memory.illustrate(pictures=torch.zeros(3, 5, 7, 9))
    with pytest.raises(QueryError, match="takes texts, not a int"):
        memory.illustrate(passages=[1, 2])
    with pytest.raises(QueryError, match="indexed like the training set"):
        memory.illustrate(passages=3)


@given(st.text(max_size=80))
def test_visible_text_is_harmless_and_text_without_control_characters_is_left_alone(text):
    shown = visible_text(text, 100)
    assert not {c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")}
    if all(c.isalnum() or c == " " for c in text):
        assert shown == text


def test_a_spotlight_shows_what_it_is_made_of(tmp_path):
    model = mlp(5, 4, 3)
    run = trained(tmp_path / "memory", model, sgd(model), batches(6, 4, 5, 3))
    spot = run.memory.attend(model, torch.randn(12, 5, dtype=torch.float64))
    page = spot._repr_html_()
    best = next(iter(spot.top(1)[0]))
    assert f"{best.contribution:+.2f}"[:4] in page and f"class {int(spot.prediction[0].argmax())}" in page
    assert "4 more" in page and page.count("<table") == 8


def test_where_it_would_take_long_a_spotlight_says_how_to_ask(tmp_path):
    model = mlp(5, 4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    run = trained(tmp_path / "memory", model, optimizer, batches(3, 4, 5, 3))
    page = run.memory.attend(model, torch.randn(2, 5, dtype=torch.float64))._repr_html_()
    assert "spot.top(10" in page and page.count("<tr>") == 3


def test_who_wants_to_be_told_is_told(tmp_path):
    model, told = mlp(5, 4, 3), []
    run = trained(tmp_path / "memory", model, sgd(model), batches(6, 4, 5, 3))
    memory = dualform.open(run.path)

    def tell(what: str, done: int, total: int) -> None:
        told.append((what, done, total))

    memory.ledger("label", progress=tell)
    assert told and told[-1][1] == told[-1][2] > 0 and "weights" in told[-1][0]
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    told.clear()
    memory.attend(model, torch.randn(2, 5, dtype=torch.float64)).top(
        2, layer=memory.layers[0], progress=tell, per="slot"
    )
    assert told[-1][1] == told[-1][2] == 24
