"""Warnings point at a line of the user's program, wherever inside of dualform or torch they come from."""

import ast
import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from dualform import tasks
from dualform.errors import DualformWarning, UserLine, warn
from dualform.explain import open_memory, survey
from dualform.record import record

SOURCE = Path(__file__).parents[1] / "src" / "dualform"
LINES = Path(__file__).read_text(encoding="utf-8").splitlines()


def line_of(warning: warnings.WarningMessage) -> str:
    """The line of this file that a warning points at."""
    assert warning.filename == __file__, (warning.filename, warning.lineno)
    return LINES[warning.lineno - 1]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def test_a_warning_of_the_recorder_points_at_the_loop(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with record(model, optimizer, tmp_path / "m", progress=False):
            for step in range(8):
                model(torch.ones(3, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step < 7:
                    with torch.no_grad():
                        model.get_parameter("0.weight").mul_(0.5)
    assert caught and all("optimizer.step()" in line_of(one) or "with record(" in line_of(one) for one in caught)


def test_a_warning_through_a_cached_property_points_at_the_question(tmp_path):
    model, x, y = network(), torch.randn(20, 4), torch.arange(20) % 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, optimizer, tmp_path / "m", progress=False) as tape:
        for index in torch.arange(20).split(5):
            tape.note(index=index)
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    run = open_memory(tmp_path / "m").replay(network(), *tasks.classification(x, 1 - y))
    with pytest.warns(DualformWarning, match="Its answers are about this run") as caught:
        run.influence(x[:1])
    assert "run.influence(" in line_of(caught[0])


def test_a_warning_of_a_survey_points_at_the_call(tmp_path):
    x, y = torch.randn(20, 4), torch.arange(20) % 2

    def shares(model, index):
        return nn.functional.cross_entropy(model(x[index]), y[index], reduction="none") / len(index)

    with pytest.warns(DualformWarning, match="not its share") as caught:
        survey(network(), shares, lambda index: index, tmp_path / "m", examples=20, progress=False)
    assert "survey(" in line_of(caught[0])


def test_a_warning_of_a_question_points_at_the_question(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, optimizer, tmp_path / "m", progress=False) as tape:
        tape.note(index=torch.arange(3))
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    spot = open_memory(tmp_path / "m").attend(model, torch.ones(1, 4))
    with pytest.warns(DualformWarning, match="per='slot'") as caught:
        spot.top(2, layer="2")
    assert "spot.top(" in line_of(caught[0])


def test_a_later_warning_points_at_its_cause():
    cause = UserLine.calling()  # this line
    with pytest.warns(DualformWarning) as caught:
        later = threading.Thread(target=warn, args=("late", cause))
        later.start()
        later.join()
    assert "# this line" in line_of(caught[0])


def test_a_warning_is_shown_once_a_line_and_again_for_another_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            warn("again and again")
        warn("again and again")
    assert len(caught) == 2


def test_no_other_way_to_warn_is_used():
    direct = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("warn", "warn_explicit")
        and isinstance(node.value, ast.Name) and node.value.id == "warnings"
    ]  # fmt: skip
    assert [place.split(":")[0] for place in direct] == ["errors.py"], direct


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: file.relative_to(SOURCE).as_posix())
def test_no_message_names_a_page_that_is_not_installed(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings are for readers
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in statements]
    assert not [node.value for node in texts if isinstance(node.value, str) and re.search(r"docs/\S+\.md", node.value)]
