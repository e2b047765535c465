"""Which features a head needs, and the schedule of tuning."""

import math

import pytest
import torch
from helpers import unchecked
from torch import nn
from torch.nn import functional as F

from dualform.attention import load_from
from dualform.errors import LayerNotFound, SizeError
from dualform.models import ViT, convert
from dualform.svm import look
from dualform.tuning import (
    IntermediateProbe,
    Probe,
    VisualQueryTuning,
    feature_scores,
    group_lasso,
    scaled_rate,
    select,
    trained_parameters,
    warmup_cosine,
    with_lora,
)  # fmt: skip


def test_the_schedule_warms_up_and_falls_as_a_cosine():
    found = [warmup_cosine(epoch) for epoch in (0, 5, 10, 55, 99)]
    assert found == pytest.approx([0, 0.5, 1, 0.5, 3.05e-4], abs=1e-6)
    assert scaled_rate(1.0, 128) == 0.5 and warmup_cosine(38, 20, 2) == 0


def test_the_group_lasso_and_its_gradient():
    weight = torch.randn(4, 7, dtype=torch.float64)
    weight[:, 2] = 0
    weight.requires_grad_()
    assert float(group_lasso(weight).detach()) == pytest.approx(sum(float(c.norm()) for c in weight.detach().T))
    (gradient,) = torch.autograd.grad(group_lasso(weight), weight)
    expected = weight.detach() / weight.detach().norm(dim=0).clamp(min=1e-300)
    torch.testing.assert_close(gradient, expected)
    assert not gradient[:, 2].any() and gradient.isfinite().all()
    others = weight.detach()[:, [0, 1, 3, 4, 5, 6]].requires_grad_()
    assert torch.autograd.gradcheck(group_lasso, (others,))


def test_so_many_features_are_kept_as_were_asked_for():
    """⌊κF⌋, the largest columns, in their own order."""
    weight = torch.randn(3, 9984)
    kept = select(weight, 0.7)
    assert len(kept) == 6988 and bool((kept.diff() > 0).all())
    scores = feature_scores(weight)
    others = torch.ones(9984, dtype=torch.bool)
    others[kept] = False
    assert scores[kept].min() >= scores[others].max()
    assert select(weight, 1.0).tolist() == list(range(9984))
    assert len(select(torch.ones(2, 10), 0.7)) == 7
    for keep in (0.0, 1.1, -0.5, 1e-9, math.nan):
        with pytest.raises(SizeError, match=f"keep={keep}"):
            select(weight, keep)
    with pytest.raises(SizeError, match="hold NaN or infinity"):
        select(torch.full((2, 4), math.nan), 0.5)


def test_the_lasso_finds_the_features_that_carry_the_signal():
    """Of 500 features 20 say what the class is; they are found among the 40 largest."""
    torch.manual_seed(0)
    x, carrying = torch.randn(1500, 500), torch.randperm(500)[:20]
    y = (x[:, carrying] @ torch.randn(20, 4)).argmax(1)
    others = torch.ones(500, dtype=torch.bool)
    others[carrying] = False
    share = {}
    for weight in (0.0, 5e-3):
        torch.manual_seed(1)
        head = nn.Linear(500, 4)
        optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
        for _ in range(150):
            optimizer.zero_grad()
            (F.cross_entropy(head(x), y) + weight * group_lasso(head.weight)).backward()
            optimizer.step()
        scores = feature_scores(head.weight.detach())
        share[weight] = float(scores[others].mean() / scores[carrying].mean())
    found = set(select(head.weight, 0.08).tolist())
    assert len(found) == 40 and len(found & set(carrying.tolist())) >= 18
    assert share[5e-3] < share[0.0] / 4  # the lasso is what empties the others


def fitted(model: Probe, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer = torch.optim.Adam(trained_parameters(model).values(), lr=0.05)
    for _ in range(60):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return float((model(x).argmax(1) == y).double().mean())


def test_all_features_selected_are_all_features():
    """Κ = 1 gives the accuracy of the first stage, within noise."""
    x, model = torch.randn(120, 3, 16, 16), Probe(some_vit(), 3)
    y = model.backbone(x).argmax(1)  # what its own head says can be said
    first = fitted(model, x, y)
    again = fitted(model.refit(select(model.head.weight, 1.0)), x, y)
    assert abs(first - again) < 0.05 and first > 0.9


def some_vit() -> ViT:
    torch.manual_seed(0)
    return ViT(16, 8, classes=3, width=16, heads=2, layers=2)


def test_a_new_head_sees_the_selected_features_alone():
    model, x = VisualQueryTuning(some_vit(), 4, tokens=2, combine="weighted"), torch.randn(3, 3, 16, 16)
    chosen = torch.tensor([1, 5, 40])
    made = model.refit(chosen)
    assert list(trained_parameters(made)) == ["head.weight", "head.bias"] and made.backbone is model.backbone
    assert torch.equal(made.features(x), model.features(x)[:, chosen])
    assert made(x).shape == (3, 4) and made.head.in_features == 3
    again = VisualQueryTuning(some_vit(), 4, tokens=2, combine="weighted")
    again.load_state_dict(made.state_dict())  # a head of another size makes room
    assert torch.equal(again(x), made(x)) and torch.equal(again.features(x), made.features(x))
    other = VisualQueryTuning(some_vit(), 4, tokens=2, combine="weighted")
    optimizer = torch.optim.SGD(trained_parameters(other).values(), lr=0.1)
    other.load_state_dict(made.state_dict())
    before = other.head.weight.detach().clone()
    other(x).sum().backward()
    optimizer.step()
    assert not torch.equal(other.head.weight, before), "an optimiser of before goes on"
    wrong = VisualQueryTuning(some_vit(), 5, tokens=2, combine="weighted")
    with pytest.raises(RuntimeError, match=r"size mismatch|Unexpected"):
        wrong.load_state_dict(made.state_dict())
    assert wrong.selected is None and wrong(x).shape == (3, 5), "what does not fit leaves it as it was"
    whole = model.refit(classes=7)
    assert whole(x).shape == (3, 7) and torch.equal(whole.features(x), model.features(x))


def test_selecting_again_selects_among_what_was_selected():
    model, x = VisualQueryTuning(some_vit(), 4, tokens=2), torch.randn(3, 3, 16, 16)
    first = model.refit(torch.tensor([50, 60, 70, 75]))
    second = first.refit(torch.tensor([2, 3]))
    assert second.selected is not None and second.selected.tolist() == [70, 75]
    assert torch.equal(second.features(x), model.features(x)[:, [70, 75]])
    again = first.refit()
    assert again.selected is not None and again.selected.tolist() == [50, 60, 70, 75]
    assert not torch.equal(again.head.weight, first.head.weight)


def test_a_network_that_learns_goes_on_learning_after_it_is_refitted():
    model = Probe(with_lora(some_vit(), 2), 4, detach_backbone=False)
    before = list(trained_parameters(model))
    made = model.refit()
    assert list(trained_parameters(model)) == before and made.backbone is not model.backbone
    assert list(trained_parameters(made)) == ["head.weight", "head.bias"]
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(made.features(x), model.eval().features(x))


@pytest.mark.parametrize(
    "wrong", [torch.tensor([0, 99999]), torch.tensor([]).long(), torch.ones(80).bool(), torch.ones(2)]
)
def test_features_that_are_not_there_are_refused(wrong):
    with pytest.raises(SizeError, match="it must be one or more feature indices from 0 to 79"), unchecked():
        VisualQueryTuning(some_vit(), 4, tokens=2).refit(wrong)


def test_half_precision_neither_overflows_nor_divides_by_nothing():
    assert group_lasso(torch.ones(100, 92_928, dtype=torch.float16)).isfinite()
    model = Probe(some_vit().half(), 4, normalise=True)
    torch.nn.init.zeros_(model.backbone.norm.weight)
    torch.nn.init.zeros_(model.backbone.norm.bias)
    assert model.features(torch.randn(1, 3, 16, 16).half()).isfinite().all()


def test_features_of_all_layers():
    """Four activations a layer, and two beside them; the last is the normalised last token mean."""
    vit, x = some_vit().eval(), torch.randn(3, 3, 16, 16)
    model = IntermediateProbe(vit, 4)
    features = model.features(x)
    assert features.shape == (3, 2 * 16 + 2 * (3 * 16 + 64)) and not features.requires_grad
    torch.testing.assert_close(features.norm(dim=1), torch.full((3,), math.sqrt(2 + 4 * 2)))
    torch.testing.assert_close(features[:, -16:], F.normalize(vit.features(x).mean(1), dim=-1))
    torch.testing.assert_close(features[:, :16], F.normalize(vit.embed(x).mean(1), dim=-1))
    assert IntermediateProbe(vit, 4, parts=2).features(x).shape[1] == 2 * features.shape[1]
    model(x).sum().backward()
    assert model.head.weight.grad is not None and all(each.grad is None for each in vit.parameters())
    assert model.refit(torch.tensor([3, 9]))(x).shape == (3, 4)
    adapted = with_lora(vit, names=["fc1"]).requires_grad_(False)
    torch.testing.assert_close(IntermediateProbe(adapted, 4).features(x), features)


def test_probes_and_fine_tuning():
    vit, x = some_vit().eval(), torch.randn(3, 3, 16, 16)
    fine = Probe(vit, 4, detach_backbone=False)
    fine(x).sum().backward()
    untouched = {name for name, each in vit.named_parameters() if each.grad is None}
    assert untouched == {"head.weight", "head.bias"}, "its old head has no part in it"
    assert trained_parameters(fine).keys().isdisjoint({"backbone.head.weight", "backbone.head.bias"})
    probe = Probe(some_vit(), 4)
    assert list(trained_parameters(probe)) == ["head.weight", "head.bias"]
    assert torch.equal(probe.features(x), probe.backbone.features(x)[:, 0])
    with pytest.raises(LayerNotFound, match=r"no linear layer is called 'q': there are .*'query'"):
        with_lora(vit, names=["value", "q"])


def test_a_change_of_low_rank_can_be_written_out():
    """Other parts of the library see one matrix: heads are looked at, and converted, with the change in them."""
    vit, x = with_lora(some_vit().double(), 2).eval(), torch.randn(2, 3, 16, 16).double()
    for each in (p for p in vit.parameters() if p.requires_grad):
        torch.nn.init.normal_(each, std=0.3)
    torch.testing.assert_close(convert(vit, "softmax").features(x), vit.features(x))
    (sights,) = look(vit.blocks[0].attn, {"x": vit.blocks[0].norm1(vit.embed(x))}).values()  # type: ignore[operator]
    assert sights[0].space == "model"
    with pytest.raises(SizeError, match="a projection of the layer is a LoRA"):
        load_from(vit.blocks[0].attn, some_vit().double().blocks[0].attn)  # type: ignore[arg-type]
