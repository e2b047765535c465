"""Every page in a real browser, for every kind of data, under SGD and AdamW."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from page_kinds import KINDS, OPTIMIZERS, explorer_of
from serving import serving
from test_browser import CHROMIUM, OPTIONS, Visit

from dualform.show.views import Explorer, attention_layers

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium on this machine")

EVERY = [f"{kind}-{optimizer}" for kind in KINDS for optimizer in OPTIMIZERS]
TEXTS = [name for name in EVERY if not name.startswith(("digits", "table"))]
LANGUAGE_MODELS = [name for name in EVERY if name.startswith(("bytes", "tokens"))]
QUICK = ("digits-sgd", "tokens-adamw")
"""The kinds that axe-core looks at in every run; the others take longer."""
WIDTHS, SCHEMES = (390, 1280, 1920), ("light", "dark")
AXE = Path(__file__).parent / "axe" / "axe.min.js"
NAMELESS = """() => [...document.querySelectorAll('input:not([type=hidden]), select, textarea, button, a')].filter(e =>
  !(e.labels && e.labels.length) && !e.getAttribute('aria-label') && !e.textContent.trim() &&
  !e.querySelector('img[alt]')
).map(e => e.outerHTML)"""


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def served(request, tmp_path_factory) -> Iterator:
    """One server for all tests of a kind."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kind, optimizer = request.param.split("-")
    explorer = explorer_of(kind, optimizer, tmp_path_factory.mktemp(request.param) / "memory")
    with serving(explorer) as server:
        yield server
    torch.set_num_threads(threads)


@pytest.fixture
def visit(browser, served) -> Iterator[Visit]:
    opened = Visit(browser, served)
    yield opened
    opened.is_fine()
    opened.page.close()


def of_kinds(names: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("served", names, indirect=True)


def pages_of(explorer: Explorer) -> list[str]:
    """The address of every page, and of those states of it that look different."""
    assert explorer.test is not None
    example, layer = explorer.memory.visits["index"][0].as_py(), explorer.layers[-1]
    group = f"group={explorer.memory.visits['label'][0].as_py()}" if explorer.test.labels is not None else "group=web"
    pages = [
        "/prediction/test/3",
        "/prediction/test/3?step=0",
        f"/prediction/test/3?layer={layer}&per=visit",
        "/what-if/test/3",
        f"/what-if/test/3?{group}&example={example}",
        "/training?show=gallery&rows=20",
        "/training?show=table&rows=20",
        "/training?only=selected",
        "/map",
        f"/example/{example}",
        "/compare/test/3",
        "/run",
    ]
    if attention_layers(explorer.model):
        pages += ["/attention/test/3", "/heads?rows=4"]
    return pages + (["/prediction/test/3?token=5-7"] if explorer.test.is_stream else [])


@of_kinds(EVERY)
def test_every_page_opens_and_fits(visit):
    page, paths = visit.page, pages_of(visit.served.explorer)
    tabs = visit.go("/").page.locator("header nav a").all_inner_texts()
    opened = set()
    for path in paths:
        answers = []
        page.on("response", lambda answer, answers=answers: answers.append(answer))
        visit.go(path)
        opened.add(page.locator("header nav a[aria-current]").inner_text())
        assert all(answer.status == 200 for answer in answers), path
        assert page.locator("h1").count() == 1 and page.locator(".pending").count() == 0, path
        assert page.evaluate(NAMELESS) == [], path
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate("document.documentElement.scrollWidth") <= width, (path, scheme, width)
    assert opened == set(tabs), "every tab was opened"


@of_kinds(EVERY)
def test_the_headline_names_the_class(visit):
    explorer = visit.served.explorer
    logits = explorer.logits("test", [3])[0].reshape(-1, explorer.outputs)[-1]
    said, label = explorer.class_name(int(logits.argmax())), explorer.test.label(3)
    headline = visit.go("/prediction/test/3").page.locator(".headline")
    assert headline.locator("strong").first.inner_text() == said
    if label is not None:
        end = "which is right" if int(logits.argmax()) == label else f"but it is {explorer.class_name(label)}"
        assert end in headline.inner_text()


@of_kinds(EVERY)
def test_a_bar_of_a_chart_says_its_value(visit):
    page = visit.go("/prediction/test/3").page
    for chart in page.locator("figure.chart").all():
        marks = chart.locator(".mark")
        heights = marks.evaluate_all("marks => marks.map(mark => mark.getBoundingClientRect().height)")
        mark = marks.nth(heights.index(max(heights)))
        says = mark.get_attribute("data-says")
        assert re.search(r"\d", says)
        mark.scroll_into_view_if_needed()
        page.wait_for_timeout(100)  # a page that scrolls hides the value
        mark.hover()
        assert page.locator(".tip").is_visible() and page.locator(".tip").inner_text() == says
        page.mouse.move(2, 2)
        assert page.locator(".tip").is_hidden()
    assert page.locator("figure.chart").count() >= 1


@of_kinds(LANGUAGE_MODELS)
def test_a_click_asks_about_a_token_and_shift_about_a_span(visit):
    page = visit.go("/prediction/test/3").page
    token = page.locator("a[data-token]")
    tokens = token.count()
    visit.wait_for(lambda: page.locator("a[data-token='5']").click())
    assert "token=5" in page.url and visit.says().startswith("Here it expects")
    assert page.locator("a[data-token][aria-current]").evaluate_all("all => all.map(a => a.dataset.token)") == ["5"]
    visit.wait_for(lambda: page.locator("a[data-token='8']").click(modifiers=["Shift"]))
    assert "token=5-8" in page.url
    asked = page.locator("a[data-token][aria-current]").evaluate_all("all => all.map(a => Number(a.dataset.token))")
    assert asked == [5, 6, 7, 8]
    visit.wait_for(lambda: page.locator(".next-token").click())
    assert "token" not in page.url and visit.says().startswith("It says") and token.count() == tokens


@of_kinds([name for name in EVERY if name.startswith("bytes")])
def test_bytes_of_one_character_are_one_link(visit):
    page = visit.go("/prediction/test/3").page
    character = page.locator("a[data-token]", has_text="é").first
    first, last = int(character.get_attribute("data-token")), int(character.get_attribute("data-last"))
    assert last == first + 1 and page.locator(f"[data-token='{last}']").count() == 0
    visit.wait_for(character.click)
    assert f"token={first}-{last}" in page.url
    assert page.locator("a[data-token][aria-current]").all_inner_texts() == ["é"]
    visit.wait_for(lambda: page.locator(f"a[data-token='{first - 3}']").click(modifiers=["Shift"]))
    assert f"token={first - 3}-{last}" in page.url


@of_kinds(TEXTS)
def test_passages_and_tokens_point_at_each_other(visit):
    page = visit.go("/prediction/test/3").page
    figures = page.locator("figure[data-speaks]")
    assert 8 <= figures.count() <= page.locator(".hits figure").count() == 12
    spoken = [[abs(int(level)) for level in figure.get_attribute("data-speaks").split(",")] for figure in figures.all()]
    tokens = page.locator("[data-tokens] [data-token]")
    spans = tokens.evaluate_all("all => all.map(token => [Number(token.dataset.token), Number(token.dataset.last)])")
    wanted = [max(spoken[0][first : last + 1]) for first, last in spans]
    before = levels_of(tokens)
    figures.first.scroll_into_view_if_needed()
    figures.first.hover()
    assert levels_of(tokens) == wanted and any(wanted)
    page.mouse.move(2, 2)
    assert levels_of(tokens) == before
    number = wanted.index(max(wanted))
    tokens.nth(number).hover()
    first, last = spans[number]
    for figure, levels in zip(figures.all(), spoken, strict=True):
        names, level = figure.get_attribute("class").split(), max(levels[first : last + 1])
        assert ("is-near" in names, "faint" in names) == (level >= 5, level == 0)
    assert "is-near" in figures.first.get_attribute("class").split()
    page.mouse.move(2, 2)
    assert page.locator("figure.is-near, figure.faint").count() == 0


def levels_of(tokens) -> list[int]:
    return [
        int(re.findall(r"at-(\d+)", name)[0]) for name in tokens.evaluate_all("all => all.map(one => one.className)")
    ]


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core does not come with the source distribution")
@pytest.mark.parametrize(
    "served", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EVERY], indirect=True
)
def test_no_page_keeps_people_out(browser, served):
    """axe-core finds nothing serious. The policy of the pages, which forbids scripts of others, is lifted for it."""
    context = browser.new_context(bypass_csp=True)
    page, source = context.new_page(), AXE.read_text(encoding="utf-8")
    problems = []
    for path in pages_of(served.explorer):
        page.goto(served.address.rstrip("/") + path)
        page.locator("details").evaluate_all("all => all.forEach(each => { each.open = true })")
        page.evaluate(source)
        for scheme, width in (("light", 1280), ("dark", 390)):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 900})
            found = page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")
            assert len(found["passes"]) > 10, "axe has looked at the page"
            problems += [
                (violation["id"], scheme, path, node["html"][:160], node["failureSummary"][:300])
                for violation in found["violations"]
                if violation["impact"] in ("serious", "critical")
                for node in violation["nodes"][:2]
            ]
    context.close()
    assert not problems, json.dumps(problems, indent=1)
