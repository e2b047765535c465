"""Models with another attention: the weights of before, pooled where they are fewer, and those of timm by its names."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualform.attention import ATTENTIONS, GroupedQueryAttention, Heads, build
from dualform.errors import SizeError, UnknownLayer
from dualform.models import MLP, SegmentLM, SeriesClassifier, TextClassifier, TransformerLM, ViT, as_timm, convert
from dualform.models.block import TransformerBlock

GROUPED = ["gqa", "kdgqa", "dgqa", "pgqa"]


def vit(name: str = "softmax", **options: Any) -> ViT:
    torch.manual_seed(0)
    model = ViT(12, 4, channels=2, classes=3, width=24, heads=6, layers=2, ratio=1.5, attention=name, **options)
    for each in model.modules():
        if isinstance(each, nn.LayerNorm):
            nn.init.normal_(each.weight, 1.0, 0.1)
            nn.init.normal_(each.bias, 0.0, 0.1)
    return model.double().eval()


def pictures(count: int = 4) -> Tensor:
    return torch.randn(count, 2, 12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("name", ["gqa", "dgqa", "pgqa"])
def test_as_many_groups_as_heads_give_the_same_logits(name):
    """Weights bit for bit."""
    model, x = vit(), pictures()
    made = convert(model, name, groups=6)
    torch.testing.assert_close(made(x), model(x), atol=1e-10, rtol=0)
    state = made.state_dict()
    assert all(torch.equal(each, state[key]) for key, each in model.state_dict().items())


@pytest.mark.parametrize("name", GROUPED)
def test_everything_but_keys_and_values_is_copied(name):
    model = vit()
    before = {key: each.clone() for key, each in model.state_dict().items()}
    made = convert(model, name, groups=2)
    for key, each in made.state_dict().items():
        if ".attn.key." in key or ".attn.value." in key:
            assert torch.equal(each, before[key].unflatten(0, (2, 3, 4)).mean(1).flatten(0, 1))
        elif key in before:
            assert torch.equal(each, before[key])
    assert all(torch.equal(each, before[key]) for key, each in model.state_dict().items())  # the model itself stays
    assert type(made) is ViT and not made.training and made.head.weight.data_ptr() != model.head.weight.data_ptr()


def test_dropout_stays_as_it_was():
    model = vit()
    for layer in (each for each in model.modules() if isinstance(each, Heads)):
        layer.dropout = 0.3
    for name in ("gqa", "softmax"):
        assert [each.dropout for each in convert(model, name).modules() if isinstance(each, Heads)] == [0.3, 0.3]


def test_a_state_dict_with_fewer_groups_is_repeated():
    """Which is the same function."""
    model, x = vit("gqa", groups=2), pictures()
    more = vit("gqa", groups=6)
    more.load_state_dict(model.state_dict())
    torch.testing.assert_close(more(x), model(x), atol=1e-10, rtol=0)


def test_the_final_norm_may_be_left_as_new():
    """Trap 4: the released code does not copy it."""
    made = convert(vit(), "gqa", final_norm=False)
    assert bool((made.norm.weight == 1).all()) and not made.norm.bias.any()
    assert not bool((convert(vit(), "gqa").norm.weight == 1).all())
    with pytest.raises(SizeError, match="no last LayerNorm"):
        convert(nn.Sequential(vit()), "gqa", final_norm=False)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_attention_can_stand_in(name):
    """Told of the class token and of order, as the model would have told it; precision, mode, dropout and bias stay."""
    x = pictures()
    made = convert(vit().float().train(), name, dropout=0.2)
    layer = made.get_submodule("blocks.1.attn")
    assert isinstance(layer, Heads) and layer.training and layer.dropout == 0.2 and made(x.float()).shape == (4, 3)
    assert made(x.float()).dtype == torch.float32
    other = vit(name, **({"qk_bias": True} if name.startswith("relative") else {}))
    shapes = {key: each.shape for key, each in other.state_dict().items()}
    assert {key: each.shape for key, each in made.state_dict().items()} == shapes
    if name not in ("kdgqa",) and not name.startswith("conv2d"):
        lm = TransformerLM(7, 12, width=12, heads=6, layers=1)
        assert convert(lm, name)(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 7)


def test_other_models_are_converted_too_and_back():
    torch.manual_seed(0)
    for model, given in (
        (SeriesClassifier(3, 16, 3, width=12, heads=6, bias=False), torch.randn(2, 16, 3)),
        (TextClassifier(11, 20, 3, width=12, heads=6), torch.randint(11, (2, 16))),
    ):
        model = model.eval()
        grouped = convert(model, "gqa", groups=3)
        assert ("blocks.0.attn.out.bias" in grouped.state_dict()) == isinstance(model, TextClassifier)
        back = convert(grouped, "softmax")
        torch.testing.assert_close(back(given), grouped(given))
        assert (grouped(given) - model(given)).abs().max() > 1e-5


def test_an_allocation_that_is_held_is_converted_too():
    """To the same number of groups as it is, to a head for each query head written out."""
    model, x = vit("dgqa", groups=3), pictures()
    for block in model.blocks:
        block.get_submodule("attn").get_buffer("allocation").copy_(torch.tensor([4, 0, 2]))
    for name, groups in (("dgqa", 3), ("gqa", 6), ("dgqa", 6)):
        torch.testing.assert_close(convert(model, name, groups=groups)(x), model(x))
    torch.testing.assert_close(convert(model, "dgqa")(x), model(x))
    torch.testing.assert_close(convert(model, "softmax")(x), model(x))


def test_what_is_frozen_stays_frozen():
    """A parameter that is still there as it was; others as the layer was."""
    model = vit()
    model.get_submodule("blocks.0").requires_grad_(False)
    model.get_submodule("blocks.1.attn.query").requires_grad_(False)
    for name in ("gqa", "mdha", "sh"):
        made = convert(model, name)
        assert not any(each.requires_grad for each in made.get_submodule("blocks.0").parameters())
        assert not any(each.requires_grad for each in made.get_submodule("blocks.1.attn.query").parameters())
        others = {
            key: each.requires_grad
            for key, each in made.get_submodule("blocks.1").named_parameters()
            if not key.startswith("attn.query.")
        }
        assert all(others.values()) and len(others) > 10, name


def test_a_layer_with_two_names_becomes_one_with_two_names():
    model, x = vit(), pictures()
    one, two = model.blocks[0], model.blocks[1]
    assert isinstance(one, TransformerBlock) and isinstance(two, TransformerBlock)
    two.attn = one.attn
    made = convert(model, "gqa", groups=6)
    assert made.get_submodule("blocks.0.attn") is made.get_submodule("blocks.1.attn")
    assert type(made.get_submodule("blocks.1.attn")) is GroupedQueryAttention
    torch.testing.assert_close(made(x), model(x))


def test_what_a_language_model_asks_of_its_attention_is_said():
    """A memory is for attentions that take segments, and without positions relative ones alone know the order."""
    text = torch.randint(9, (2, 6))

    def lm(name: str, memory: int = 4, **options: Any) -> SegmentLM:
        torch.manual_seed(0)
        return SegmentLM(9, width=12, heads=6, layers=1, hidden=12, attention=name, memory=memory, **options)

    for name in ("bn", "conv1d"):
        with pytest.raises(
            SizeError, match=rf"'{name}' does not use a memory, but this SegmentLM has one of 4\. Use one"
        ):
            convert(lm("softmax"), name)
    for memory in (0, 4):
        with pytest.raises(SizeError, match=r"'kdgqa' cannot be causal.*Use one of \['softmax'"):
            convert(lm("softmax", memory=memory), "kdgqa")
    for name in ("softmax", "mdha", "gqa"):
        with pytest.raises(SizeError, match=rf"no positions except those of its relative attention.*'{name}' has none"):
            convert(lm("relative"), name)
    assert convert(lm("relative"), "relative-conv")(text)[0].shape == (2, 6, 9)
    assert convert(lm("softmax", positions=None), "gqa")(text)[0].shape == (2, 6, 9)
    for name in ("bn", "conv1d"):
        assert convert(lm("softmax", memory=0), name)(text)[0].shape == (2, 6, 9)
    assert convert(lm("softmax"), "relative")(text)[0].shape == (2, 6, 9)


def test_what_has_no_attention_is_refused():
    with pytest.raises(SizeError, match=r"this SoftmaxAttention is an attention layer, not a model.*build\('gqa'"):
        convert(build("softmax", 12, 4), "gqa")
    with pytest.raises(SizeError, match="this MLP has no attention layer"):
        convert(MLP(4, 3, 2), "gqa")
    with pytest.raises(UnknownLayer, match="'gqa' has no option 'group'"):
        convert(vit(), "gqa", group=2)


# ---------------------------------------------------------------- timm


def timm_names(model: ViT) -> dict[str, Tensor]:
    """The weights of a ViT of ours as timm would save them, by hand."""
    state, found = model.state_dict(), {}
    for key, each in state.items():
        if ".attn." not in key:
            found[key] = each
    for i in range(len(model.blocks)):
        at = f"blocks.{i}.attn"
        for kind in ("weight", "bias"):
            found[f"{at}.qkv.{kind}"] = torch.cat([state[f"{at}.{part}.{kind}"] for part in ("query", "key", "value")])
            found[f"{at}.proj.{kind}"] = state[f"{at}.out.{kind}"]
    return found


@pytest.mark.parametrize("name", ["softmax", "bn", "sh", "linear", "sparse", *GROUPED])
def test_a_checkpoint_with_the_names_of_timm_loads_as_it_is(name):
    model, made = vit(), vit(name)
    with torch.no_grad():
        for each in made.parameters():
            each.add_(0.1)
    made.load_state_dict(timm_names(model))
    expected = convert(model, name)
    for key, each in expected.state_dict().items():
        assert torch.equal(each, made.state_dict()[key]), key
    torch.testing.assert_close(made(pictures()), expected(pictures()))


def test_a_vit_of_ours_has_the_names_of_timm_on_request():
    model = vit()
    named = as_timm(model)
    assert named.keys() == timm_names(model).keys()
    assert all(torch.equal(named[key], each) for key, each in timm_names(model).items())
    again = vit()
    again.load_state_dict(named)
    torch.testing.assert_close(again(pictures()), model(pictures()))
    with pytest.raises(SizeError, match=r"'blocks\.0\.attn' is a GroupedQueryAttention, but timm only has softmax"):
        as_timm(vit("gqa"))


@pytest.mark.parametrize("name", ["conv2d", "mdha", "relative", "relative-conv"])
def test_what_timm_does_not_have_is_missing_in_its_checkpoints(name):
    """Convolutions and distances; without ``strict`` they stay as they are."""
    made = vit(name)
    bare = {key: each for key, each in as_timm(vit()).items() if not key.endswith("qkv.bias")}
    with pytest.raises(RuntimeError, match=r"Missing key"):
        made.load_state_dict(bare)
    found = made.load_state_dict(bare, strict=False)
    assert not found.unexpected_keys and all("conv" in key or ".kernel." in key for key in found.missing_keys)


def test_timm_itself_gives_the_same_logits():
    timm = pytest.importorskip("timm", reason="timm needs torchvision, which may not be there", exc_type=ImportError)
    torch.manual_seed(0)
    theirs = timm.models.vision_transformer.VisionTransformer(
        img_size=12, patch_size=4, in_chans=2, num_classes=3, embed_dim=24, depth=2, num_heads=6, mlp_ratio=1.5
    )
    theirs, ours = theirs.double().eval(), vit()
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(pictures()), theirs(pictures()))
    theirs.load_state_dict(as_timm(vit()))
    torch.testing.assert_close(theirs(pictures()), vit()(pictures()))


# ---------------------------------------------------------------- Hugging Face


OLD = [
    ("vit.layers.", "vit.encoder.layer."), (".attention.q_proj.", ".attention.attention.query."),
    (".attention.k_proj.", ".attention.attention.key."), (".attention.v_proj.", ".attention.attention.value."),
    (".attention.o_proj.", ".attention.output.dense."), (".mlp.fc1.", ".intermediate.dense."),
    (".mlp.fc2.", ".output.dense."),
]  # fmt: skip
"""What files of the hub call what the present classes call otherwise."""


@pytest.mark.parametrize("names", ["classes", "hub", "bare"])
def test_hugging_faces_vit_gives_the_same_logits(names):
    """By the names of its classes, of files of its hub, and of a backbone without a classifier."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=6, intermediate_size=36, image_size=12, patch_size=4,
        num_channels=2, num_labels=3,
    )  # fmt: skip
    theirs = transformers.ViTForImageClassification(config).double().eval()
    for each in theirs.parameters():
        nn.init.normal_(each, std=0.2)
    ours = vit(norm_eps=config.layer_norm_eps)
    state = dict(theirs.state_dict())
    if names == "hub":
        for new, old in OLD:
            state = {name.replace(new, old): each for name, each in state.items()}
        assert "vit.encoder.layer.1.attention.attention.query.weight" in state
    if names == "bare":
        bare = {name.removeprefix("vit."): each for name, each in state.items() if not name.startswith("classifier")}
        found = ours.load_state_dict(bare | {"pooler.dense.weight": torch.zeros(24, 24)}, strict=False)
        assert found.missing_keys == ["head.weight", "head.bias"] and not found.unexpected_keys
        expected = theirs.vit(pictures()).last_hidden_state
        torch.testing.assert_close(ours.features(pictures()), expected, atol=1e-10, rtol=0)
        return
    ours.load_state_dict(state)
    torch.testing.assert_close(ours(pictures()), theirs(pictures()).logits, atol=1e-10, rtol=0)
    grouped = vit("gqa", groups=2, norm_eps=config.layer_norm_eps)
    grouped.load_state_dict(state)
    torch.testing.assert_close(grouped(pictures()), convert(ours, "gqa", groups=2)(pictures()), atol=1e-10, rtol=0)


def test_parts_that_are_not_known_are_not_dropped():
    state = {"embeddings.cls_token": torch.zeros(1, 1, 24), "encoder.layer.0.adapter.weight": torch.zeros(2)}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*encoder\.layer\.0\.adapter\.weight"):
        vit().load_state_dict(state)


# ---------------------------------------------------------------- learning


def synthetic(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Four classes of 32 × 32 pictures: stripes across, stripes down, a bright spot, a ring; moved about, in noise."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=random)
    grid = torch.arange(32.0)
    shift = 8 * torch.rand(count, 2, 1, 1, generator=random)
    down, across = torch.broadcast_tensors(grid[:, None] + shift[:, 0], grid[None, :] + shift[:, 1])
    far = ((down - 20).square() + (across - 20).square()).sqrt()
    kinds = torch.stack(
        [(down / 1.3).sin(), (across / 1.3).sin(), 2 * (-far / 4).exp(), 2 * (-(far - 8).abs() / 2).exp()], 1
    )
    images = kinds[torch.arange(count), labels]
    return (images + 0.7 * torch.randn(images.shape, generator=random)).unsqueeze(1), labels


def train(model: ViT, x: Tensor, y: Tensor, epochs: int, lr: float, seed: int) -> ViT:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    random = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(epochs):
        for index in torch.randperm(len(y), generator=random).split(32):
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def right(model: ViT, x: Tensor, y: Tensor) -> float:
    return float((model(x).argmax(1) == y).double().mean())


VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {}, "kdgqa": {}, "dgqa": {"window": 10}, "pgqa": {}, "kdgqa reference": {"mode": "reference"},
    "dgqa diff": {"kind": "diff", "window": 10}, "dgqa reference": {"mode": "reference", "window": 10},
    "pgqa reference": {"mode": "reference"},
}  # fmt: skip


@pytest.mark.slow
def test_what_conversion_takes_away_a_little_training_gives_back(capsys):
    """Width 64, 8 heads, depth 2, 8 × 8 patches, to 4 groups; three networks; no order is required."""
    x, y = synthetic(1200, seed=0)
    test_x, test_y = synthetic(600, seed=1)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    for seed in range(3):
        torch.manual_seed(seed)
        whole = train(ViT(32, 8, channels=1, classes=4, width=64, heads=8, layers=2, ratio=2.0), x, y, 4, 1e-3, seed)
        assert right(whole, test_x, test_y) > 0.9
        for name, options in VARIANTS.items():
            made = convert(whole, name.split()[0], groups=4, **options)
            before = right(made, test_x, test_y)
            assert before < right(whole, test_x, test_y)
            found[name].append((before, right(train(made, x, y, 2, 5e-4, seed), test_x, test_y)))
    with capsys.disabled():
        for name, runs in found.items():
            before, after = torch.tensor(runs).T
            print(
                f"\n{name}: {before.mean():.3f} ± {before.std():.3f} to {after.mean():.3f} ± {after.std():.3f}", end=""
            )
    for name, runs in found.items():
        if name != "pgqa reference":
            assert min(after for _, after in runs) > 0.85, name
