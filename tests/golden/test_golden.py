"""Memories that earlier versions wrote are opened by this one, and answer as they did."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from golden import CASES, HERE, answers, bar, differences, unpacked


@pytest.mark.parametrize("name", CASES)
def test_a_memory_of_an_earlier_version_answers_as_it_did(name, tmp_path):
    kept = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    case = CASES[name]
    inputs = torch.tensor(kept["inputs"], dtype=None if case.about.tokens else torch.float64)
    now = json.loads(json.dumps(answers(unpacked(name, tmp_path), case, inputs)))
    assert not differences(kept["answers"], now, bar(case))


def test_a_changed_answer_would_be_seen():
    """So that the law above can fail."""
    before = {"a": [1.0, 2.0], "b": {"c": ["x"]}}
    assert not differences(before, {"a": [1.0, 2.0 + 1e-12], "b": {"c": ["x"]}}, 1e-9)
    for other in ({"a": [1.0, 2.1], "b": {"c": ["x"]}}, {"a": [1.0, 2.0], "b": {"c": ["y"]}}, {"a": [1.0, 2.0]}):
        assert differences(before, other, 1e-9)
