"""A linear layer on features of all layers, in the manner of Head2Toe (Evci et al. 2022, arXiv 2201.03529)."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dualform.arguments import whole_number
from dualform.errors import SizeError
from dualform.models import TransformerBlock, ViT

from .tuned import Tuned, unit


class IntermediateProbe(Tuned):
    """A head on four activations of every layer, and the tokens before the first and after the last layer.

    The four activations are the normalised tokens, the output of attention, the hidden activations of the feedforward
    network, and its output. Each is averaged over tokens; ``parts`` splits the tokens into this many intervals with an
    average each. Blocks of features are scaled to norm 1, and a group lasso selects among the features:
    ``refit(select(head.weight, 0.2))``. The backbone is always frozen.
    """

    def __init__(self, backbone: ViT, classes: int, *, parts: int = 1) -> None:
        super().__init__(backbone)
        self.parts, tokens = whole_number("parts", parts, 1), backbone.pos_embed.shape[1]
        if parts > tokens:
            raise SizeError(f"parts={parts} is more than the {tokens} tokens of this backbone.")
        if other_kinds := {type(block).__name__ for block in backbone.blocks if type(block) is not TransformerBlock}:
            raise SizeError(f"activations need plain transformer blocks, but this backbone has {sorted(other_kinds)}.")
        width = backbone.norm.normalized_shape[0]
        block_widths = [3 * width + hidden_of(block) for block in backbone.blocks]
        self.build_head(parts * (2 * width + sum(block_widths)), classes)

    def all_features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b F"]:
        """The activations of all layers, in order."""
        return self.run_backbone(self._tapped, images)

    def _tapped(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b F"]:
        h = self.backbone.embed(images)
        features = [self._pooled(h)]
        for block in self.backbone.blocks:
            h, taps = tapped(block, h)
            features += [self._pooled(tap) for tap in taps]
        return torch.cat([*features, self._pooled(self.backbone.norm(h))], -1)

    def _pooled(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b p"]:
        return unit(F.adaptive_avg_pool1d(x.mT, self.parts).flatten(1))

    def _with_new_head(self, backbone: ViT, classes: int) -> "IntermediateProbe":
        return type(self)(backbone, classes, parts=self.parts)


def tapped(block: Any, h: Float[Tensor, "b n D"]) -> tuple[Float[Tensor, "b n D"], list[Tensor]]:
    """The tokens after a block, and four activations in it."""
    before = block.norm1(h)
    attended = block.attn(before)
    r = h + attended
    hidden = block.mlp.act(block.mlp.fc1(block.norm2(r)))
    fed = block.mlp.fc2(hidden)
    return r + fed, [before, attended, hidden, fed]


def hidden_of(block: Any) -> int:
    """The width of a block's feedforward network."""
    return len(block.mlp.fc1.weight)
