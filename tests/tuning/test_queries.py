"""Visual query tuning: the backbone stays as it is, and nothing of it is kept for the backward pass."""

import copy
import math
from typing import Any

import pytest
import torch
from helpers import unchecked
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from dualform.attention import ATTENTIONS
from dualform.errors import SizeError
from dualform.models import ViT
from dualform.tuning import (
    IntermediateProbe,
    Probe,
    VisualQueryTuning,
    summary,
    trained_parameters,
    with_lora,
    with_prompts,
)

LAYERS, WIDTH, HEADS, TOKENS = 4, 32, 4, 17  # 16 patches and a class token


def backbone(dtype: torch.dtype = torch.float64, **options: Any) -> ViT:
    """The tiny ViT of the specification's checks, with weights far from where they begin."""
    torch.manual_seed(0)
    made = ViT(16, 4, classes=5, width=WIDTH, heads=HEADS, layers=LAYERS, **options)
    for each in made.parameters():
        nn.init.normal_(each, std=0.3)
    return made.to(dtype).eval()


def pictures(count: int = 3, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tuned(tokens: int = 2, dtype: torch.dtype = torch.float64, **options: Any) -> VisualQueryTuning:
    vit = options.pop("vit", None) or backbone(dtype)
    return VisualQueryTuning(vit, 6, tokens=tokens, **options).to(dtype)


def states(vit: ViT, x: Tensor) -> list[Tensor]:
    """What each block is given, and what the last gives."""
    found = [vit.embed(x)]
    for block in vit.blocks:
        found.append(block(found[-1]))
    return found


def concatenated(model: VisualQueryTuning, x: Tensor) -> Tensor:
    """The logits as the released code has them: queries before the sequence, one pass through the block, cut apart.

    All rows are queries of the block's attention, and only the last n are its keys and values.
    """
    h, blocks = model.backbone.embed(x), []
    for each, p in zip(model.backbone.blocks, model.queries, strict=True):
        block: Any = each
        prompts = getattr(block, "prompts", h.new_zeros(0, h.shape[-1]))  # seen by the tokens, not by the queries
        some = [each.expand(len(h), -1, -1) for each in (p, prompts)]
        normed = block.norm1(torch.cat([*some, h], 1))
        asked, seen = len(p), len(p) + len(prompts)
        attended = [block.attn(normed[:, :asked], normed[:, seen:]), block.attn(normed[:, asked:])]
        r = torch.cat([*some, h], 1) + torch.cat(attended, 1)
        out = r + block.mlp(block.norm2(r))
        blocks.append(out[:, :asked].flatten(1))
        h = out[:, seen:]
    found = [model.backbone.norm(h)[:, 0], *blocks]
    return model.head(torch.cat([F.normalize(each, dim=-1) for each in found], -1))


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


# ------------------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_features_of_the_backbone_are_bit_for_bit_its_own(tokens, dtype):
    """As they were before it was given to anything."""
    vit, x = backbone(dtype), pictures(dtype=dtype)
    untouched = copy.deepcopy(vit)
    model = tuned(tokens, dtype, vit=vit).train()
    seen: list[Any] = []
    handles = [
        block.register_forward_hook(lambda module, args, output: seen.append(output)) for block in model.backbone.blocks
    ]
    last, summaries = model.read(x)
    for handle in handles:
        handle.remove()
    plain = states(untouched, x)
    assert all(torch.equal(a, b) for a, b in zip(seen, plain[1:], strict=True))
    assert torch.equal(last, untouched.features(x)[:, 0])
    assert len(summaries) == (LAYERS if tokens else 0)


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_apart_is_the_same_as_together(dtype, bar):
    """Values and gradients are those of queries in front of the sequence."""
    model, x = tuned(3, dtype), pictures(dtype=dtype)
    target = torch.randn(3, 6, dtype=dtype)
    found, grads = [], []
    for way in (model, lambda x: concatenated(model, x)):
        model.zero_grad()
        out = way(x)
        ((out - target) ** 2).sum().backward()
        found.append(out.detach())
        grads.append([gradient(each) for each in (model.queries, model.head.weight, model.head.bias)])
    torch.testing.assert_close(found[0], found[1], atol=bar, rtol=bar)
    for a, b in zip(*grads, strict=True):
        assert bool(a.any())
        torch.testing.assert_close(a, b, atol=bar * float(b.abs().max()), rtol=bar)


def test_states_that_were_kept_stand_in_for_the_pictures():
    model, x = tuned(2), pictures()
    states = model.states(x)
    assert states.shape == (3, LAYERS + 1, TOKENS, WIDTH) and not states.requires_grad
    assert torch.equal(model.from_states(states), model(x))
    chosen = model.refit(torch.tensor([3, 50]))
    assert torch.equal(chosen.from_states(states), chosen(x))
    with pytest.raises(SizeError, match="stored states are out of date"):
        tuned(2, vit=with_lora(backbone()), detach_backbone=False).from_states(states)


@pytest.mark.parametrize("token", [0, 1, 16])
def test_a_query_that_is_a_token_reads_what_the_token_becomes(token):
    """With p = h[CLS] of one picture, what is read is the class token of the next layer."""
    vit, x = backbone(), pictures(1)
    every = states(vit, x)
    for block, before, after in zip(vit.blocks, every, every[1:], strict=False):
        read = summary(block, before[:, token : token + 1], before)
        torch.testing.assert_close(read[:, 0], after[:, token], atol=1e-10, rtol=0)


def test_query_tokens_know_nothing_of_each_other():
    model, x = tuned(3), pictures()
    last, read = model.read(x)
    for token in range(3):
        alone = tuned(1, vit=model.backbone)
        alone.queries.data.copy_(model.queries[:, token : token + 1])
        for a, b in zip(alone.read(x)[1], read, strict=True):
            torch.testing.assert_close(a[:, 0], b[:, token], atol=1e-12, rtol=0)
    order = torch.tensor([2, 0, 1])
    other = copy.deepcopy(model)
    other.queries.data.copy_(model.queries[:, order])
    for a, b in zip(other.read(x)[1], read, strict=True):
        torch.testing.assert_close(a, b[:, order], atol=1e-12, rtol=0)
    changed = copy.deepcopy(model)
    changed.queries.data[1] += 1.0
    moved, summaries = changed.read(x)
    assert torch.equal(moved, last)
    assert [torch.equal(a, b) for a, b in zip(summaries, read, strict=True)] == [True, False, True, True]
    for m in range(LAYERS):
        (of_queries,) = torch.autograd.grad(model.read(x)[1][m].sum(), model.queries)
        assert [bool(each.any()) for each in of_queries] == [m == layer for layer in range(LAYERS)]


def test_gradients_are_right():
    vit, h = backbone(), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    p = torch.randn(2, 2, WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: summary(vit.blocks[1], p, h), (p,))


# ------------------------------------------------------------------------------------------- what is learned


def test_nothing_but_the_queries_and_the_head_learns():
    model = tuned(2, torch.float32, dropout=0.1).train()
    before = {name: tensor.clone() for name, tensor in model.backbone.state_dict().items()}
    assert list(trained_parameters(model)) == ["queries", "head.weight", "head.bias"]
    optimizer = torch.optim.Adam(trained_parameters(model).values(), lr=0.1)
    first = model.queries.detach().clone()
    for step in range(10):
        F.cross_entropy(model(pictures(4, torch.float32, step)), torch.arange(4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.backbone.state_dict().items())
    assert all(each.grad is None for each in model.backbone.parameters())
    assert not torch.equal(first, model.queries)


def test_a_frozen_backbone_stays_in_evaluation_mode():
    vit = backbone(dropout=0.5)
    model = VisualQueryTuning(vit, 6, tokens=1).double().train()
    assert model.training and not any(each.training for each in vit.modules())
    vit.train()  # as another network that shares it might
    assert torch.equal(model(pictures()), model(pictures())) and not vit.training
    for pool in ("class", "mean"):
        shared = VisualQueryTuning(vit, 6, tokens=1, pool=pool).double().eval()
        kept, expected = shared.states(pictures()), shared(pictures())
        vit.train()
        assert torch.equal(shared.from_states(kept), expected)
    other = backbone(dropout=0.5)
    fine = Probe(other, 6, detach_backbone=False)
    assert not other.training, "its mode is the user's affair"
    assert all(each.training for each in fine.train().backbone.modules())


def test_dropout_is_each_pictures_own_and_for_training():
    """Numbers of the query tokens are dropped at the rate that was asked for, before they ask."""
    model, x = tuned(2, dropout=0.25).train(), pictures(1).expand(64, -1, -1, -1)
    torch.manual_seed(0)
    _, read = model.read(x)
    torch.manual_seed(0)
    masks = [F.dropout(torch.ones(64, 2, WIDTH, dtype=torch.float64), 0.25) for _ in range(LAYERS)]
    assert all(float((mask == 0).double().mean()) == pytest.approx(0.25, abs=0.03) for mask in masks)
    for block, p, mask, before, found in zip(
        model.backbone.blocks, model.queries, masks, states(model.backbone, x), read, strict=False
    ):
        torch.testing.assert_close(found, summary(block, p * mask, before), atol=1e-12, rtol=0)
        assert not torch.allclose(found[0], found[1])
    model.eval()
    features = model.features(x)
    torch.testing.assert_close(features[0], features[1], atol=1e-12, rtol=0)
    assert torch.equal(features, model.features(x))


# ------------------------------------------------------------------------------------------- what is kept


class Census:
    """The tensors that a forward pass keeps for the backward pass, parameters aside."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        known = {each.untyped_storage()._cdata for each in model.parameters()} | {x.untyped_storage()._cdata}
        self.kept: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage()._cdata not in known:
                self.kept[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            self.output = model(x)

    @property
    def numbers(self) -> int:
        return sum(t.untyped_storage().nbytes() // t.element_size() for t in self.kept.values())

    def of_tokens(self, n: int) -> list[tuple[int, ...]]:
        """The shapes that have a row for each token of the pictures."""
        return [tuple(each.shape) for each in self.kept.values() if n in each.shape]


def test_no_graph_of_the_backbone_is_kept():
    """Of what has a row for each token there are keys and values alone; together, and with prompts, not so."""
    b, t = 3, 2
    model, x = tuned(t), pictures(b)
    apart = Census(model, x)
    rows = apart.of_tokens(TOKENS)
    assert len(rows) == 2 * LAYERS and all(math.prod(shape) == b * TOKENS * WIDTH for shape in rows)
    assert not any(shape.count(TOKENS) > 1 or 4 * WIDTH in shape for shape in rows)
    none = Census(Rows(model), x)  # the same query tokens over the keys and values of one token
    assert apart.numbers - none.numbers == LAYERS * 2 * b * (TOKENS - 1) * WIDTH
    together = Census(Concatenated(model), x)
    prompted = Census(Probe(with_prompts(model.backbone, t), 6, detach_backbone=False).double(), x)
    for other in (together, prompted):
        many = [each.shape for each in other.kept.values() if each.numel() >= b * TOKENS * 4 * WIDTH]
        assert any(shape[-1] == 4 * WIDTH for shape in many)
        assert other.numbers / apart.numbers > 2


@pytest.mark.parametrize(("tokens", "least"), [(1, 6.0), (10, 5.0)])
def test_what_is_kept_at_the_shape_of_a_base_model(tokens, least):
    """Some six times less than queries and tokens together, at 197 tokens of width 768."""
    with torch.device("meta"):
        vit = ViT(224, 16, classes=2, width=768, heads=12, layers=3)
        model, x = VisualQueryTuning(vit, 100, tokens=tokens), torch.empty(2, 3, 224, 224)
        apart, together = Census(model, x), Census(Concatenated(model), x)
    assert together.numbers / apart.numbers > least


class Rows(nn.Module):
    """Query tokens over the first token of each layer alone."""

    def __init__(self, model: VisualQueryTuning) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model.from_states(self.model.states(x)[:, :, :1])


class Concatenated(nn.Module):
    """The released way, as a module."""

    def __init__(self, model: VisualQueryTuning) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return concatenated(self.model, x)


def test_the_backward_pass_does_not_enter_the_backbone():
    x = pictures()
    learning = VisualQueryTuning(with_lora(backbone()), 6, detach_backbone=False).double()
    for model, entered in ((tuned(2), False), (learning, True)):
        seen: list[Any] = []
        back: list[Any] = []
        for block in model.backbone.blocks:
            block.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
            block.register_full_backward_hook(lambda module, before, after, back=back: back.append(module))
        x = x.detach().requires_grad_(entered)  # or torch warns of a module whose inputs have no gradient
        model(x).sum().backward()
        assert len(seen) == LAYERS and all(each.requires_grad == entered for each in seen)
        assert bool(back) == entered


# ------------------------------------------------------------------------------------------- features and head


def test_blocks_of_features_have_length_one():
    model = tuned(3)
    features = model.features(pictures())
    assert features.shape == (3, WIDTH * (1 + LAYERS * 3)) and features.shape[1] == model.head.in_features
    torch.testing.assert_close(features.norm(dim=1), torch.full((3,), math.sqrt(LAYERS + 1)).double())
    sizes = [WIDTH] + LAYERS * [3 * WIDTH]
    for block in features.split(sizes, 1):
        torch.testing.assert_close(block.norm(dim=1), torch.ones(3).double())
    none = tuned(0)
    probe = Probe(none.backbone, 6, normalise=True).double()
    probe.head.load_state_dict(none.head.state_dict())
    assert torch.equal(none(pictures()), probe(pictures()))


def test_ways_to_combine_agree_where_they_must():
    mean, weighted = tuned(3, combine="mean"), tuned(3, combine="weighted")
    weighted.queries.data.copy_(mean.queries)
    assert mean.head.in_features == WIDTH * (1 + LAYERS) and weighted.weights is not None
    torch.testing.assert_close(mean.features(pictures()), weighted.features(pictures()))
    assert "weights" in trained_parameters(weighted) and bool((weighted.weights == 1).all())
    nn.init.normal_(weighted.weights)
    _, read = weighted.read(pictures())
    blocks = weighted.features(pictures()).split(WIDTH, 1)[1:]
    for z, weights, block in zip(read, weighted.weights, blocks, strict=True):
        expected = sum(weight * each for weight, each in zip(weights, z.unbind(1), strict=True))
        assert isinstance(expected, Tensor)
        torch.testing.assert_close(block, F.normalize(expected, dim=-1))
    one, pooled = tuned(1), tuned(1, combine="mean")
    pooled.queries.data.copy_(one.queries)
    torch.testing.assert_close(one.features(pictures()), pooled.features(pictures()))


SHAPES = [  # D, layers, patch, and (query parameters, features) for 1, 10 and 20 tokens
    (768, 12, 16, [(9_216, 9_984), (92_160, 92_928), (184_320, 185_088)]),
    (1024, 24, 16, [(24_576, 25_600), (245_760, 246_784), (491_520, 492_544)]),
    (1280, 32, 14, [(40_960, 42_240), (409_600, 410_880), (819_200, 820_480)]),
]


@pytest.mark.parametrize(("width", "layers", "patch", "counts"), SHAPES)
def test_parameters_are_as_many_as_they_should_be(width, layers, patch, counts):
    with torch.device("meta"):
        vit = ViT(224, patch, classes=10, width=width, heads=16, layers=layers)
        for tokens, (queries, features) in zip((1, 10, 20), counts, strict=True):
            model = VisualQueryTuning(vit, 100, tokens=tokens)
            trained = trained_parameters(model)
            assert trained["queries"].numel() == queries
            assert sum(each.numel() for each in trained.values()) == queries + 100 * (features + 1)


def test_queries_and_head_begin_as_they_should():
    vit = ViT(32, 16, classes=10, width=768, heads=12, layers=2)
    model = VisualQueryTuning(vit, 10, tokens=20)
    low, high = (float(each) for each in model.queries.detach().aminmax())
    assert -0.0625 <= low < -0.062 and 0.062 < high <= 0.0625
    torch.testing.assert_close(model.head.bias, torch.full((10,), -4.59512))
    assert float(model.head.weight.detach().std()) == pytest.approx(math.sqrt(2 / 10), rel=0.02)


def test_the_mean_of_the_patches_stands_in_for_the_class_token():
    model, x = tuned(1, pool="mean"), pictures()
    last = states(model.backbone, x)[-1]
    expected = F.layer_norm(last[:, 1:].mean(1), (WIDTH,), eps=1e-6)
    torch.testing.assert_close(model.read(x)[0], expected)


# ------------------------------------------------------------------------------------------- with others


@pytest.mark.parametrize("adapt", [with_lora, with_prompts])
def test_adapters_in_the_backbone_learn_beside_the_queries(adapt):
    """Their gradients are those of queries and tokens run together."""
    vit = adapt(backbone())
    for each in vit.parameters():
        if each.requires_grad:
            nn.init.normal_(each, std=0.3)
    model, x, target = tuned(2, vit=vit, detach_backbone=False), pictures(), torch.randn(3, 6).double()
    trained = trained_parameters(model)
    assert {name.rpartition(".")[2] for name in trained if name.startswith("backbone")} <= {"weight", "prompts"}
    F.mse_loss(model(x), target).backward()
    grads = {name: gradient(each) for name, each in trained.items()}
    assert all(bool(each.any()) for each in grads.values())
    model.zero_grad()
    F.mse_loss(concatenated(model, x), target).backward()
    for name, each in trained.items():
        torch.testing.assert_close(each.grad, grads[name], atol=1e-10, rtol=1e-8, msg=name)
    with pytest.raises(SizeError, match="this backbone has trainable adapters: pass detach_backbone=False"):
        tuned(2, vit=copy.deepcopy(vit))
    frozen = tuned(2, vit=copy.deepcopy(vit).requires_grad_(False))
    F.mse_loss(frozen(x), target).backward()
    assert all(each.grad is None for each in frozen.backbone.parameters())


def test_new_adapters_change_nothing_yet():
    vit, x = backbone(), pictures()
    torch.testing.assert_close(with_lora(vit).features(x), vit.features(x))
    lora = with_lora(vit, 3)
    assert sum(p.numel() for p in lora.parameters() if p.requires_grad) == LAYERS * 2 * 2 * 3 * WIDTH
    assert all(each.requires_grad for each in vit.parameters()), "the model itself is not touched"


def test_prompts_are_seen_by_all_tokens():
    vit, x = backbone(), pictures()
    prompted = with_prompts(vit, 2)
    assert prompted.features(x).shape == vit.features(x).shape
    assert not torch.allclose(prompted.features(x), vit.features(x))
    block: Any = prompted.blocks[0]
    h = vit.embed(x)
    rows = torch.cat([h[:, :1], block.prompts.expand(3, -1, -1), h[:, 1:]], 1)
    out = vit.blocks[0](rows)
    torch.testing.assert_close(block(h), torch.cat([out[:, :1], out[:, 3:]], 1))


PLACED = ("sparse", "conv", "mdha", "relative")
"""Attentions whose queries have a place."""


@pytest.mark.parametrize("attention", [name for name in ATTENTIONS if not name.startswith(PLACED)])
def test_query_tokens_are_free_under_every_attention_that_is_taken(attention):
    """A query that is a token reads what the token becomes, and queries do not see each other."""
    vit, x = backbone(attention=attention), pictures(1)
    model, every = tuned(3, vit=vit), states(vit, x)
    read = summary(vit.blocks[1], every[1][:, 3:6], every[1])
    torch.testing.assert_close(read, every[2][:, 3:6], atol=1e-10, rtol=0)
    one = summary(vit.blocks[1], every[1][:, 4:5], every[1])
    torch.testing.assert_close(one, read[:, 1:2], atol=1e-10, rtol=0)
    model(x).sum().backward()
    assert bool(gradient(model.queries).any())


@pytest.mark.parametrize("attention", [name for name in ATTENTIONS if name.startswith(PLACED)])
def test_attentions_whose_queries_have_a_place_are_refused(attention):
    vit = backbone(attention=attention)
    with pytest.raises(SizeError, match="depend on their position"):
        tuned(2, vit=vit)
    assert all(each.requires_grad for each in vit.parameters()), "what is refused is left as it was"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_new_is_of_the_backbones_kind(dtype):
    vit, x = backbone(dtype), pictures(dtype=dtype)
    for model in (VisualQueryTuning(vit, 6, combine="weighted"), Probe(vit, 6), IntermediateProbe(vit, 6)):
        assert {each.dtype for each in model.parameters()} == {dtype} and model(x).dtype == dtype
        assert model.refit()(x).dtype == dtype
    with torch.device("meta"):
        far = ViT(16, 4, classes=5, width=WIDTH, heads=HEADS, layers=2)
    assert VisualQueryTuning(far, 6).queries.device.type == "meta"


def test_a_backbone_that_is_frozen_already_is_not_fine_tuned_in_silence():
    vit = backbone()
    VisualQueryTuning(vit, 6)
    with pytest.raises(SizeError, match="all of this backbone is frozen"):
        Probe(vit, 6, detach_backbone=False)


def test_a_backbone_that_another_network_froze_or_set_free_is_not_used_in_silence():
    vit, x = backbone(), pictures()
    fine = Probe(vit, 6, detach_backbone=False).double().train()
    fine(x)
    other = VisualQueryTuning(vit, 6).double().train()
    other(x)
    with pytest.raises(
        SizeError, match=r"the backbone of this Probe was trainable at first, but now it is frozen: .*deepcopy"
    ):
        fine(x)
    fine.eval()(x)
    kept = other.states(x)
    vit.requires_grad_(True)
    for run in (lambda: other(x), lambda: other.from_states(kept)):
        with pytest.raises(SizeError, match="this VisualQueryTuning was frozen at first, but now it is trainable"):
            run()


def test_backbones_that_queries_would_change_are_refused():
    """A query that asks is no pass of training, and noise in evaluation is no feature."""
    learning = backbone(attention="dgqa", groups=2).requires_grad_(True)
    with pytest.raises(SizeError, match=r"query tokens would count as passes of this 'dgqa'.*detach_backbone=True"):
        tuned(2, vit=learning, detach_backbone=False)
    assert tuned(2, vit=learning)(pictures()).isfinite().all()
    with pytest.raises(SizeError, match="query tokens would count as passes"):
        tuned(2, vit=backbone(attention="dgqa", groups=2, mode="reference"))
    noisy: list[dict[str, Any]] = [{"mode": "reference"}, {"train_only": False}]
    for options in noisy:
        with pytest.raises(SizeError, match=r"'pgqa' has noise in evaluation too.*train_only=True"):
            tuned(2, vit=backbone(attention="pgqa", groups=2, **options))
    tuned(2, vit=backbone(attention="pgqa", groups=2, train_only=False, scale=0.0))


@pytest.mark.parametrize("wrong", [nn.Sequential(nn.Linear(2, 2)), None, "vit"])
def test_what_is_no_vit_is_named(wrong):
    for make in (
        lambda: VisualQueryTuning(wrong, 4),
        lambda: Probe(wrong, 4),
        lambda: IntermediateProbe(wrong, 4),
        lambda: with_prompts(wrong),
    ):
        with unchecked(), pytest.raises(SizeError, match=rf"the backbone is a {type(wrong).__name__}, but must be a"):
            make()
    with pytest.raises(SizeError, match=r"images of \(3, 16, 16\) for a model of \(batch, 3, 16, 16\)"), unchecked():
        backbone()(pictures()[0])


def test_a_probe_keeps_the_class_token_alone():
    x = pictures()
    assert Census(Probe(backbone(), 6), x).numbers == 3 * WIDTH


def test_what_is_refused_leaves_the_backbone_as_it_was():
    vit = backbone().train()
    for options in ({"classes": 0}, {"dropout": 1.0}, {"tokens": -1}):
        with pytest.raises(SizeError):
            VisualQueryTuning(vit, **{"classes": 3, **options})
        assert vit.training and all(each.requires_grad for each in vit.parameters())


def test_adapters_may_stand_beside_each_other():
    for vit in (with_lora(with_prompts(backbone(), 2), 2), with_prompts(with_lora(backbone(), 2), 2)):
        names = {name.rpartition(".")[2] for name, each in vit.named_parameters() if each.requires_grad}
        parts = {name.split(".")[-2] for name, each in vit.named_parameters() if each.requires_grad}
        assert names == {"weight", "prompts"} and {"down", "up"} <= parts
    with pytest.raises(SizeError, match="activations need plain transformer blocks"):
        IntermediateProbe(with_prompts(backbone()).requires_grad_(False), 6)


def test_what_does_not_fit_is_refused():
    with pytest.raises(SizeError, match="tokens=-1 must be a whole number"):
        tuned(-1)
    with pytest.raises(SizeError, match="combine='sum' is not known"), unchecked():
        tuned(1, combine="sum")
    with pytest.raises(SizeError, match="pool='max' is not known"), unchecked():
        tuned(1, pool="max")
    with pytest.raises(SizeError, match=r"dropout=1.0 must lie in"):
        tuned(1, dropout=1.0)
    with pytest.raises(SizeError, match="nothing in this ViT is trained"):
        trained_parameters(backbone().requires_grad_(False))


def test_a_change_of_low_rank_is_that_of_peft():
    """The same change in the same places, in a real peer's classes."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["query", "value"], init_lora_weights=False)
    theirs = peft.inject_adapter_in_model(config, backbone()).double()
    ours, x = with_lora(backbone(), 3, alpha=6.0), pictures()
    for block, other in zip(ours.blocks, theirs.blocks, strict=True):
        for name in ("query", "value"):
            mine, adapted = (each.get_submodule(f"attn.{name}") for each in (block, other))
            mine.get_submodule("down").load_state_dict(adapted.get_submodule("lora_A.default").state_dict())
            mine.get_submodule("up").load_state_dict(adapted.get_submodule("lora_B.default").state_dict())
    torch.testing.assert_close(ours.features(x), theirs.features(x), atol=1e-10, rtol=0)
    assert not torch.allclose(ours.features(x), backbone().features(x))
