"""A backbone with a new head: what all ways of tuning share."""

import copy
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dualform.arguments import whole_number
from dualform.attention import wide
from dualform.errors import SizeError
from dualform.models import ViT

MadeT = TypeVar("MadeT")
TunedT = TypeVar("TunedT", bound="Tuned")
ModelT = TypeVar("ModelT", bound=nn.Module)

FIRST_BIAS = -math.log(99)
"""Where the biases of a new head begin: as if each class had one chance in a hundred."""


class Tuned(nn.Module):
    """A vision transformer whose own head gives way to a new one, over ``features`` that a member of the family names.

    ``detach_backbone`` (the default) freezes the backbone and runs it without a graph, in evaluation mode: nothing of
    it is kept for the backward pass. Without it, those of its parameters are trained that ask for a gradient: all of
    them, or the adapters in it; its own head is frozen, since nothing asks it.

    ``selected`` are the features that the head is given; None: all of them.
    """

    selected: Int[Tensor, " k"] | None
    head: nn.Linear

    def __init__(self, backbone: ViT, *, detach_backbone: bool = True) -> None:
        super().__init__()
        see_that_it_is_a_vit(backbone)
        learning = any(each.requires_grad for name, each in backbone.named_parameters() if not name.startswith("head."))
        if detach_backbone and any(each.requires_grad for each in adapters(backbone)):
            raise SizeError(
                "this backbone has adapters that learn: pass detach_backbone=False, or freeze it with "
                "requires_grad_(False)."
            )
        if not detach_backbone and not learning:
            raise SizeError(
                "all of this backbone is frozen (perhaps by another network that it was given to), so without "
                "detach_backbone nothing of it would learn: pass a copy with requires_grad_(True), or detach it."
            )
        self.backbone, self.detach_backbone = backbone, detach_backbone
        self.register_buffer("selected", None)
        self.register_load_state_dict_pre_hook(take_selection)

    def begin(self, features: int, classes: int) -> None:
        """Make the head, and freeze what is not to learn: the last thing that a constructor does."""
        self.head = new_head(features, classes, self.backbone.norm.weight)
        (self.backbone if self.detach_backbone else self.backbone.head).requires_grad_(False)
        if self.detach_backbone:
            self.backbone.eval()

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """The logits of each picture."""
        return self.head(self.features(images))

    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b F"]:
        """What the head is given."""
        self.see_what_learns()
        return self.only_selected(self.all_features(images))

    def all_features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b F"]:
        """The same, before any are selected."""
        raise NotImplementedError

    def only_selected(self, features: Float[Tensor, "b F"]) -> Float[Tensor, "b k"]:
        """Of all features those that the head is given."""
        return features if self.selected is None else features[:, self.selected]

    def refit(self: TunedT, selected: Int[Tensor, " k"] | None = None, classes: int | None = None) -> TunedT:
        """The same network with a new head over some of its features; all but the head is frozen.

        ``selected`` are columns of this head, as ``select`` gives them; None: all of them. A frozen backbone is shared,
        one that learned is copied, so this network is left as it is.
        """
        backbone = self.backbone
        if not self.detach_backbone:
            backbone = copy.deepcopy(backbone).requires_grad_(False)
        made = self._alike(backbone, self.head.out_features if classes is None else classes)
        count = self.head.in_features
        kept = torch.arange(count) if selected is None else checked(selected, count)
        if self.selected is not None or selected is not None:
            kept = kept.to(self.head.weight.device)
            made.selected = kept if self.selected is None else self.selected[kept]
            made.head = new_head(len(kept), made.head.out_features, self.head.weight)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name.startswith("head."))
        return made

    def _alike(self, backbone: ViT, classes: int) -> Any:
        """One of the same kind on a frozen backbone, with all that was learned but the head."""
        raise NotImplementedError

    def train(self: TunedT, mode: bool = True) -> TunedT:
        """A backbone that is not trained stays in evaluation mode: no dropout of its own changes its features."""
        super().train(mode)
        if self.detach_backbone:
            self.backbone.eval()
        return self

    def of_backbone(self, function: Callable[..., MadeT], *given: Tensor) -> MadeT:
        """What a part of the backbone makes of something; without a graph where it is detached."""
        if not self.detach_backbone:
            return function(*given)
        self.keep_still()
        with torch.no_grad():
            return function(*given)

    def keep_still(self) -> None:
        """A frozen backbone is in evaluation mode, though another network that shares it may have changed that."""
        if self.detach_backbone and self.backbone.training:
            self.backbone.eval()

    def see_what_learns(self) -> None:
        """In training, that no other network has frozen a backbone that learns here, or set one free that does not."""
        if not self.training or not torch.is_grad_enabled():
            return
        learns = any(each.requires_grad for each in self.backbone.parameters())
        if learns == self.detach_backbone:
            now, then = ("learning", "frozen") if learns else ("frozen", "learning")
            raise SizeError(
                f"the backbone of this {type(self).__name__} was {then} when it was given, and now it is {now}: "
                "perhaps another network has it too. Give each network a copy.deepcopy of it."
            )


def new_head(features: int, classes: int, like: Tensor) -> nn.Linear:
    """A linear layer as the released code of visual query tuning begins it: normal by fan-out, biases of −ln 99."""
    head = nn.Linear(whole_number("features", features, 1), whole_number("classes", classes, 1))
    nn.init.kaiming_normal_(head.weight, mode="fan_out")
    nn.init.constant_(head.bias, FIRST_BIAS)
    return head.to(like)


def unit(x: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
    """Each example's block of features, of length 1."""
    return F.normalize(wide(x), dim=-1, eps=1e-12).to(x.dtype)


def checked(selected: Tensor, count: int) -> Int[Tensor, " k"]:
    """Columns of a head, if they are such."""
    whole = not selected.is_floating_point() and selected.dtype != torch.bool and selected.ndim == 1
    if not whole or not len(selected) or not 0 <= int(selected.min()) <= int(selected.max()) < count:
        raise SizeError(
            f"selected is {selected.dtype} of {tuple(selected.shape)}: it must be numbers of features from 0 to "
            f"{count - 1}, 1 or more, as select() gives them."
        )
    return selected.detach()


def take_selection(model: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: where a head over selected features is in it, make room for both.

    The parameters stay the same objects, so an optimiser that was given them goes on with them.
    """
    found, weight, head = state.get(f"{prefix}selected"), state.get(f"{prefix}head.weight"), model.head
    if found is None or weight is None or weight.shape != (head.out_features, len(found)):
        return
    if model.selected is None or len(model.selected) != len(found):
        model.selected = torch.zeros_like(found, device=head.weight.device)
        head.weight.data = head.weight.new_zeros(weight.shape)
        head.in_features = len(found)


def see_that_it_is_a_vit(backbone: object) -> None:
    """Tuning takes our own vision transformer, whose blocks it knows."""
    if not isinstance(backbone, ViT):
        raise SizeError(
            f"the backbone is a {type(backbone).__name__}, and must be a dualform.models.ViT. Build one of the same "
            "shape and load the weights: state dicts of timm and of Hugging Face's ViT fit as they are."
        )


def patch_bound(backbone: ViT) -> float:
    r"""How far new tokens begin from zero: :math:`\sqrt{6/(c\,p^2 + D)}` for patches of c·p² numbers and width D."""
    proj = backbone.patch_embed.proj
    return math.sqrt(6 / (proj.in_channels * proj.kernel_size[0] * proj.kernel_size[1] + proj.out_channels))


def adapters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of adapters in a model: modules that name what ``adapts`` in them."""
    found = [getattr(each, name) for each in model.modules() for name in getattr(each, "adapts", ())]
    return [p for each in found for p in ([each] if isinstance(each, nn.Parameter) else each.parameters())]


def frozen_copy(model: ModelT) -> ModelT:
    """A copy in which nothing learns but the adapters that it has already."""
    made = copy.deepcopy(model).requires_grad_(False)
    for each in adapters(made):
        each.requires_grad_(True)
    return made


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name those that ask for a gradient: what an optimiser is given."""
    found = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if not found:
        raise SizeError(f"nothing in this {type(model).__name__} is trained: all of its parameters are frozen.")
    return found
