"""Tests of whole experiments take minutes together: all but those of one paper are slow."""

import pytest

QUICK = "test_attention_svm"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``out`` is where every experiment of a paper has run for a few steps."""
    for item in items:
        if "experiments" in item.path.parts and item.path.stem != QUICK and "out" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
