"""What the heads of a layer see: whatever the layer, the matrix that is found gives its attention weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dualform
from dualform import svm
from dualform.attention import ATTENTIONS, Heads, build
from dualform.errors import ModelMismatch, QueryError
from dualform.models import SeriesClassifier, TransformerLM
from dualform.svm import look
from dualform.svm.heads.head_inputs import HeadInputs

PADDING = torch.zeros(3, 9, dtype=torch.bool)
PADDING[0, 6:] = PADDING[2, 8:] = True


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights_of(sight: HeadInputs, head: int) -> Tensor:
    """Attention weights by the matrix of a head, at all queries that are asked."""
    return sight.head(head).logits().softmax(1)


def require_attention_of(sights: list[HeadInputs], weights: Tensor, space: str, within: float = 1e-10) -> None:
    """Weights (batch, head, query, token) of a layer are those of its matrices."""
    for sight in sights:
        assert sight.space == space
        for head in sight.heads:
            at = sight.head(head)
            torch.testing.assert_close(
                weights_of(sight, head), weights[at.sequence, head, at.place].double(), atol=within, rtol=0
            )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [name for name in ATTENTIONS if not name.startswith(("linear", "conv2d", "relative"))])
def test_the_matrix_of_a_head_gives_its_weights(name, causal):
    """Biases included. In the space of the model where one matrix does it, else in that of the head."""
    if causal and name == "kdgqa":
        pytest.skip("an allocation of all tokens has no order")
    options: dict[str, Any] = {"one_sided": True} if name.startswith("conv1d") else {}
    layer = build(name, 16, 4, **options).double()
    assert isinstance(layer, Heads)
    for each in layer.parameters():
        nn.init.normal_(each, std=0.5)
    x = noise(3, 9, 16)
    (sights,) = look(layer, {"x": x, "padding": PADDING, "causal": causal}).values()
    expansions = layer.expansions(x, padding=PADDING, causal=causal)
    assert [sight.heads for sight in sights] == [each.heads for each in expansions]
    for sight, expansion in zip(sights, expansions, strict=True):
        assert sight.space == ("model" if name in ("softmax", "sparse", "gqa", "pgqa") else "head")
        weights = expansion.weights()
        for at, head in enumerate(sight.heads):
            seen = sight.head(head)
            assert not PADDING[seen.sequence, seen.place].any()
            torch.testing.assert_close(
                weights_of(sight, head), weights[seen.sequence, at, seen.place], atol=1e-10, rtol=0
            )


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name.startswith("linear")])
def test_linear_attention_is_refused_by_name(name):
    with pytest.raises(QueryError, match="linear kernel"):
        look(build(name, 16, 4), {"x": torch.randn(1, 5, 16)})


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name.startswith("relative")])
def test_positions_in_the_scores_are_refused_by_name(name):
    with pytest.raises(QueryError, match=r"Relative\w+ adds terms of its own to its logits \(positions\)"):
        look(build(name, 16, 4), {"x": torch.randn(1, 5, 16)})


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_torchs_attention_is_seen(batch_first, bias):
    layer = nn.MultiheadAttention(16, 4, bias=bias, batch_first=batch_first).double()
    for each in layer.parameters():
        nn.init.normal_(each, std=0.5)
    x, mask = noise(3, 9, 16), torch.ones(9, 9, dtype=torch.bool).triu(1)
    x = x if batch_first else x.transpose(0, 1)
    given = {"query": x, "key": x, "value": x, "key_padding_mask": PADDING, "attn_mask": mask}
    (sights,) = look(layer, given).values()
    _, weights = layer(**given, need_weights=True, average_attn_weights=False)
    require_attention_of(sights, weights.detach(), "model")


def test_an_encoder_of_torch_is_seen_in_evaluation_too():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).double().eval()
    model = nn.TransformerEncoder(layer, 2)
    found = look(model, {"src": noise(3, 9, 16), "src_key_padding_mask": PADDING})
    assert list(found) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert len(found["layers.0.self_attn"][0].selectable_queries()) == int((~PADDING).sum())


class Packed(nn.Module):
    """Attention as others write it: one linear layer for all, fewer keys than queries, and torch's fused kernel."""

    def __init__(self, groups: int, turn: bool = False, mask: Tensor | None = None) -> None:
        super().__init__()
        self.groups, self.turn, self.mask = groups, turn, mask
        self.queries, self.pairs = nn.Linear(16, 16), nn.Linear(16, 8 * groups)

    def forward(self, x: Tensor) -> Tensor:
        q = self.queries(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (each.unflatten(-1, (self.groups, 4)).transpose(1, 2) for each in self.pairs(x).chunk(2, -1))
        k, v = (each.repeat_interleave(4 // self.groups, 1) for each in (k, v))
        q = q.roll(1, -1) if self.turn else q
        return F.scaled_dot_product_attention(q, k, v, self.mask).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_whatever_calls_the_fused_kernel_is_seen(groups):
    """Also where heads share keys. What happens between projection and kernel is noticed, and seen behind it."""
    x = noise(3, 9, 16)
    for turn, space in ((False, "model"), (True, "head")):
        layer = Packed(groups, turn).double()
        (sights,) = look(nn.Sequential(layer), x).values()
        sight = sights[0]
        q, k = layer.queries(x).unflatten(-1, (4, 4)), layer.pairs(x)[..., : 4 * groups].unflatten(-1, (groups, 4))
        q = q.roll(1, -1) if turn else q
        logits = torch.einsum("bnhd,bmhd->bhnm", q, k.repeat_interleave(4 // groups, 2)) / 2
        require_attention_of([sight], logits.softmax(-1).detach(), space)
        if space == "head":
            with pytest.raises(QueryError, match="space='head'"):
                sight.head(0, space="model")


class Changing(nn.Module):
    """Attention in a network that goes on to change its tokens, and perhaps its queries, in place."""

    def __init__(self, queries: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.queries = nn.Linear(16, 16), nn.Linear(16, 16), queries

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        q, k = self.q(x), self.k(x)
        if self.queries != 1:
            q *= self.queries
        q, k = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in (q, k))
        x += F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)
        return x


def test_what_is_changed_in_place_is_seen_as_it_was():
    x = noise(3, 9, 16)
    for times, space in ((1.0, "model"), (3.0, "head")):
        model = Changing(times).double()
        q, k = (each(x).unflatten(-1, (4, 4)) for each in (model.q, model.k))
        weights = (torch.einsum("bnhd,bmhd->bhnm", times * q, k) / 2).softmax(-1).detach()
        require_attention_of(look(model, x)[""], weights, space)


class Adapted(nn.Linear):
    """A linear layer that adds something of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input.flip(-1)


def test_what_is_more_than_a_linear_layer_is_seen_behind_it():
    for make in (lambda: Adapted(16, 16), lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))):
        model = Packed(4)
        model.register_module("queries", make())
        sight = look(nn.Sequential(model.double()), noise(3, 9, 16))["0"][0]
        assert sight.space == ("head" if isinstance(model.queries, Adapted) else "model")
        require_attention_of([sight], (sight.q @ sight.k.mT * sight.scale).softmax(-1), sight.space)


def test_padding_of_others_hides_no_query():
    """Cross-attention of as many queries as keys; in self-attention padded tokens do not ask."""
    layer, x, z = nn.MultiheadAttention(16, 4, batch_first=True).double(), noise(3, 9, 16), noise(3, 9, 16, seed=1)
    for query, count in ((z, 27), (x, 27 - int(PADDING.sum()))):
        found = look(layer, {"query": query, "key": x, "value": x, "key_padding_mask": PADDING})[""]
        assert int(found[0].present.sum()) == count


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not today")


class Trying(Packed):
    """Calls a part that fails, and goes on without it."""

    def __init__(self) -> None:
        super().__init__(4)
        self.failing = Failing()

    def forward(self, x: Tensor) -> Tensor:
        with pytest.raises(RuntimeError):
            self.failing(x)
        return super().forward(x)


def test_a_part_that_fails_does_not_take_the_name_of_the_layer():
    assert list(look(nn.Sequential(Trying().double()), noise(1, 9, 16))) == ["0"]


def test_weights_that_are_not_the_models_are_refused():
    layer, x = build("softmax", 16, 4), torch.randn(1, 5, 16)
    with pytest.raises(ModelMismatch, match=r"has no 'module\.query\.weight'"):
        look(layer, {"x": x}, weights={f"module.{n}": each for n, each in layer.state_dict().items()})
    with pytest.raises(ModelMismatch, match=r"\(3, 3\) in the weights"):
        look(layer, {"x": x}, weights={"query.weight": torch.zeros(3, 3)})
    halves = {name: each.half() for name, each in layer.state_dict().items()}
    assert look(layer, {"x": x}, weights=halves)[""][0].q.dtype == torch.float64


def test_what_adds_to_the_logits_is_refused():
    bias = noise(9, 9)
    with pytest.raises(QueryError, match="adds terms of its own"):
        look(nn.Sequential(Packed(4, mask=bias).double()), noise(1, 9, 16))
    hidden = torch.zeros(9, 9).double().masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    (sights,) = look(nn.Sequential(Packed(4, mask=hidden).double()), noise(1, 9, 16)).values()
    assert bool((sights[0].hidden == torch.ones(9, 9).triu(1).bool()).all())
    (sights,) = look(nn.Sequential(Packed(4, mask=hidden.clamp(min=-1e9)).double()), noise(1, 9, 16)).values()
    assert bool((sights[0].hidden == torch.ones(9, 9).triu(1).bool()).all())


@pytest.mark.parametrize("kind", ["gpt2", "bert", "vit", "llama"])
def test_attention_of_hugging_face_is_seen(kind):
    """Without a list of names: in the model's space where projections are all there is, behind rotary positions not."""
    hf = pytest.importorskip("transformers")
    small = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 20}
    words = {"vocab_size": 30, "bos_token_id": 1, "eos_token_id": 2}
    makes = {
        "gpt2": lambda: hf.GPT2Model(hf.GPT2Config(n_embd=16, n_layer=1, n_head=4, n_positions=20, **words)),
        "bert": lambda: hf.BertModel(hf.BertConfig(vocab_size=30, **small)),
        "vit": lambda: hf.ViTModel(hf.ViTConfig(image_size=6, patch_size=2, **small)),
        "llama": lambda: hf.LlamaModel(hf.LlamaConfig(num_key_value_heads=2, **small, **words)),
    }
    model = makes[kind]().double().eval()
    for each in model.parameters():
        nn.init.normal_(each, std=0.3)
    ids = torch.randint(3, 30, (3, 9), generator=torch.Generator().manual_seed(0))
    given: Any = (
        {"pixel_values": noise(3, 3, 6, 6)} if kind == "vit" else {"input_ids": ids, "attention_mask": ~PADDING}
    )
    (sights,) = look(model, given).values()
    model.set_attn_implementation("eager")
    weights = model(**given, output_attentions=True).attentions[0].detach()
    within = 1e-6  # some take the softmax in float32
    require_attention_of(sights, weights, "head" if kind == "llama" else "model", within)


def test_scores_are_what_a_loss_makes_of_more_weight():
    """−∂L/∂(attention weight), by autograd on the weights themselves."""
    layer, x, like = build("softmax", 16, 4).double(), noise(3, 9, 16), noise(3, 9, 16, seed=1)
    assert isinstance(layer, Heads)
    (sights,) = look(layer, {"x": x}, loss=lambda y: (y * like).sum() + y.square().sum()).values()
    weights = layer.weights(x).detach().requires_grad_()
    values = layer.get_submodule("value")(x).unflatten(-1, (4, 4)).transpose(1, 2)
    y = layer.out((weights @ values).transpose(1, 2).flatten(2))
    (slope,) = torch.autograd.grad((y * like).sum() + y.square().sum(), weights)
    for head in range(4):
        at = sights[0].head(head)
        assert at.scores is not None
        torch.testing.assert_close(at.scores, -slope[at.sequence, head, at.place])


def test_the_direction_of_a_head_that_shares_keys_is_built_by_what_both_projections_were_trained_on(tmp_path):
    """Of grouped heads the rows of the key projection are those of the group."""
    pytest.importorskip("numba")
    torch.manual_seed(0)
    model = SeriesClassifier(3, 9, 3, width=8, heads=4, layers=1, hidden=12, attention="gqa", groups=2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "memory", dtype="float64", progress=False) as tape:
        for seed in range(4):
            y = torch.arange(6) % 3
            tape.note(index=6 * seed + torch.arange(6), label=y)
            F.cross_entropy(model(noise(6, 9, 3, seed=seed)), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    memory, name = dualform.open(tmp_path / "memory"), "blocks.0.attn"
    for head in svm.reports(model, noise(2, 9, 3, seed=9), progress=False, null=1)[name]:
        shares_keys = svm.origin(memory, name, head)
        built = shares_keys.by("label", progress=False)
        assert shares_keys.keys.total == pytest.approx(shares_keys.total, abs=1e-12)
        assert sum(each.mean for each in built) + built.initial == pytest.approx(shares_keys.total, abs=1e-10)


def test_nothing_stays_on_the_model():
    model = TransformerLM(20, 12, width=16, heads=2, dropout=0.1).train()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    look(model, torch.randint(20, (2, 12)), loss=lambda y: y.logsumexp(-1).sum())
    assert all(not each._forward_hooks and not each._forward_pre_hooks and each.training for each in model.modules())
    assert all(each.grad is None for each in model.parameters())
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_what_cannot_be_seen_is_refused():
    with pytest.raises(QueryError, match="no attention layer was seen"):
        look(nn.Linear(3, 3), torch.randn(2, 3))
    with pytest.raises(QueryError, match="one number"):
        look(build("softmax", 16, 4), {"x": torch.randn(1, 5, 16)}, loss=lambda y: y)
