"""The explorer in a real browser, as a visitor uses it."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Served, serving

from dualform.show.examples import png
from dualform.show.views.explorer import ExamplePlace
from dualform.show.views.what_if import REMOVED
from dualform.show.web.app import warm_up

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]
SHOTS = os.environ.get("DUALFORM_SHOTS")
"""A folder for pictures of the pages, for the documents."""


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield opened
        opened.close()


class Visit:
    """A page that notes what it complains about and what it asks for."""

    def __init__(self, browser, served: Served, **options) -> None:
        self.served, self.page = served, browser.new_page(viewport={"width": 1280, "height": 900}, **options)
        self.complaints, self.requests = [], []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.set_default_timeout(20_000)

    def go(self, path: str) -> "Visit":
        self.page.goto(self.served.address.rstrip("/") + path)
        return self

    def says(self) -> str:
        return self.page.locator(".verdict").inner_text()

    def bars(self) -> list[str]:
        return self.page.locator(".says tbody tr").all_inner_texts()

    def wait_for(self, change) -> None:
        """Do something, and wait until the page has taken it in."""
        self.page.evaluate("() => { window.seen = document.getElementById('main') }")
        change()
        for _ in range(400):
            if self.page.evaluate("() => document.getElementById('main') !== window.seen"):
                return
            self.page.wait_for_timeout(25)
        raise AssertionError("the page did not change")

    def shot(self, name: str) -> None:
        if SHOTS:
            self.page.screenshot(path=Path(SHOTS) / f"{name}.png")

    def is_fine(self) -> None:
        assert self.complaints == []
        own = self.served.address.rstrip("/")
        assert [url for url in self.requests if not url.startswith((own, "data:", "blob:"))] == []


@pytest.fixture
def digits(browser, digits_explorer) -> Iterator[Visit]:
    warm_up(digits_explorer)
    with serving(digits_explorer) as served:
        visit = Visit(browser, served)
        yield visit
        visit.is_fine()
        visit.page.close()


@pytest.fixture
def text(browser, text_explorer) -> Iterator[Visit]:
    text_explorer.work_queue.patience = 1e-3
    with serving(text_explorer) as served:
        visit = Visit(browser, served)
        yield visit
        visit.is_fine()
        visit.page.close()


def test_a_visitor_looks_at_a_prediction(digits):
    page = digits.go("/").page
    assert page.url.endswith("/prediction/test/0") and digits.says().startswith("It says")
    first = page.locator(".hits figure").all_inner_texts()
    assert len(first) == 12 and page.locator(".totals tbody tr").count() == 12
    digits.shot("prediction")
    digits.wait_for(lambda: page.get_by_label("through").select_option("fc1"))
    assert "layer=fc1" in page.url and page.get_by_label("through").input_value() == "fc1"
    assert page.locator(".hits figure").all_inner_texts() != first
    assert page.locator(".totals tbody tr").count() == 12, "the labels, the first weights, and the sum of all"
    page.get_by_text("More", exact=True).click()
    digits.wait_for(lambda: page.get_by_label("One tile per").select_option("visit"))
    digits.wait_for(lambda: page.get_by_label("Ranked by").select_option("abs"))
    assert "score=abs" in page.url and "α" in page.locator(".hits figure b").first.inner_text()
    digits.wait_for(lambda: page.get_by_label("Number of tiles").fill("5") or page.keyboard.press("Enter"))
    assert page.locator(".hits figure").count() == 5
    digits.wait_for(page.go_back)
    assert page.locator(".hits figure").count() == 12


def test_the_slider_travels_through_training(digits):
    page = digits.go("/prediction/test/3").page
    before = digits.bars()
    slider = page.locator("#step")
    slider.focus()
    digits.wait_for(lambda: slider.press("Home"))
    assert "step=0" in page.url and "At step 0 of 60" in digits.says() and digits.bars() != before
    digits.wait_for(lambda: page.locator("#step").press("End"))
    assert digits.bars() == before


def test_a_mask_changes_the_answer_and_one_click_undoes_it(digits):
    page = digits.go("/prediction/test/3").page
    said = re.findall(r"says (\d)", digits.says())[0]
    page.get_by_role("link", name="What if some were missing?").click()
    page.wait_for_url("**/what-if/test/3")
    assert REMOVED in page.locator(".masked").inner_text() and "Tick something" in digits.says()
    digits.wait_for(lambda: page.get_by_label(f"label {said}").check())
    columns = page.locator(".says thead").inner_text()
    assert "as trained" in columns and "direct" in columns
    assert f"instead of {said}" in digits.says()
    assert page.get_by_label(f"label {said}").is_checked()
    digits.shot("what-if")
    digits.wait_for(lambda: page.get_by_role("link", name="Undo all").click())
    assert "Tick something" in digits.says() and not page.get_by_label(f"label {said}").is_checked()
    digits.wait_for(lambda: page.get_by_label("another one").fill("17") or page.keyboard.press("Enter"))
    assert "example=17" in page.url and "Without" in digits.says()
    digits.wait_for(lambda: page.get_by_label("visits where").fill("label = 3") or page.keyboard.press("Enter"))
    assert "filter=label" in page.url and "example=17" in page.url


def test_a_visitor_brings_a_picture_and_draws_one(digits, tmp_path):
    examples = digits.served.explorer.test
    (tmp_path / "mine.png").write_bytes(png(examples.pixels(examples.row(3)[0])))
    page = digits.go("/prediction/test/3").page
    theirs = digits.says().split(",")[0]
    assert re.fullmatch(r"It says \d \([\d.]+ %\)", theirs)
    page.get_by_text("Ask about your own input").click()
    digits.wait_for(lambda: page.locator("[data-upload]").set_input_files(tmp_path / "mine.png"))
    assert page.url.endswith("/prediction/own/0") and digits.says().startswith(theirs)
    page.get_by_text("Ask about your own input").click()
    page.get_by_role("button", name="Ask about the drawing").click()
    page.get_by_text("Draw something first.").last.wait_for()
    page.locator("[data-draw]").scroll_into_view_if_needed()
    box = page.locator("[data-draw]").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"]
    page.mouse.move(x, y + 30)
    page.mouse.down()
    page.mouse.move(x, y + 190, steps=8)
    page.mouse.up()
    digits.wait_for(lambda: page.get_by_role("button", name="Ask about the drawing").click())
    assert page.url.endswith("/prediction/own/1") and "It says" in digits.says()
    drawn = digits.served.explorer.own[1][1]
    assert 20 < int((drawn > 0.5).sum()) < 200 and bool((drawn[:, 10:18] > 0.5).any())
    digits.shot("drawing")


def test_a_file_that_is_no_picture_is_refused_in_a_sentence(digits, tmp_path):
    (tmp_path / "text.png").write_text("no picture")
    page = digits.go("/prediction/test/3").page
    page.get_by_text("Ask about your own input").click()
    page.locator("[data-upload]").set_input_files(tmp_path / "text.png")
    page.get_by_text("cannot be read as a picture").last.wait_for()
    assert page.url.endswith("/prediction/test/3")
    assert [each for each in digits.complaints if "400" in each] == digits.complaints  # the browser's own line about it
    digits.complaints.clear()


def test_a_visitor_opens_an_example_and_asks_without_it(digits):
    page = digits.go("/prediction/test/3").page
    digits.wait_for(lambda: page.locator(".hits figure a").first.click())
    assert "/example/" in page.url and "The network saw it" in page.locator("main").inner_text()
    page.get_by_role("link", name="What would test 3 be without it?").click()
    assert "/what-if/test/3?example=" in page.url and "Without" in digits.says()


def test_keys_go_to_other_examples_and_views(digits):
    page = digits.go("/prediction/test/3").page
    digits.wait_for(lambda: page.keyboard.press("ArrowRight"))
    assert page.url.endswith("/prediction/test/4")
    digits.wait_for(lambda: page.keyboard.press("ArrowLeft"))
    assert page.url.endswith("/prediction/test/3")
    page.keyboard.press("Alt+2")
    page.wait_for_url("**/what-if/test/3")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"


def test_every_field_has_a_label_and_every_page_one_heading(digits):
    for path in ("/prediction/test/3", "/what-if/test/3", "/training?rows=20", "/run", "/example/17"):
        page = digits.go(path).page
        assert page.locator("h1").count() == 1
        nameless = page.evaluate(
            "[...document.querySelectorAll('input:not([type=hidden]), select, textarea, button, a')].filter(e => "
            "!(e.labels && e.labels.length) && !e.getAttribute('aria-label') && !e.textContent.trim() && "
            "!e.querySelector('img[alt]')).map(e => e.outerHTML)"
        )
        assert nameless == [], path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_on_a_phone(browser, digits_explorer, scheme):
    with serving(digits_explorer) as served:
        visit = Visit(browser, served, color_scheme=scheme)
        visit.page.set_viewport_size({"width": 390, "height": 844})
        for path in ("/prediction/test/3", "/what-if/test/3?group=1", "/training?rows=20", "/run"):
            visit.go(path)
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390, path
        visit.go("/prediction/test/3").shot(f"phone-{scheme}")
        visit.is_fine()
        visit.page.close()


def test_a_visitor_asks_about_a_text(text):
    page = text.go("/prediction/test/40?layer=rnn").page
    page.locator(".totals tr.total").wait_for()  # short work starts by itself
    assert page.locator(".hits figure").count() == 12 and page.locator(".totals tr.total").count() == 1
    page.get_by_text("More", exact=True).click()
    text.wait_for(lambda: page.get_by_label("One tile per").select_option("slot"))
    text.wait_for(lambda: page.get_by_label("Ranked by").select_option("abs"))
    page.locator(".hits mark").nth(11).wait_for()
    assert page.locator(".hits mark").count() == 12, "a row of the layer is one token"
    text.shot("text")
    page.get_by_text("Ask about your own input").click()
    page.locator("[data-text]").fill("The network says")
    text.wait_for(lambda: page.get_by_role("button", name="Ask", exact=True).click())
    assert page.url.endswith("/prediction/own/0")
    page.get_by_role("navigation", name="Views").get_by_role("link", name="What if", exact=True).click()
    page.wait_for_url("**/what-if/own/0")
    text.wait_for(lambda: page.get_by_label("source first").check())
    page.locator(".pending").wait_for(state="detached")
    assert "Without" in text.says()


def test_a_visitor_looks_at_attention(browser, attention_explorer):
    with serving(attention_explorer) as served:
        visit = Visit(browser, served).go("/attention/test/4")
        page = visit.page
        before = page.locator(".heads").inner_html()
        visit.wait_for(lambda: page.get_by_label("Head").select_option("1"))
        assert page.locator(".heads").inner_html() != before
        visit.wait_for(lambda: page.locator(".text.large a").nth(2).click())
        assert "token=2" in page.url and "token 2" in page.locator("main h2").first.inner_text()
        assert page.locator(".hits figure").count() == 6
        visit.shot("attention")
        visit.is_fine()
        page.close()


def test_a_visitor_clicks_on_a_step_of_a_series(browser, series_explorer):
    with serving(series_explorer) as served:
        visit = Visit(browser, served).go("/attention/test/4")
        page = visit.page
        assert "It says" in visit.says() and "all tokens" in page.locator("main h2").first.inner_text()
        assert page.locator(".hits figure").count() == 6 and page.locator(".hits .series").count() == 6
        steps = page.locator(".series.large a")
        assert steps.count() == len(series_explorer.shown(ExamplePlace("test", 4)).lines.values[0])
        visit.wait_for(lambda: steps.nth(3).click())
        assert "token=3" in page.url and "What t = 3 attends to" in page.locator("main h2").first.inner_text()
        assert page.locator(".series.large .asking").count() == 1
        visit.wait_for(lambda: page.get_by_label("Head").select_option("2"))
        rows = page.locator(".support tbody tr")
        assert re.match(r"t = \d+–\d+", rows.first.inner_text()) and page.locator(".support thead th").count() == 5
        shares = [float(text.split()[-2].replace("−", "-")) for text in rows.all_inner_texts()]
        assert sum(shares) == pytest.approx(100, abs=0.3)
        before = rows.all_inner_texts()
        visit.wait_for(lambda: page.get_by_label("Rank support tokens by").select_option("dual"))
        assert sorted(rows.all_inner_texts()) == sorted(before)
        visit.wait_for(lambda: page.get_by_label("Training examples of").select_option("blocks.0.attn.key.4"))
        assert "blocks.0.attn.key.4" in page.locator("main h2").nth(2).inner_text()
        visit.is_fine()
        page.close()


def test_a_visitor_clicks_on_a_patch_of_a_picture(browser, patches_explorer):
    with serving(patches_explorer) as served:
        visit = Visit(browser, served).go("/attention/test/4")
        page = visit.page
        assert "What the class token attends to" in page.locator("main h2").first.inner_text()
        visit.wait_for(lambda: page.locator(".picture.large a").nth(6).click())
        assert "token=7" in page.url and "What row 2, column 3 attends to" in page.locator("main h2").first.inner_text()
        assert page.locator(".support .picture.tiny").count() == 8
        visit.wait_for(lambda: page.get_by_role("link", name="the class token").click())
        assert "token=0" in page.url
        visit.is_fine()
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("fixture", ["series_explorer", "patches_explorer", "attention_explorer"])
def test_attention_is_readable_on_a_phone(browser, fixture, scheme, request):
    with serving(request.getfixturevalue(fixture)) as served:
        visit = Visit(browser, served, color_scheme=scheme)
        visit.page.set_viewport_size({"width": 390, "height": 844})
        for path in ("/attention/test/4", "/attention/test/4?head=1&token=2", "/prediction/test/4"):
            visit.go(path)
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390, path
        visit.is_fine()
        visit.page.close()


def test_without_scripts_the_pages_work_too(browser, digits_explorer):
    with serving(digits_explorer) as served:
        page = browser.new_page(java_script_enabled=False)
        page.goto(f"{served.address}prediction/test/3")
        page.get_by_label("Training that").select_option("smallest")
        page.get_by_role("button", name="Show").click()
        assert "order=smallest" in page.url and page.locator(".hits figure").count() == 12
        page.close()
