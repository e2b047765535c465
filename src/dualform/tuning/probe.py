"""A linear layer on the last features: the linear probe and, with a backbone that learns, fine-tuning."""

from jaxtyping import Float
from torch import Tensor

from dualform.models import ViT

from .tuned import Tuned, unit


class Probe(Tuned):
    """A linear layer on the class token behind the last normalisation.

    On a frozen backbone it is a linear probe. With ``detach_backbone=False`` it is full fine-tuning, or that of the
    adapters that the backbone has: ``Probe(with_lora(vit), 10, detach_backbone=False)``. ``normalise`` makes the
    features of each picture as long as 1, which is visual query tuning without a query.
    """

    def __init__(self, backbone: ViT, classes: int, *, normalise: bool = False, detach_backbone: bool = True) -> None:
        super().__init__(backbone, detach_backbone=detach_backbone)
        self.normalise = normalise
        self.begin(backbone.norm.normalized_shape[0], classes)

    def all_features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b D"]:
        """The class token behind the last normalisation."""
        found = self.of_backbone(self.backbone.features, images)[:, 0].clone()  # a view would keep all tokens
        return unit(found) if self.normalise else found

    def _alike(self, backbone: ViT, classes: int) -> "Probe":
        return type(self)(backbone, classes, normalise=self.normalise)
