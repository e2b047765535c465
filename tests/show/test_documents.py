"""The documents say what is so: the quickstart runs and prints what the README shows, and links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]\d+)?")


def blocks(text: str, language: str = "") -> list[str]:
    fences = re.findall(r"```(\w*)\n(.*?)```", text, flags=re.DOTALL)
    return [body for name, body in fences if name == language]


def test_the_quickstart_prints_what_the_readme_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, shown = blocks(README, "python")[0], next(text for text in blocks(README) if text.startswith("a 7"))
    exec(compile(code, "README.md", "exec"), {"__name__": "quickstart"})
    printed = capsys.readouterr().out
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
    *numbers, residual = map(float, NUMBER.findall(printed))
    # other processors round differently, and a hundred steps let that grow a little
    assert numbers == pytest.approx(list(map(float, NUMBER.findall(shown)))[:-1], abs=0.11)
    assert abs(residual) < 0.01


def test_the_quickstart_of_the_readme_is_the_one_in_the_examples():
    example = (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")
    assert example.split('"""\n\n', 1)[1] == blocks(README, "python")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_every_page_can_be_reached_from_the_readme():
    for page in PAGES[1:]:
        assert f"docs/{page.name}" in README, page.name


def test_the_first_screen_has_the_demo_and_the_tests():
    first = README.splitlines()[:12]
    assert any("make demo" in line for line in first) and any("make test" in line for line in first)
