"""The pages about the training set in a real browser: images under SGD and Adam, a table, texts, series."""

import csv
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import serving
from test_browser import CHROMIUM, OPTIONS, SHOTS, Visit
from test_training_page import table_explorer

from dualform.explain import open_memory
from dualform.models import MLP
from dualform.show.examples import Examples
from dualform.show.views.explorer import Explorer
from dualform.show.views.work import WorkQueue

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium on this machine")

KINDS = ["digits", "adam", "table", "words", "text", "series"]


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield opened
        opened.close()


@pytest.fixture
def explorer_of(request, tmp_path):
    def make(kind: str) -> Explorer:
        if kind == "table":
            explorer = table_explorer(tmp_path / "memory")
        elif kind == "adam":
            path, data = request.getfixturevalue("adam_run")
            test = Examples(data.x[data.test], data.labels[data.test]).only(list(range(30)))
            explorer = Explorer(open_memory(path), MLP(784, 16, 10), Examples(data.x, data.labels), test)
        else:
            explorer = request.getfixturevalue({"words": "attention"}.get(kind, kind) + "_explorer")
        explorer.work_queue = WorkQueue(1e9)
        return explorer

    return make


@pytest.fixture
def table(browser, explorer_of) -> Iterator[Visit]:
    with serving(explorer_of("table")) as served:
        visit = Visit(browser, served)
        yield visit
        visit.is_fine()
        visit.page.close()


@pytest.fixture
def digits(browser, explorer_of) -> Iterator[Visit]:
    with serving(explorer_of("digits")) as served:
        visit = Visit(browser, served)
        yield visit
        visit.is_fine()
        visit.page.close()


def first_example(explorer: Explorer) -> int:
    return explorer.memory.visits["index"][0].as_py()


@pytest.mark.parametrize("kind", KINDS)
def test_every_page_fits_a_phone_and_a_screen_in_light_and_dark(browser, explorer_of, kind):
    explorer = explorer_of(kind)
    explorer.selected.add([first_example(explorer)])
    paths = (
        "/training?show=gallery&rows=20",
        "/training?show=table&rows=20",
        "/map",
        f"/example/{first_example(explorer)}",
    )
    with serving(explorer) as served:
        for width, scheme in ((390, "dark"), (1280, "light"), (1920, "dark"), (390, "light")):
            visit = Visit(browser, served, color_scheme=scheme)
            visit.page.set_viewport_size({"width": width, "height": 900})
            for number, path in enumerate(paths):
                page = visit.go(path).page
                assert page.evaluate("document.documentElement.scrollWidth") <= width, (kind, path, width)
                assert page.locator("h1").count() == 1
                nameless = page.evaluate(
                    "[...document.querySelectorAll('input:not([type=hidden]), select, button, a')].filter(e => "
                    "!(e.labels && e.labels.length) && !e.getAttribute('aria-label') && !e.textContent.trim() && "
                    "!e.querySelector('img[alt]')).map(e => e.outerHTML)"
                )
                assert nameless == [], (kind, path)
                if SHOTS:
                    page.screenshot(path=Path(SHOTS) / f"training-{kind}-{number}-{width}-{scheme}.png", full_page=True)
            visit.is_fine()
            visit.page.close()


def test_a_visitor_sorts_filters_and_turns_pages(digits):
    page = digits.go("/training").page
    first = page.locator(".gallery figure").first.inner_text()
    assert page.locator(".gallery figure").count() == 48 and "of 5,000" in page.locator("main h2").first.inner_text()
    digits.wait_for(lambda: page.get_by_label("Sort by").select_option("size"))
    assert "sort=size" in page.url and page.locator(".gallery figure").first.inner_text() != first
    digits.wait_for(lambda: page.get_by_label("Order").select_option("up"))
    digits.wait_for(lambda: page.locator("#label").select_option("3"))
    labels = page.locator(".gallery .label").all_inner_texts()
    assert len(labels) == 48 and all(label.split(" ")[0] == "3" for label in labels)
    digits.wait_for(lambda: page.get_by_role("link", name="next →").click())
    assert "page=2" in page.url and page.locator("main h2").first.inner_text().startswith("49 – 96")
    digits.wait_for(lambda: page.keyboard.press("ArrowLeft"))
    assert page.locator("main h2").first.inner_text().startswith("1 – 48")
    digits.wait_for(lambda: page.get_by_label("With a visit where").fill("step <") or page.keyboard.press("Enter"))
    assert "cannot" in page.locator("#filter-problem").inner_text() and page.locator(".gallery").count() == 0
    digits.wait_for(lambda: page.get_by_label("With a visit where").fill("step < 3") or page.keyboard.press("Enter"))
    assert 0 < page.locator(".gallery figure").count() < 48
    digits.wait_for(lambda: page.get_by_role("link", name="Table").click())
    digits.wait_for(lambda: page.get_by_role("link", name="suspicion", exact=True).click())
    assert "sort=suspicion" in page.url
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("suspicion")


def test_a_selection_is_made_on_one_page_and_used_on_all(digits, tmp_path):
    page, explorer = digits.go("/training").page, digits.served.explorer
    assert not page.get_by_role("link", name="Download CSV").is_visible()
    boxes = page.locator(".gallery [data-select]")
    names = [int(boxes.nth(i).get_attribute("data-select") or -1) for i in range(3)]
    for i in range(3):
        boxes.nth(i).check()
    page.locator("[data-selected]", has_text="3").wait_for()
    boxes.nth(1).uncheck()
    page.locator("[data-selected]", has_text="2").wait_for()
    assert set(explorer.selection) == {names[0], names[2]}
    with page.expect_download() as download:
        page.get_by_role("link", name="Download CSV").click()
    lines = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
    assert [int(line["index"]) for line in lines] == sorted([names[0], names[2]])
    assert (
        page.get_by_role("link", name="What if they were missing?").get_attribute("href")
        == "/what-if/test/0?selected=1"
    )
    digits.wait_for(lambda: page.get_by_role("link", name="Map").click())
    assert "2 selected" in page.locator(".selection").inner_text()
    digits.go(f"/example/{names[0]}")
    assert page.get_by_label(f"select training example {names[0]}").first.is_checked()
    digits.wait_for(lambda: page.get_by_role("link", name="Show them").click())
    assert page.locator(".gallery figure").count() == 2
    digits.wait_for(lambda: page.get_by_role("button", name="Clear").click())
    assert explorer.selection == () and "Nothing is selected yet" in page.locator("main").inner_text()
    digits.go("/training?label=3")
    digits.wait_for(lambda: page.get_by_role("button", name="Select all").click())
    assert set(explorer.selection) == {i for i in range(len(explorer.train)) if explorer.train.label(i) == 3}


def test_a_visitor_exports_the_suspects(digits):
    page = digits.go("/training?rows=30").page
    digits.shot("training")
    digits.wait_for(lambda: page.get_by_role("link", name="show the suspects").click())
    assert page.locator(".gallery .suggests").count() == page.locator(".gallery figure").count() > 0
    with page.expect_download() as download:
        page.get_by_role("link", name="Download all examples as CSV").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0].startswith('"index","label","class","suggested"') and len(lines) == 5001


def test_a_dot_of_the_map_leads_to_its_example(table):
    page = table.go("/map").page
    assert page.locator(".map a").count() == 75
    dot = page.locator(".map a[href='/example/55']")
    assert dot.locator("title").text_content().startswith("training example 55: ")
    dot.click(force=True)
    page.wait_for_url("**/example/*")
    page.go_back()
    assert page.locator(".map [tabindex]:not([tabindex='-1'])").count() == 0
    table.wait_for(lambda: page.get_by_label("Layer").select_option("fc1"))
    assert "layer=fc1" in page.url and "layer fc1 sees" in page.locator("main p").first.inner_text()


def test_a_visitor_looks_at_one_row_of_a_table(table):
    page = table.go("/training").page
    heads = page.locator("table.examples thead th").all_inner_texts()
    assert [name for name in heads if name in ("age", "weight", "=colour")] == ["age", "weight", "=colour"]
    table.wait_for(lambda: page.locator("table.examples tbody a").first.click())
    assert "/example/" in page.url and "age" in page.locator("table.row").inner_text()
    assert page.locator(".plot rect").count() > 0
    assert page.locator(".plot rect title").first.text_content().startswith("step ")
    table.wait_for(lambda: page.locator("[aria-label='Neighbours'] tbody a").first.click())
    table.wait_for(lambda: page.keyboard.press("ArrowRight"))
    page.get_by_role("link", name="What is this answer made of?").click()
    page.wait_for_url("**/prediction/train/*")


def test_texts_are_found_by_what_they_say(browser, explorer_of):
    explorer = explorer_of("words")
    with serving(explorer) as served:
        visit = Visit(browser, served)
        page = visit.go("/training").page
        wanted = "".join(explorer.train.shown(7).tokens)[:8]
        visit.wait_for(lambda: page.get_by_label("Containing").fill(wanted) or page.keyboard.press("Enter"))
        texts = page.locator(".gallery .text").all_inner_texts()
        assert texts and all(wanted in text for text in texts)
        visit.is_fine()
        page.close()


def test_without_scripts_examples_can_be_sorted_and_filtered(browser, explorer_of):
    with serving(explorer_of("table")) as served:
        page = browser.new_page(java_script_enabled=False)
        page.goto(f"{served.address}training")
        page.get_by_label("Sort by").select_option("visits")
        page.locator("#only").select_option("unseen")
        page.get_by_role("button", name="Show", exact=True).click()
        assert "sort=visits" in page.url and page.locator("table.examples tbody tr").count() == 10
        assert "Selecting needs JavaScript" in page.locator(".selection").inner_text()
        page.close()


def test_pending_work_leads_to_the_numbers(browser, explorer_of):
    explorer = explorer_of("digits")
    explorer.work_queue = WorkQueue(1e-9)
    with serving(explorer) as served:
        visit = Visit(browser, served)
        page = visit.go("/training?rows=20").page
        assert page.locator(".gallery figure").count() == 48
        page.locator("[data-pending]").first.wait_for(state="detached")  # short work starts by itself
        numbers = [float(text.replace("−", "-")) for text in page.locator(".gallery b").all_inner_texts()]
        assert numbers == sorted(numbers, reverse=True) and numbers[0] > 0
        visit.is_fine()
        page.close()
