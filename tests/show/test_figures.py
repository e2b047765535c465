"""Figures: one function a question, drawn without showing or keeping anything."""

import subprocess
import sys
from io import BytesIO

import numpy as np
import pytest

from dualform.errors import QueryError
from dualform.show import figures
from dualform.show.text.words import same_digits


@pytest.fixture(scope="module")
def spot(recorded):
    return recorded.memory.attend(recorded.model, recorded.x[:3])


def drawn(figure) -> bytes:
    file = BytesIO()
    figure.savefig(file, dpi=40)
    return file.getvalue()


def widths(figure) -> list[float]:
    return [bar.get_width() for bar in figure.axes[0].patches]


def test_top_draws_a_row_for_each_query_with_what_each_image_adds(recorded, spot):
    hits = spot.top(4, layer="fc2", per="slot")
    figure = figures.top(hits, recorded.images, asked=recorded.images[:3], titles=["a", "b", "c"])
    assert len(figure.axes) == 3 * (1 + 4)
    assert figure.axes[1].get_title() == same_digits(hits.contribution[0].tolist())[0]
    assert drawn(figure).startswith(b"\x89PNG")


def test_top_needs_the_index(recorded):
    hits = recorded.memory.attend(recorded.model, recorded.x[:1]).top(2, layer="fc2", per="slot")
    hits = type(hits)(**{**vars(hits), "columns": hits.columns.drop_columns("index")})
    with pytest.raises(QueryError, match="training images are found by the column 'index'"):
        figures.top(hits, recorded.images)


@pytest.mark.parametrize("score", ["contribution", "weight", "abs"])
@pytest.mark.parametrize("layer", ["fc1", "fc2"])
def test_by_draws_a_bar_for_each_part_and_for_the_sum(spot, score, layer):
    groups = spot.by("label", layer=layer, score=score)
    figure = figures.by(groups, query=1, recalled=spot.by("label", layer=layer, score="abs"))
    bars = widths(figure)
    assert len(bars) == (3 + 2 + 1 if score == "contribution" else 3)
    if score == "contribution":
        assert sum(bars[:-1]) == pytest.approx(bars[-1], abs=1e-4)
    assert drawn(figure)


def test_by_shows_the_ends_of_many_groups_and_sums_the_others(spot):
    groups = spot.by("index", layer="fc2")
    bars = widths(figures.by(groups, shown=4))
    assert len(bars) == 4 + 4 + 1 + 2 + 1
    assert sum(bars[:-1]) == pytest.approx(bars[-1], abs=1e-4)


@pytest.mark.parametrize("column", [None, "label", "index"])
def test_timeline_draws_over_training_steps(spot, column):
    figure = figures.timeline(spot.timeline(column, layer="fc2", stretches=6), query=2)
    assert figure.axes[0].get_xlabel() == "training step"
    assert drawn(figure)


@pytest.mark.parametrize("score", ["contribution", "weight", "abs"])
def test_the_spotlight_curve_falls(spot, score):
    figure = figures.spotlight(spot.top(20, layer="fc1", score=score, per="slot"))
    for line in figure.axes[0].lines[:3]:
        heights = np.asarray(line.get_ydata()).tolist()
        assert heights == sorted(heights, reverse=True)
    assert drawn(figure)


def test_importing_the_figures_does_not_import_matplotlib():
    program = "import sys, dualform.show.figures; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_heads_are_drawn_beside_random_matrices():
    pytest.importorskip("numba")
    import torch

    from dualform import svm
    from dualform.models import TransformerLM

    torch.manual_seed(0)
    model, x = TransformerLM(9, 6, width=8, heads=2, layers=1), torch.randint(9, (6, 6))
    states = {0: dict(model.state_dict()), 5: {n: 2 * each for n, each in model.state_dict().items()}}
    path = svm.trajectory(model, x, states, progress=False, null=3)
    report = path.reports[-1]["blocks.0.attn"]
    figure = figures.heads(report)
    cosines = [np.asarray(line.get_ydata()) for line in figure.axes[2].lines if line.get_marker() == "_"]
    assert [line.tolist() for line in cosines if len(line)] == [each.null.cosines.tolist() for each in report]
    assert drawn(figure).startswith(b"\x89PNG")
    through = figures.heads_through(path, "blocks.0.attn")
    assert np.asarray(through.axes[0].lines[1].get_ydata()).tolist() == path.curve("blocks.0.attn", 1, "norm")
    assert drawn(through).startswith(b"\x89PNG")


def test_allocations_are_bands_that_fill_the_whole():
    """Each as high as its share of the query heads, in every pass."""
    import torch

    from dualform import attention
    from dualform.errors import QueryError
    from dualform.models import ViT

    torch.manual_seed(0)
    model = ViT(8, 4, channels=1, classes=2, width=16, heads=8, layers=2, attention="kdgqa", groups=4)
    with attention.allocations(model) as history:
        for _ in range(3):
            model(torch.randn(5, 1, 8, 8))
    figure = figures.allocations(history)
    for axis, layer in zip(figure.axes, history.layers, strict=True):
        tops = [np.asarray(line.get_ydata()) for line in axis.lines]
        expected = history.shares(layer).cumsum(1).T.numpy()
        assert len(tops) == 4 and all(np.allclose(top[:3], each) for top, each in zip(tops, expected, strict=True))
    assert drawn(figure).startswith(b"\x89PNG")
    model = torch.nn.ModuleDict(
        {name: attention.build("kdgqa", 16, 8, groups=groups) for name, groups in (("a", 2), ("idle", 4), ("b", 4))}
    )
    with attention.allocations(model) as history:
        for name in "ab":
            model[name](torch.randn(5, 6, 16))
    figure = figures.allocations(history)
    assert [axis.get_title() for axis in figure.axes] == ["a", "b"]  # without the layer that had no pass
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["3", "2", "1", "0"]
    with attention.allocations(model) as nothing:
        pass
    with pytest.raises(QueryError, match="no forward pass in training was noted"):
        figures.allocations(nothing)
