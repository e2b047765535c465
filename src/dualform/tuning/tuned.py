"""A backbone with a new head, the base class of all tuning methods."""

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
"""The initial biases of a new head, which give each class a probability of one in a hundred."""


class Tuned(nn.Module):
    """A vision transformer with a new head, applied to the features that a subclass computes in ``all_features``.

    ``detach_backbone`` (the default) freezes the backbone and runs it in evaluation mode without a graph, so that
    nothing of it is stored for the backward pass. Otherwise its parameters that require a gradient are trained: all of
    them, or its adapters; its own head is frozen, since it is not used.

    ``selected`` has the indices of the features that the head uses; None: all of them.
    """

    selected: Int[Tensor, " k"] | None
    head: nn.Linear

    def __init__(self, backbone: ViT, *, detach_backbone: bool = True) -> None:
        super().__init__()
        require_vit(backbone)
        learning = any(
            parameter.requires_grad for name, parameter in backbone.named_parameters() if not name.startswith("head.")
        )
        if detach_backbone and any(parameter.requires_grad for parameter in adapters(backbone)):
            raise SizeError(
                "this backbone has trainable adapters: pass detach_backbone=False, or freeze it with "
                "requires_grad_(False)."
            )
        if not detach_backbone and not learning:
            raise SizeError(
                "all of this backbone is frozen (perhaps by another network that uses it), so with "
                "detach_backbone=False nothing of it would be trained: pass a copy with requires_grad_(True), or use "
                "detach_backbone=True."
            )
        self.backbone, self.detach_backbone = backbone, detach_backbone
        self.register_buffer("selected", None)
        self.register_load_state_dict_pre_hook(take_selection)

    def build_head(self, features: int, classes: int) -> None:
        """Make the head and freeze all parameters that are not trained; called at the end of a constructor."""
        self.head = new_head(features, classes, self.backbone.norm.weight)
        (self.backbone if self.detach_backbone else self.backbone.head).requires_grad_(False)
        if self.detach_backbone:
            self.backbone.eval()

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """The logits of each image."""
        return self.head(self.features(images))

    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b F"]:
        """The features that the head uses."""
        self._check_backbone_training()
        return self.only_selected(self.all_features(images))

    def all_features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b F"]:
        """All features, before the selection."""
        raise NotImplementedError

    def only_selected(self, features: Float[Tensor, "b F"]) -> Float[Tensor, "b k"]:
        """Select the features that the head uses."""
        return features if self.selected is None else features[:, self.selected]

    def refit(self: TunedT, selected: Int[Tensor, " k"] | None = None, classes: int | None = None) -> TunedT:
        """The same network with a new head on a selection of its features; all but the head is frozen.

        ``selected`` has columns of this head, as ``select`` returns them; None: all of them. A frozen backbone is
        shared and a trained one is copied, so this network is not changed.
        """
        backbone = self.backbone
        if not self.detach_backbone:
            backbone = copy.deepcopy(backbone).requires_grad_(False)
        refitted = self._with_new_head(backbone, self.head.out_features if classes is None else classes)
        count = self.head.in_features
        kept = torch.arange(count) if selected is None else check_columns(selected, count)
        if self.selected is not None or selected is not None:
            kept = kept.to(self.head.weight.device)
            refitted.selected = kept if self.selected is None else self.selected[kept]
            refitted.head = new_head(len(kept), refitted.head.out_features, self.head.weight)
        for name, parameter in refitted.named_parameters():
            parameter.requires_grad_(name.startswith("head."))
        return refitted

    def _with_new_head(self, backbone: ViT, classes: int) -> Any:
        """An instance of the same class on a frozen backbone, with all learned parameters except the head."""
        raise NotImplementedError

    def train(self: TunedT, mode: bool = True) -> TunedT:
        """Set the mode, but keep a frozen backbone in evaluation mode, so that its dropout has no effect."""
        super().train(mode)
        if self.detach_backbone:
            self.backbone.eval()
        return self

    def run_backbone(self, function: Callable[..., MadeT], *tensors: Tensor) -> MadeT:
        """Call a part of the backbone, without a graph if the backbone is detached."""
        if not self.detach_backbone:
            return function(*tensors)
        self._set_backbone_to_eval()
        with torch.no_grad():
            return function(*tensors)

    def _set_backbone_to_eval(self) -> None:
        """Set a frozen backbone to evaluation mode, which another network that shares it may have changed."""
        if self.detach_backbone and self.backbone.training:
            self.backbone.eval()

    def _check_backbone_training(self) -> None:
        """In training, reject a backbone that another network has frozen or made trainable in the meantime."""
        if not self.training or not torch.is_grad_enabled():
            return
        learns = any(parameter.requires_grad for parameter in self.backbone.parameters())
        if learns == self.detach_backbone:
            now, then = ("trainable", "frozen") if learns else ("frozen", "trainable")
            raise SizeError(
                f"the backbone of this {type(self).__name__} was {then} at first, but now it is {now}: perhaps another "
                "network uses it too. Give each network a copy.deepcopy of it."
            )


def new_head(features: int, classes: int, like: Tensor) -> nn.Linear:
    """A linear layer initialised as in the released code of visual query tuning: normal by fan-out, biases −ln 99."""
    head = nn.Linear(whole_number("features", features, 1), whole_number("classes", classes, 1))
    nn.init.kaiming_normal_(head.weight, mode="fan_out")
    nn.init.constant_(head.bias, FIRST_BIAS)
    return head.to(like)


def unit(x: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
    """Scale each example's block of features to norm 1."""
    return F.normalize(wide(x), dim=-1, eps=1e-12).to(x.dtype)


def check_columns(selected: Tensor, count: int) -> Int[Tensor, " k"]:
    """Require a vector of valid column indices of a head."""
    is_index_vector = not selected.is_floating_point() and selected.dtype != torch.bool and selected.ndim == 1
    if not is_index_vector or not len(selected) or not 0 <= int(selected.min()) <= int(selected.max()) < count:
        raise SizeError(
            f"selected is {selected.dtype} of {tuple(selected.shape)}: it must be one or more feature indices from 0 "
            f"to {count - 1}, as select() returns them."
        )
    return selected.detach()


def take_selection(model: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Pre-hook of ``load_state_dict``: resize the head and the selection to those of the state dict.

    The parameters remain the same objects, so an optimiser that holds them stays valid.
    """
    selected, weight, head = state.get(f"{prefix}selected"), state.get(f"{prefix}head.weight"), model.head
    if selected is None or weight is None or weight.shape != (head.out_features, len(selected)):
        return
    if model.selected is None or len(model.selected) != len(selected):
        model.selected = torch.zeros_like(selected, device=head.weight.device)
        head.weight.data = head.weight.new_zeros(weight.shape)
        head.in_features = len(selected)


def require_vit(backbone: object) -> None:
    """Require a ``dualform.models.ViT``, whose blocks the tuning methods rely on."""
    if not isinstance(backbone, ViT):
        raise SizeError(
            f"the backbone is a {type(backbone).__name__}, but must be a dualform.models.ViT. Build one of the same "
            "shape and load the weights: it accepts state dicts of timm and of Hugging Face's ViT."
        )


def patch_bound(backbone: ViT) -> float:
    r"""The bound of new tokens' initial values, :math:`\sqrt{6/(c\,p^2 + D)}` for patches of c·p² numbers, width D."""
    proj = backbone.patch_embed.proj
    return math.sqrt(6 / (proj.in_channels * proj.kernel_size[0] * proj.kernel_size[1] + proj.out_channels))


def adapters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model's adapters, which are modules that list them in ``adapts``."""
    adapted = [getattr(module, name) for module in model.modules() for name in getattr(module, "adapts", ())]
    return [p for part in adapted for p in ([part] if isinstance(part, nn.Parameter) else part.parameters())]


def frozen_copy(model: ModelT) -> ModelT:
    """A copy of a model in which only the existing adapters are trainable."""
    frozen = copy.deepcopy(model).requires_grad_(False)
    for parameter in adapters(frozen):
        parameter.requires_grad_(True)
    return frozen


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name, to be passed to an optimiser."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise SizeError(f"nothing in this {type(model).__name__} is trained: all of its parameters are frozen.")
    return trained
