"""A backbone with a new head: what all ways of tuning share."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dualform.attention.core import whole_number
from dualform.errors import SizeError
from dualform.models import ViT

Made = TypeVar("Made")
Own = TypeVar("Own", bound="Tuned")

FIRST_BIAS = -math.log(99)
"""Where the biases of a new head begin: as if each class had one chance in a hundred."""


class Tuned(nn.Module):
    """A vision transformer whose own head gives way to a new one, over ``features`` that a member of the family names.

    ``detach_backbone`` (the default) freezes the backbone and runs it without a graph, in evaluation mode: nothing of
    it is kept for the backward pass. Without it, those of its parameters are trained that ask for a gradient: all of
    them, or the adapters in it.

    ``selected`` are the features that the head is given; None: all of them.
    """

    selected: Int[Tensor, " k"] | None
    head: nn.Linear

    def __init__(self, backbone: ViT, *, detach_backbone: bool = True) -> None:
        super().__init__()
        self.backbone, self.detach_backbone = backbone, detach_backbone
        (backbone if detach_backbone else backbone.head).requires_grad_(False)  # its own head is never asked
        self.register_buffer("selected", None)
        self.train(self.training)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """The logits of each picture."""
        return self.head(self.features(images))

    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b F"]:
        """What the head is given."""
        found = self.all_features(images)
        return found if self.selected is None else found[:, self.selected]

    def all_features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b F"]:
        """The same, before any are selected."""
        raise NotImplementedError

    def refit(self: Own, selected: Int[Tensor, " k"] | None = None, classes: int | None = None) -> Own:
        """The same network with a new head over some of its features, or all; all but the head is frozen.

        The backbone is shared, not copied.
        """
        made = self._alike(classes or self.head.out_features)
        if selected is not None:
            made.selected = selected.detach().to(self.head.weight.device).clone()
            made.head = new_head(len(selected), made.head.out_features).to(self.head.weight)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name.startswith("head."))
        return made

    def _alike(self, classes: int) -> Any:
        """One of the same kind on the same backbone, detached, with all that was learned but the head."""
        raise NotImplementedError

    def train(self: Own, mode: bool = True) -> Own:
        """A backbone that is not trained stays in evaluation mode: no dropout of its own changes its features."""
        super().train(mode)
        if self.detach_backbone:
            self.backbone.eval()
        return self

    def of_backbone(self, function: Callable[..., Made], *given: Tensor) -> Made:
        """What a part of the backbone makes of something; without a graph where it is detached."""
        if not self.detach_backbone:
            return function(*given)
        with torch.no_grad():
            return function(*given)


def new_head(features: int, classes: int) -> nn.Linear:
    """A linear layer as the released code of visual query tuning begins it: normal by fan-out, biases of −ln 99."""
    head = nn.Linear(whole_number("features", features, 1), whole_number("classes", classes, 1))
    nn.init.kaiming_normal_(head.weight, mode="fan_out")
    nn.init.constant_(head.bias, FIRST_BIAS)
    return head


def unit(x: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
    """Each example's block of features, of length 1."""
    return F.normalize(x, dim=-1, eps=1e-12)


def patch_bound(backbone: ViT) -> float:
    r"""How far new tokens begin from zero: :math:`\sqrt{6/(c\,p^2 + D)}` for patches of c·p² numbers and width D."""
    proj = backbone.patch_embed.proj
    return math.sqrt(6 / (proj.in_channels * proj.kernel_size[0] * proj.kernel_size[1] + proj.out_channels))


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name those that ask for a gradient: what an optimiser is given, and what is worth saving."""
    found = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if not found:
        raise SizeError(f"nothing in this {type(model).__name__} is trained: all of its parameters are frozen.")
    return found
