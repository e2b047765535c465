"""Every display in a real browser, on a light and on a dark page."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

SHOTS = os.environ.get("DUALFORM_SHOTS")
"""A folder for the pictures, to look at them."""

THEMES = {"light": ("#ffffff", "#222222"), "dark": ("#111111", "#dddddd")}


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def displays(recorded) -> Iterator[dict[str, str]]:
    from dualform.explain.notebook import illustrations

    recorded.memory.illustrate(pictures=recorded.images)
    yield {name: answer._repr_html_() for name, answer in recorded.answers().items()}
    illustrations._ILLUSTRATIONS.clear()


@pytest.mark.parametrize("theme", THEMES)
def test_every_display_can_be_read_on_light_and_dark_pages(browser, displays, theme, tmp_path):
    paper, ink = THEMES[theme]
    page = browser.new_page(viewport={"width": 860, "height": 700})
    complaints, requests = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    style = f"margin:0;background:{paper};color:{ink};font-family:sans-serif"
    for name, display in displays.items():
        page.set_content(f"<body style='{style}'><main>{display}</main>")
        file = (Path(SHOTS) if SHOTS else tmp_path) / f"{name}-{theme}.png"
        page.locator("main").screenshot(path=file)
        assert page.evaluate("[...document.querySelectorAll('main > div')].every(e => e.scrollWidth <= e.clientWidth)")
        assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)"), name
        inks = page.evaluate("[...document.querySelectorAll('main *')].map(e => getComputedStyle(e).color)")
        assert set(inks) == {f"rgb({', '.join(str(int(ink[i : i + 2], 16)) for i in (1, 3, 5))})"}, name
        assert number_of_colours(file) >= 2, name
    assert complaints == [] and [url for url in requests if not url.startswith("data:")] == []
    page.close()


def number_of_colours(file: Path) -> int:
    """How many colours a picture has; an empty one has a single colour."""
    pillow = pytest.importorskip("PIL.Image")
    with pillow.open(file) as image:
        return len(image.convert("RGB").getcolors(1 << 24))
