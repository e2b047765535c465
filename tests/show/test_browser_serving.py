"""What takes long, in a real browser: pages that wait lead to what they wait for."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import serving

from dualform.progress import bar
from dualform.show.examples import Examples
from dualform.show.views import Explorer
from dualform.show.web.opening import Opening, OpeningStage

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
SHOTS = os.environ.get("DUALFORM_SHOTS")
"""A folder for pictures of the pages."""


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def explorer(recorded) -> Explorer:
    examples = Examples(recorded.x, recorded.labels)
    return Explorer(recorded.memory, recorded.model, examples, examples)


@pytest.fixture
def pages(browser) -> Iterator:
    """New pages, of which none may complain in the end."""
    opened, complaints = [], []

    def new(**options):
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 800}, **options})
        page.on("pageerror", lambda error: complaints.append(str(error)))
        opened.append(page)
        return page

    yield new
    for page in opened:
        page.close()
    assert complaints == []


def shot(page, name: str) -> None:
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / f"{name}.png")


def an_opening(explorer: Explorer, go_on: threading.Event, error: Exception | None = None) -> Opening:
    def wait() -> None:
        go_on.wait(60)
        if error is not None:
            raise error

    stages = [OpeningStage("reading the memory", 12.0, wait), OpeningStage("making the network", 3.0, lambda: None)]
    return Opening(explorer.title, stages, lambda: explorer)


@pytest.mark.parametrize("script", [True, False])
def test_a_page_that_waits_for_the_explorer_leads_to_what_was_asked_for(pages, explorer, script):
    go_on = threading.Event()
    opening = an_opening(explorer, go_on)
    with serving(opening) as served:
        opening.start()
        page = pages(java_script_enabled=script)
        page.goto(served.address + "prediction/test/3?layer=fc1")
        assert "Reading the memory (1 of 2) … about" in page.locator("[data-says]").inner_text()
        before = float(page.locator("progress").get_attribute("value") or 0)
        time.sleep(1.5)
        shares = [float(page.locator("progress").evaluate("bar => bar.value")) if script else before]
        if script:
            page.wait_for_timeout(900)
            shares.append(float(page.locator("progress").evaluate("bar => bar.value")))
            assert before < shares[0] < shares[1] < 1, "the bar moves"
        shot(page, f"opening-{script}")
        go_on.set()
        page.get_by_role("navigation", name="Views").wait_for()
        assert page.url.endswith("/prediction/test/3?layer=fc1") and page.locator(".says, .headline, h1").count()


def test_a_page_shows_why_the_explorer_cannot_be_opened(pages, explorer):
    go_on = threading.Event()
    opening = an_opening(explorer, go_on, ValueError("the memory is not whole."))
    with serving(opening) as served:
        opening.start()
        page = pages(color_scheme="dark", viewport={"width": 390, "height": 700})
        page.goto(served.address + "run")
        page.locator("progress").wait_for()
        shot(page, "opening-phone")
        go_on.set()
        page.get_by_role("heading", name="This memory cannot be opened").wait_for()
        assert page.locator("[data-says]").inner_text() == "the memory is not whole."
        assert page.locator("progress").is_hidden()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        shot(page, "opening-failed")


def test_work_is_started_followed_stopped_and_arrives(pages, explorer, monkeypatch):
    gate = threading.Semaphore(0)

    def slowly(progress) -> None:
        with bar("work", 100, progress) as watch:
            for _ in range(100):
                gate.acquire(timeout=60)
                if watch:
                    watch(1)

    ledger = type(explorer.memory).ledger

    def slow_ledger(memory, by, *, progress):
        slowly(progress)
        return ledger(memory, by, progress=progress)

    monkeypatch.setattr(type(explorer.memory), "ledger", slow_ledger)
    monkeypatch.setattr(Explorer, "ledger_seconds", lambda self, groups: 100.0)
    explorer.train = None  # without training examples nothing is trained again, and the ledger is the only work
    with serving(explorer) as served:
        page = pages()
        page.goto(served.address + "what-if/test/3?by=label&group=1")
        assert "about 2 min" in page.locator(".pending").inner_text()
        assert page.locator("[data-stop]").is_hidden()
        shot(page, "pending-waiting")
        page.get_by_role("button", name="Start").click()
        page.get_by_role("button", name="Stop").wait_for()
        assert page.locator("[data-start]").is_hidden()
        gate.release(30)
        while page.locator(".pending progress").evaluate("bar => bar.value") < 0.3:
            page.wait_for_timeout(50)
        assert "left" in page.locator("[data-left]").inner_text()
        shot(page, "pending-running")
        page.get_by_role("button", name="Stop").click()
        gate.release(1)
        page.get_by_role("button", name="Start").wait_for()
        assert page.locator("[data-left]").inner_text() == "stopped"
        page.get_by_role("button", name="Start").click()
        gate.release(200)
        page.locator(".pending").wait_for(state="detached")
        assert "Without" in page.locator("main").inner_text() or "without" in page.locator("main").inner_text()


def test_short_work_needs_no_click(pages, explorer, monkeypatch):
    monkeypatch.setattr(Explorer, "ledger_seconds", lambda self, groups: 5.0)
    with serving(explorer) as served:
        page = pages()
        page.goto(served.address + "what-if/test/3?by=label&group=1")
        page.locator(".pending").wait_for(state="detached")
        assert explorer.work_queue.latest("ledger", "label")
