"""The margin and the loss of given labels can be asked wherever a target can."""

import pytest
import torch
from helpers import batches, mlp, sgd, trained
from torch.nn import functional as F

from dualform.errors import QueryError
from dualform.explain.query import LabelledTarget, choose, labelled

CLASSES = 4


@pytest.fixture
def spot(tmp_path):
    model = mlp(5, 4, CLASSES)
    memory = trained(tmp_path, model, sgd(model), batches(4, 3, 5, CLASSES)).memory
    x, y = torch.randn(6, 5).double(), torch.randint(CLASSES, (6,))
    return memory.attend(model, x, labels=y), model(x).detach(), y


def test_the_loss_is_the_cross_entropy_and_the_margin_the_log_odds():
    logits, y = torch.randn(5, CLASSES, dtype=torch.float64), torch.randint(CLASSES, (5,))
    loss, name = choose(logits, labelled("loss", y), 5)
    torch.testing.assert_close(loss, F.cross_entropy(logits, y, reduction="none"))
    margin, _ = choose(logits, labelled("margin", y.tolist()), 5)
    p = logits.softmax(1).gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(margin, (p / (1 - p)).log())
    assert name == "the loss of the given label"


def test_sequences_have_a_label_at_each_position_and_those_without_do_not_count():
    logits, y = torch.randn(3, 7, CLASSES), torch.randint(CLASSES, (3, 7))
    y[0, 4:], y[1] = -100, -100
    loss, _ = choose(logits, labelled("loss", y), 3)
    expected = [F.cross_entropy(logits[0, :4], y[0, :4]), torch.tensor(0.0), F.cross_entropy(logits[2], y[2])]
    torch.testing.assert_close(loss, torch.stack(expected))


def test_contributions_add_up_along_the_gradient_of_the_labelled_target(spot):
    spotlight, logits, y = spot
    values = logits.requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(values, y, reduction="sum"), values)
    groups = spotlight.by("label", layer="2", target="loss")
    of_layer = (slope * logits).sum(1).detach()
    torch.testing.assert_close(groups.total, of_layer, rtol=1e-9, atol=1e-12)
    assert "loss" in groups.target
    once, again = (spotlight.top(2, layer="0", target="margin", per="slot") for _ in range(2))
    assert torch.equal(once.contribution, again.contribution)


def test_wrong_labels_are_answered_with_a_sentence(spot):
    spotlight, logits, y = spot
    memory, model, x = spotlight.memory, spotlight.model, spotlight.inputs
    with pytest.raises(QueryError, match="needs to know the right answers: pass labels="):
        memory.attend(model, x, target="margin")
    with pytest.raises(QueryError, match="labels= goes with target='margin' or target='loss'"):
        labelled(3, y)
    with pytest.raises(QueryError, match="labels have shape \\(5,\\) for 6 examples"):
        choose(logits, labelled("loss", y[:5]), 6)
    with pytest.raises(QueryError, match="the label 4 is not among the 4 outputs"):
        choose(logits, LabelledTarget("loss", y * 0 + 4), 6)
    with pytest.raises(QueryError, match="this model gives one number an example"):
        choose(logits[:, :1], labelled("margin", y), 6)
    with pytest.raises(QueryError, match="give classes, as whole numbers"):
        labelled("loss", y.double())
