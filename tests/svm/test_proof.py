"""The theorem on real layers: a head is the expansion of a regression that is solved here; and layers of one's own."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualform.attention import ATTENTIONS, build, from_primal, load_from
from dualform.attention.linear import LinearKernel
from dualform.attention.masked_attention import attend, split_heads
from dualform.attention.norm import key_statistics
from dualform.errors import QueryError, SizeError
from dualform.svm import prove, support_vectors


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(name: str, width: int = 12, heads: int = 4, **options) -> Any:
    torch.manual_seed(0)
    options = ({"one_sided": True} if name.startswith("conv1d") else {}) | options
    return build(name, width, heads, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_head_is_a_support_vector_expansion(name, causal):
    if causal and (name.startswith("conv2d") or name == "kdgqa"):
        pytest.skip("a grid has no order, nor has an allocation of all tokens")
    made, x, padding = layer(name).train(), random(2, 9, 12).float(), torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 7:] = True
    for head in (0, 3):
        proof = prove(made, x, head=head, example=1, padding=padding, causal=causal)
        assert proof.holds and proof.output_error < 1e-9, str(proof)
        assert not proof.determined or proof.value_error < 1e-7
        assert proof.needed > 0 and proof.kernel == ("elu" if "linear" in name else "exp")
    assert made.training and next(made.parameters()).dtype == torch.float32


def test_the_proof_of_a_head_that_sees_a_context():
    proof = prove(layer("softmax"), random(1, 4, 12), random(1, 6, 12, seed=1), head=2)
    assert proof.holds and proof.keys == 6 and proof.regressions == 1


def test_a_proof_is_a_small_table():
    lines = str(prove(layer("softmax"), random(1, 6, 12), head=2)).splitlines()
    assert lines[0].startswith("head 2, example 0 is a support vector expansion (exp kernel, 6 keys, ε = 0.0")
    assert [line[2:22].strip() for line in lines[1:]] == [
        "gap / optimum", "C needed", "values from θ", "attention from them", "condition number",
    ]  # fmt: skip


def test_a_finite_kernel_does_not_determine_the_values_and_says_so():
    proof = prove(layer("linear"), random(1, 9, 12))
    assert proof.holds and not proof.determined and "not determined by targets" in str(proof)


def test_keys_too_long_for_double_precision_are_not_proved():
    """The gap closes, and yet it is not called a proof: targets do not tell short keys' values from nothing."""
    made, x = layer("softmax").double(), random(1, 40, 12)
    with torch.no_grad():
        made.key.weight *= 8
    proof = prove(made, x)
    assert not proof.determined and not proof.holds and proof.condition > 1e12
    assert "was not, in double precision, shown to be" in str(proof)
    with torch.no_grad():
        made.key.weight *= 10
    with pytest.raises(QueryError, match=r"h\(k\) reaches e\^\d+.*Ask for support_vectors"):
        prove(made, x)
    assert len(support_vectors(made, x)) == 160


def test_a_head_may_be_constant_or_see_one_token():
    made = layer("softmax")
    with torch.no_grad():
        made.value.weight.zero_()
        made.value.bias.zero_()
    assert prove(made, random(1, 5, 12)).holds
    assert prove(layer("bn"), random(1, 1, 12)).holds


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda made, x: prove(made, x, head=4), "head 4 of example 0: there are 4 heads and 2 examples"),
        (lambda made, x: prove(made, x, example=2), "example 2"),
        (lambda made, x: prove(made, x * math.inf), "NaN or infinity"),
        (lambda made, x: prove(made, x, epsilon=-1.0), "epsilon=-1.0"),
        (
            lambda made, x: prove(made, x, padding=torch.ones(2, 5, dtype=torch.bool)),
            "no query of example 0 sees a key",
        ),
        (lambda made, x: prove(made, random(1, 1100, 12)), "1,100 keys takes too long: the proof is for up to 1,024"),
    ],
)
def test_what_cannot_be_proved_is_refused_in_a_sentence(ask, words):
    with pytest.raises(QueryError, match=words):
        ask(layer("softmax"), random(2, 5, 12))


# ---------------------------------------------------------------- make your own


def own(g, width: int = 12, heads: int = 4, **options) -> Any:
    torch.manual_seed(0)
    return from_primal(g, width, heads, **options).double()


def test_the_identity_in_the_primal_is_softmax_attention():
    theirs, x = nn.MultiheadAttention(12, 4, batch_first=True).double(), random(2, 7, 12)
    made = load_from(own(lambda each: each), theirs)
    torch.testing.assert_close(made(x), theirs(x, x, x)[0])
    torch.testing.assert_close(made(x, causal=True), load_from(layer("softmax").double(), theirs)(x, causal=True))


def test_normalised_by_the_keys_it_is_attention_bn():
    """The batch normalisation of a sequence's own tokens, where queries are its keys."""

    def normalised(each: Tensor) -> Tensor:
        mean, variance = key_statistics(each)
        return (each - mean) * (variance + 1e-5).rsqrt()

    made, bn, x = own(normalised, bias=False), layer("bn", bias=False).double(), random(2, 7, 12)
    with torch.no_grad():
        made.key.weight.copy_(made.query.weight)
    bn.load_state_dict(made.state_dict())
    torch.testing.assert_close(made(x), bn(x))


@pytest.mark.parametrize("kernel", [None, LinearKernel()])
def test_scores_are_between_mapped_queries_and_mapped_keys(kernel):
    made, x = own(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), kernel=kernel), random(2, 7, 12)
    q, k, v = (split_heads(each(x), 4) for each in (made.query, made.key, made.value))
    if kernel is None:
        torch.testing.assert_close(made.head_outputs(x), attend(made.g(q), made.g(k), v))
    torch.testing.assert_close(made.expansions(x)[0].outputs(), made.head_outputs(x))
    made(x).sum().backward()
    assert all(p.grad is not None for p in made.g.parameters())
    again = own(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), kernel=kernel)
    again.load_state_dict(made.state_dict())
    torch.testing.assert_close(again(x), made(x))


@pytest.mark.parametrize("causal", [False, True])
def test_what_one_makes_is_proved_like_any_other(causal):
    for g in (torch.tanh, nn.LayerNorm(3), lambda each: each.flip(-1).sin()):
        proof = prove(own(g), random(1, 8, 12), head=1, causal=causal)
        assert proof.holds, str(proof)


def test_a_map_may_change_how_many_numbers_a_head_has():
    made, x = own(lambda each: torch.cat([each.sin(), each.cos()], -1)), random(1, 8, 12)
    assert made(x).shape == (1, 8, 12) and prove(made, x, head=1).holds


def test_a_map_that_loses_tokens_is_refused():
    with pytest.raises(SizeError, match=r"g makes \(1, 4, 6, 3\) of \(1, 4, 7, 3\) .* keep all axes but the last"):
        own(lambda each: each[:, :, 1:])(random(1, 7, 12))
