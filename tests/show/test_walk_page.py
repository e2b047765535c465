"""The way of a page stays short: few files between a request and the memory."""

import pytest

pytest.importorskip("starlette", reason="the explorer needs the extra 'web', which is not installed")

from walk_page import files, walk_prediction


def test_a_prediction_page_reaches_the_memory_after_few_files(tmp_path):
    walk = walk_prediction(tmp_path / "memory")
    before_explain = walk.before(lambda step: step[0].startswith("explain/"))
    assert len(files(before_explain)) <= 7, before_explain
    shown = [file for file in files(walk.to_question()) if file.startswith("show/")]
    assert len(shown) <= 12, shown
