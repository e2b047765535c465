"""Which tokens carry a layer: weights sum to one, parts to the output, and dual weights are the theorem's."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualform.attention import ATTENTIONS, build
from dualform.errors import QueryError
from dualform.svm import Regression, solve, support_vectors
from dualform.svm.expansion.support_vectors import power


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(name: str, **options) -> Any:
    torch.manual_seed(0)
    options = ({"one_sided": True} if name.startswith("conv1d") else {}) | options
    return build(name, 12, 4, **options).double()


def close(a: Tensor, b: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.fixture(params=[(name, causal) for name in ATTENTIONS for causal in (False, True)], ids=str)
def asked(request):
    name, causal = request.param
    if causal and (name.startswith("conv2d") or name == "kdgqa"):
        pytest.skip("a grid has no order, nor has an allocation of all tokens")
    return layer(name).eval(), causal  # without noise, and without passes that count


def test_parts_of_a_query_sum_to_what_each_head_gives_it(asked):
    made, causal = asked
    x = random(2, 9, 12)
    outputs = made.head_outputs(x, causal=causal)
    for query in (0, 5, -1):
        support = support_vectors(made, x, causal=causal, for_query=query)
        for example in range(2):
            for head in range(4):
                some = support.of(head=head, example=example)
                close(some.parts.sum(0), outputs[example, head, query])
                close(some.mass.sum(), torch.tensor(1.0, dtype=torch.float64))


def test_without_a_query_they_are_means_over_all(asked):
    made, causal = asked
    x = random(2, 9, 12)
    outputs = made.head_outputs(x, causal=causal).mean(2)
    support = support_vectors(made, x, causal=causal)
    for example in range(2):
        whole = sum(support.of(head=h, example=example).parts.sum(0) @ made.out.weight[:, 3 * h : 3 * h + 3].mT
                    for h in range(4))  # fmt: skip
        close(whole + made.out.bias, made(x, causal=causal)[example].mean(0))
        for head in range(4):
            close(support.of(head=head, example=example).parts.sum(0), outputs[example, head])


def test_padded_tokens_have_no_line_and_no_say(asked):
    made, causal = asked
    x, padding = random(2, 9, 12), torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    other = torch.where(padding.unsqueeze(-1), 7 * random(2, 9, 12, seed=1), x)
    one, two = (support_vectors(made, each, padding=padding, causal=causal) for each in (x, other))
    assert list(zip(one.head, one.first, strict=True)) == list(zip(two.head, two.first, strict=True))
    for name in ("mass", "log_dual", "adds", "parts"):
        close(getattr(one, name), getattr(two, name), 1e-10)
    assert int(one.of(example=1).first.max()) < 6
    outputs = made.head_outputs(x, padding=padding, causal=causal)[1, :, :6].mean(1)
    for head in range(4):
        close(one.of(head=head, example=1).parts.sum(0), outputs[head])


def test_the_dual_weight_is_the_norm_of_the_dual_variables():
    made, x = layer("softmax"), random(1, 7, 12)
    support = support_vectors(made, x)
    for expansion in made.expansions(x):
        for head in expansion.heads:
            problem = Regression.planted(expansion.keys[0, head], expansion.values[0, head], epsilon=0.01)
            close(support.of(head=head).log_dual.exp(), solve(problem).theta.norm(dim=1), 1e-7)


def test_windows_are_stretches_of_tokens():
    made, x = layer("sh", scales=[1, 2, 4, 4]), random(1, 10, 12)
    support = support_vectors(made, x)
    assert [(v.first, v.last) for v in support.of(head=2)] == [(0, 3), (4, 7), (8, 9)]
    assert [v.last - v.first for v in support.of(head=0)] == [0] * 10
    strided = support_vectors(layer("sh", scales=[1, 2, 4, 4], pool="stride"), x)
    assert [(v.first, v.last) for v in strided.of(head=3)] == [(0, 0), (4, 4), (8, 8)]
    told = str(support.top(1).of(head=2))
    assert told.startswith("head 2: tokens ") and " % (dual weight " in told and "example" not in told


def test_cross_attention_has_the_tokens_of_the_context():
    made, x, context = layer("softmax"), random(2, 4, 12), random(2, 6, 12, seed=1)
    support = support_vectors(made, x, context)
    assert len(support) == 2 * 4 * 6
    close(support.of(head=1, example=1).mass, made.weights(x, context)[1, 1].mean(0))


@pytest.mark.parametrize("by", ["mass", "dual", "adds"])
def test_the_top_are_the_largest_of_each_head(by):
    support = support_vectors(layer("bn+sh"), random(2, 9, 12))
    top = support.top(2, by)
    for example in range(2):
        for head in range(4):
            some, whole = (each.of(head=head, example=example) for each in (top, support))
            scores = [getattr(each, "log_dual" if by == "dual" else by) for each in (some, whole)]
            close(scores[0], scores[1].sort(descending=True).values[:2])
    assert [(v.example, v.head) for v in support.top(1)] == [(e, h) for e in range(2) for h in range(4)]


def test_lines_are_a_table_too():
    support = support_vectors(layer("softmax"), random(2, 5, 12))
    frame = support.to_pandas()
    assert list(frame) == ["example", "head", "first", "last", "mass", "log_dual", "adds"] and len(frame) == 2 * 4 * 5
    assert [v.mass for v in support] == pytest.approx(list(frame["mass"]))
    assert str(support).splitlines()[0].startswith("example 0, head 0: token 0 carries ")


def test_long_keys_overflow_nothing():
    """h(k) of these keys is beyond any float; its logarithm is not."""
    made = layer("softmax")
    with torch.no_grad():
        made.key.weight *= 100
    support = support_vectors(made.float(), random(1, 7, 12).float())
    assert bool(support.log_dual.isfinite().all()) and float(support.log_dual.max()) > 710
    assert "e+" in str(support)


def test_a_number_is_told_by_its_logarithm():
    assert power(math.log(2.5)) == "2.5" and power(-math.inf) == "0"
    assert power(math.log(31_400)) == "3.1e+04" and power(1000.0) == "2.0e+434" and power(-100.0) == "3.7e-44"


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda x: support_vectors(layer("bn"), x, for_query=5), "there is no query 5: the sequence has 5 tokens"),
        (lambda x: support_vectors(layer("bn"), x * math.nan), "the sequence holds NaN or infinity"),
        (
            lambda x: support_vectors(layer("bn"), x).of(head=4),
            r"this answer has no head 4; it has \[0, 1, 2, 3\]",
        ),
        (lambda x: support_vectors(layer("bn"), x).of(example=1), "no example 1"),
        (lambda x: support_vectors(layer("bn"), x).top(0), r"k is 1 or more"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(ask, words):
    with pytest.raises(QueryError, match=words):
        ask(random(1, 5, 12))


def test_only_our_layers_have_expansions():
    with pytest.raises(
        QueryError, match=r"a MultiheadAttention has no expansions: give a layer of dualform\.attention"
    ):
        support_vectors(nn.MultiheadAttention(4, 2), random(1, 3, 4))


@pytest.mark.parametrize("name", ["bn", "bn+sh", "linear-bn", "sparse-bn"])
def test_the_last_causal_query_has_the_support_of_the_whole_sequence(name):
    """It sees all that the others see, so its regression is that of the sequence."""
    torch.manual_seed(0)
    options = {"scales": [1, 1, 1, 1]} if "sh" in name else {}
    layer = build(name, 12, 4, **options).double()
    x = torch.randn(1, 9, 12, dtype=torch.float64)
    whole, causal = (support_vectors(layer, x, causal=causal, for_query=8) for causal in (False, True))
    torch.testing.assert_close(causal.log_dual, whole.log_dual)
    torch.testing.assert_close(causal.mass, whole.mass)
