"""A linear layer on the last features: a linear probe or, with a trainable backbone, fine-tuning."""

from jaxtyping import Float
from torch import Tensor

from dualform.models import ViT

from .tuned import Tuned, unit


class Probe(Tuned):
    """A linear layer on the class token after the last normalisation.

    On a frozen backbone it is a linear probe. With ``detach_backbone=False`` it is full fine-tuning, or fine-tuning of
    the backbone's adapters: ``Probe(with_lora(vit), 10, detach_backbone=False)``. ``normalise`` scales the features of
    each image to norm 1, which is visual query tuning without queries.
    """

    def __init__(self, backbone: ViT, classes: int, *, normalise: bool = False, detach_backbone: bool = True) -> None:
        super().__init__(backbone, detach_backbone=detach_backbone)
        self.normalise = normalise
        self.build_head(backbone.norm.normalized_shape[0], classes)

    def all_features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b D"]:
        """The class token after the last normalisation."""
        token = self.run_backbone(self.backbone.features, images)[
            :, 0
        ].clone()  # a view would keep all tokens in memory
        return unit(token) if self.normalise else token

    def _with_new_head(self, backbone: ViT, classes: int) -> "Probe":
        return type(self)(backbone, classes, normalise=self.normalise)
