"""Reports on heads: the same numbers as the library's own calls, beside those of random matrices."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dualform.attention import build
from dualform.attention.softmax import SoftmaxAttention
from dualform.errors import QueryError, SizeError
from dualform.svm import Report, fit, fit_generalised, report, reports
from dualform.svm.dynamics.gradient_descent import DescentSamples, descend
from dualform.svm.dynamics.output_heads import LinearHead
from dualform.svm.heads.alignment import Alignment
from dualform.svm.heads.report_text import is_separating, sentences, verdict
from dualform.svm.separation.problem import Problem
from dualform.svm.separation.separation import Norm, Separation
from dualform.svm.separation.span import least_norm_solution, project_to_span

pytest.importorskip("numba")


def unit(*shape: int, seed: int) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return nn.functional.normalize(made, dim=-1)


def layer_with(W: Tensor, start: float = 1.0) -> SoftmaxAttention:
    """A layer of one head whose query-key matrix is W."""
    layer = SoftmaxAttention(len(W), 1, bias=False).double()
    with torch.no_grad():
        layer.key.weight.copy_(start * torch.eye(len(W)))
        layer.query.weight.copy_(W * math.sqrt(len(W)) / start)
    return layer


class Toy(NamedTuple):
    """A layer that the paper's dynamics trained, the same before, and what both are asked about."""

    trained: SoftmaxAttention
    untrained: SoftmaxAttention
    tokens: Tensor
    queries: Tensor
    W: Tensor


@pytest.fixture(scope="module")
def toy() -> Toy:
    """n = 6, T = 8, d = 10: 2,000 steps of the stable gradient."""
    tokens, queries, v = unit(1, 6, 8, 10, seed=1), unit(1, 6, 10, seed=2), unit(1, 10, seed=3)
    labels = torch.tensor([[1.0, -1, 1, 1, -1, 1]]).double()
    start = torch.randn(1, 10, 10, generator=torch.Generator().manual_seed(4), dtype=torch.float64) / math.sqrt(10)
    W = descend(DescentSamples(tokens, queries, labels), LinearHead(v), start, 2000).W[0]
    return Toy(layer_with(W), layer_with(start[0]), tokens[0], queries[0].unsqueeze(1), W)


def of(layer: nn.Module, toy: Toy, null: int = 20, **options: Any) -> Report:
    return report(layer, toy.queries, toy.tokens, progress=False, null=null, **options)


def test_a_report_says_what_the_librarys_own_calls_say(toy):
    found = of(toy.trained, toy, tolerance=1e-6)[0]
    selected = torch.einsum("ntd,de,ne->nt", toy.tokens, toy.W, toy.queries[:, 0]).argmax(1)
    torch.testing.assert_close(found.W, toy.W)
    assert torch.equal(found.selected, selected)
    norms: tuple[tuple[Separation | None, Alignment | None, Norm], ...] = (
        (found.separation, found.found, "frobenius"),
        (found.nuclear, found.low, "nuclear"),
    )
    for separation, alignment, norm in norms:
        alone = fit(toy.tokens, toy.queries[:, 0], selected, norm)
        assert separation is not None and alignment is not None and separation.converged
        torch.testing.assert_close(separation.W, alone.W, rtol=0, atol=1e-5 if norm == "frobenius" else 0.05)
        cosine = float((toy.W * separation.W).sum() / toy.W.norm() / separation.W.norm())
        assert alignment.cosine == pytest.approx(cosine, abs=1e-12)
        margins = separation.problem.margins(toy.W)
        size = float(toy.W.norm() if norm == "frobenius" else torch.linalg.matrix_norm(toy.W, "nuc"))
        assert alignment.efficiency.high == pytest.approx(float(margins.min()) / size * separation.upper, abs=1e-9)
        assert 0 <= alignment.efficiency.low <= alignment.efficiency.high <= 1


def test_a_trained_layer_stands_out_and_an_untrained_one_does_not(toy):
    trained, untrained = of(toy.trained, toy)[0], of(toy.untrained, toy)[0]
    assert trained.found is not None and untrained.found is not None
    assert trained.found.efficiency.high > 0.85 and untrained.found.efficiency.high < 0.15
    least, most = untrained.null.range
    assert least <= untrained.found.cosine <= most < trained.found.cosine
    assert trained.saturation.hard and not untrained.saturation.hard
    assert "within the range of random matrices" in " ".join(sentences(untrained))
    assert "above the range of random matrices" in " ".join(sentences(trained))
    assert is_separating(untrained) is False and "no better than random" in verdict(untrained)
    beats = trained.found.efficiency.high > trained.null.efficiency
    assert is_separating(trained) is beats and ("better than every random matrix" in verdict(trained)) == beats


def test_a_report_is_the_same_twice_and_tells_how_sure_it_is(toy):
    first, second = (of(toy.trained, toy) for _ in range(2))
    assert str(first) == str(second) and repr(first[0].row()) == repr(second[0].row())
    row = first[0].row()
    told = (
        "gap",
        "nuclear gap",
        "feasible",
        "above 0.9",
        "above 0.99",
        "above 0.999",
        "separating norm",
        "nuclear norm",
    )
    assert all(name in row and row[name] == row[name] for name in told)
    assert (first.options.selected, first.options.masked) == (1e-3, 1e-6)
    for word in ("saturated", "efficiency", "null", "nuclear", "gap"):
        assert word in str(first) and word in first._repr_html_()
    assert all(f"<li>Head {each.head}. " in first._repr_html_() for each in first)


def test_without_the_tokens_that_are_no_support_the_separation_is_the_same(toy):
    found = of(toy.trained, toy, tolerance=1e-9)[0]
    keep = found.separation.support | found.separation.problem.selected
    again = fit(toy.tokens, toy.queries[:, 0], found.selected, hidden=~keep, tolerance=1e-9)
    torch.testing.assert_close(again.W, found.separation.W, rtol=0, atol=1e-6)
    listed = found.support()
    assert len(listed) == int(found.separation.support.sum()) and listed == sorted(listed, key=lambda s: -s.multiplier)
    assert sum(each.share for each in listed) == pytest.approx(1.0)
    assert float(found.by_place().sum()) == pytest.approx(1.0)


def test_what_training_moved_lies_in_what_the_tokens_can_see(toy):
    found = of(toy.trained, toy, start=toy.untrained)[0]
    assert found.found is not None and found.found.moved is not None
    start = of(toy.untrained, toy)[0].W
    moved, ideal = toy.W - start, found.separation.W
    torch.testing.assert_close(project_to_span(found.separation.problem, moved), moved, rtol=0, atol=1e-9)
    assert found.found.moved == pytest.approx(float((moved * ideal).sum() / moved.norm() / ideal.norm()))
    assert found.found.inside == pytest.approx(found.found.cosine / found.found.seen, abs=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(2, 5), st.integers(1, 5))
def test_the_part_inside_has_the_same_margins_and_no_less_norm_would_do(seed, n, T, d):
    g = torch.Generator().manual_seed(seed)
    tokens, queries, W = (torch.randn(*shape, generator=g).double() for shape in ((n, T, d), (n, d), (d, d)))
    problem = Problem.of(tokens, queries, torch.randint(T, (n,), generator=g))
    part = project_to_span(problem, W)
    assert part is not None
    torch.testing.assert_close(problem.margins(part), problem.margins(W), rtol=1e-6, atol=1e-8)
    assert float(((W - part) * part).sum().abs()) <= 1e-8 * float(W.norm()) ** 2  # so ‖W‖² = ‖part‖² + ‖rest‖²


def test_what_no_matrix_meets_is_missed_by_a_certificate():
    problem = Problem.of(unit(1, 3, 2, seed=0).expand(2, 3, 2), unit(1, 2, seed=1).expand(2, 2), torch.tensor([0, 1]))
    found = least_norm_solution(problem.rows, problem.rows.target)
    assert float(abs(found.missed).max()) > 0.1
    assert float(abs(problem.rows.combine(found.missed)).max()) < 1e-9


# ------------------------------------------------------------------------------------------- layers of models


class Model(nn.Module):
    """Two attention layers over embedded bytes."""

    def __init__(self, name: str = "softmax") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 16)
        self.first, self.second = build(name, 16, 2), build(name, 16, 2)
        self.double()

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        x = x + self.first(x, padding=padding)
        return x + self.second(x, padding=padding)


BYTES = torch.randint(12, (5, 7), generator=torch.Generator().manual_seed(0))


def test_all_layers_of_a_model_are_reported_on_at_once():
    model = Model()
    found = reports(model, BYTES, progress=False, null=1, items=BYTES, loss=lambda y: y.square().sum())
    assert list(found) == ["first", "second"] and [each.head for each in found["first"]] == [0, 1]
    x = model.embed(BYTES).detach()
    alone = report(model.first, x, progress=False, null=1)
    assert alone[1].row()["cosine"] == pytest.approx(found["first"][1].row()["cosine"], abs=1e-9)
    for head in found["first"]:
        totals = head.by_item()
        assert sum(totals.values()) == pytest.approx(1.0) and set(totals) <= set(range(12))
        assert head.optimality is not None and 0 <= head.optimality.at_best <= 1
        assert head.optimality.better <= int(head.separation.support.sum())
    assert list(found["second"].to_pandas()["head"]) == [0, 1]
    assert list(reports(model, BYTES, layers=["second"], progress=False, null=0)) == ["second"]


def test_queries_that_tie_are_left_out():
    """The same byte twice is the same token twice: where it is the best one, nothing is selected."""
    found = report(Model().first, Model().embed(BYTES).detach(), progress=False, null=2)
    for head in found:
        logits = head.sight.logits()
        assert head.tied + len(head.selected) == BYTES.numel() and head.tied > 0
        best = logits.amax(1, keepdim=True)
        assert bool(((logits >= best - 1e-12).sum(1) == 1).all()) and head.separation.feasible


def test_a_layer_that_selects_nothing_is_refused():
    x = torch.ones(2, 5, 16)
    with pytest.raises(QueryError, match="best tokens of every query tie"):
        report(build("softmax", 16, 2), x, progress=False)
    with pytest.raises(QueryError, match="several tokens to choose from"):
        report(build("softmax", 16, 2), x[:, :1], progress=False)
    for where in (x * torch.nan, x * torch.inf):
        with pytest.raises(QueryError, match="NaN or infinity"):
            report(build("softmax", 16, 2), where, progress=False)


def test_heads_that_see_different_tokens_have_random_matrices_of_their_own():
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True).double(), unit(3, 6, 8, seed=0)
    mask = torch.zeros(3, 2, 6, 6, dtype=torch.bool)
    mask[:, 1, :, 3:] = True
    given = {"query": x, "key": x, "value": x, "attn_mask": mask.flatten(0, 1)}
    both, alone = (reports(layer, given, heads=h, null=2, nuclear=False, progress=False)[""] for h in (None, [1]))
    assert torch.equal(both[1].null.cosines, alone[1].null.cosines)
    assert not torch.equal(both[0].null.cosines, both[1].null.cosines)


def test_what_is_seen_of_a_matrix_is_right_where_tokens_are_nearly_flat():
    """All of W: the constraints span everything, however small some of them are."""
    x = unit(6, 20, 8, seed=0) @ torch.diag(torch.logspace(0, -3, 8).double())
    for head in report(build("softmax", 8, 2).double(), x, causal=True, null=0, nuclear=False, progress=False):
        assert head.found is not None and head.found.seen == pytest.approx(1.0, abs=1e-6)
        assert head.found.inside == pytest.approx(head.found.cosine, abs=1e-6)


def test_a_search_that_ends_too_soon_is_no_proof():
    x = torch.randn(8, 16, 8, generator=torch.Generator().manual_seed(0))
    found = report(build("softmax", 8, 2), x, epochs=1, null=1, nuclear=False, progress=False)
    undecided = [each for each in found if each.separation.feasible is None]
    assert undecided
    for each in undecided:
        assert "was not found in" in " ".join(sentences(each)) and not bool(each.by_place().any())
        assert "not found" in str(found)


def test_a_head_without_sharp_queries_is_left_out():
    layer = build("softmax", 16, 2).double()
    with torch.no_grad():
        layer.get_parameter("query.weight")[:8] *= 100
    found = report(layer, unit(3, 6, 16, seed=0), above=0.9, null=0, nuclear=False, progress=False)
    assert [each.head for each in found] == [0] and found.without == (1,)
    with pytest.raises(QueryError, match=r"have no query above 0\.9"):
        found[1]


def test_small_weights_do_not_tie():
    layer, x = build("softmax", 16, 2).double(), unit(3, 6, 16, seed=0)
    rows = []
    for times in (1.0, 1e-6):
        with torch.no_grad():
            for name, each in layer.named_parameters():
                if name.startswith(("query", "key")):
                    each.mul_(times)
        rows.append([h.row() for h in report(layer, x, null=0, nuclear=False, progress=False)])
    for a, b in zip(*rows, strict=True):
        assert a["tied"] == b["tied"] == 0 and a["cosine"] == pytest.approx(b["cosine"], abs=1e-6)


def test_sharp_queries_can_be_looked_at_alone(toy):
    whole, sharp = (of(toy.trained, toy, above=above, null=2)[0] for above in (0.0, 0.999))
    some = whole.sight.logits().softmax(1).amax(1) > 0.999
    assert torch.equal(sharp.sight.sequence, whole.sight.sequence[some]) and sharp.saturation.above[2] == 1.0
    with pytest.raises(QueryError, match="a weight above"):
        of(toy.untrained, toy, above=0.9999)


def test_padding_changes_nothing():
    layer, x = build("softmax", 16, 2).double(), unit(3, 6, 16, seed=0)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    other = x.clone()
    other[1, 4:] = 1e6
    rows = [report(layer, each, padding=padding, progress=False, null=1)[0].row() for each in (x, other)]
    assert repr(rows[0]) == repr(rows[1])


@pytest.mark.parametrize("name", ["bn", "sh", "bn+sh", "conv1d", "sparse-bn"])
def test_layers_that_change_the_map_are_seen_in_the_space_of_their_heads(name):
    found = report(build(name, 16, 2), torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0)), null=1,
                   progress=False)  # fmt: skip
    assert all(each.sight.space == "head" and each.W.shape == (8, 8) for each in found)


def test_torchs_attention_and_ours_have_the_same_report():
    from dualform.attention import load_from

    theirs = nn.MultiheadAttention(16, 2, batch_first=True).double()
    nn.init.normal_(theirs.in_proj_bias, std=0.5)
    ours, x = load_from(build("softmax", 16, 2).double(), theirs), unit(4, 7, 16, seed=0)
    for causal in (False, True):
        rows = [[h.row() for h in report(each, x, causal=causal, null=1, progress=False)] for each in (ours, theirs)]
        for a, b in zip(*rows, strict=True):
            assert a["cosine"] == pytest.approx(b["cosine"], abs=1e-6) and a["support tokens"] == b["support tokens"]


def test_mixtures_are_the_generalised_problem(toy):
    found = of(toy.untrained, toy, mixtures=True)[0]
    weights = found.sight.logits().softmax(1)
    alone = fit_generalised(toy.tokens, toy.queries[:, 0], weights)
    assert found.mixture is not None and found.mixture.feasible == alone.feasible
    torch.testing.assert_close(found.mixture.finite.W, alone.finite.W, atol=1e-6, rtol=0)


def test_what_does_not_fit_is_refused(toy):
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"null": -1}, QueryError, "null=-1"),
        ({"queries": 0}, QueryError, "queries=0"),
        ({"masked": 0.1}, QueryError, "masked=0.1"),
        ({"items": torch.zeros(2, 2, dtype=torch.long)}, SizeError, r"\(6, 8\)"),
        ({"heads": [3]}, QueryError, "no head 3"),
        ({"heads": []}, QueryError, r"no head in \[\]"),
        ({"above": 1.0}, QueryError, "above=1.0"),
    ]
    for options, error, said in cases:
        with pytest.raises(error, match=said):
            of(toy.trained, toy, **options)
    with pytest.raises(QueryError, match="several attention layers"):
        report(nn.Sequential(build("softmax", 16, 2), build("softmax", 16, 2)), torch.randn(2, 5, 16))
    with pytest.raises(QueryError, match="no attention layer 'x'"):
        reports(Model(), BYTES, layers=["x"])
    with pytest.raises(QueryError, match="no head 7"):
        of(toy.trained, toy)[7]
    with pytest.raises(QueryError, match="items"):
        of(toy.trained, toy)[0].by_item()
