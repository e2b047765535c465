r"""Visual query tuning (Tu, Mai, Chao 2023, arXiv 2212.03220): tokens that only ask.

Each layer of a frozen vision transformer is given a few learned tokens p that are queries of its attention, but neither
keys nor values. They read what the layer sees, and nothing reads them, so all features stay as they were:

.. math::
    r_l &= p_l + \mathrm{Attention}_l(\mathrm{LN}_1 p_l,\ \mathrm{LN}_1 h_{l-1}),\qquad
    z_l = r_l + \mathrm{MLP}_l(\mathrm{LN}_2 r_l) \\
    h_l &= \mathrm{Block}_l(h_{l-1})

A linear layer sees the last class token and the summaries z of all layers, each block of features of length 1.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dualform.arguments import one_of, whole_number
from dualform.attention import (
    ConvAttention,
    ConvolvedAttention,
    DynamicAttention,
    PerturbedAttention,
    RelativeAttention,
    SparseAttention,
    SparseKernel,
)
from dualform.errors import SizeError
from dualform.models import ViT

from .tuned import Tuned, patch_bound, unit

Combine = Literal["concat", "mean", "weighted"]
TokenPool = Literal["class", "mean"]


def summary(block: Any, p: Float[Tensor, "b t D"], h: Float[Tensor, "b n D"]) -> Float[Tensor, "b t D"]:
    """What query tokens read in the tokens that a block is given. They do not see each other."""
    r = p + block.drop(block.attn(block.norm1(p), block.norm1(h)))
    return r + block.drop(block.mlp(block.norm2(r)))


class VisualQueryTuning(Tuned):
    """A frozen backbone, ``tokens`` queries a layer, and a linear layer over what they read and the class token.

    ``combine``: the tokens of a layer side by side ("concat"), their "mean", or a learned "weighted" sum. ``dropout``
    drops numbers of the query tokens in training. ``pool``: the first block of features is the last class token or
    (for backbones whose class token was not trained) the normalised "mean" of the patches.

    Run apart from the queries, the backbone keeps no graph: for the backward pass there are only keys, values and rows
    of query tokens. The released code runs both together; values are the same, and what it keeps is not. With
    ``detach_backbone=False`` adapters in the backbone learn too.
    """

    def __init__(
        self, backbone: ViT, classes: int, *, tokens: int = 1, combine: Combine = "concat", dropout: float = 0.0,
        pool: TokenPool = "class", detach_backbone: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(backbone, detach_backbone=detach_backbone)
        self.combine: Combine = one_of("combine", combine, ("concat", "mean", "weighted"))
        self.pool: TokenPool = one_of("pool", pool, ("class", "mean"))
        if not 0 <= dropout < 1:
            raise SizeError(f"dropout={dropout} must lie in [0, 1).")
        see_that_queries_are_free(backbone, detach_backbone)
        self.tokens, self.dropout = whole_number("tokens", tokens), dropout
        layers, width, like = len(backbone.blocks), backbone.norm.normalized_shape[0], backbone.norm.weight
        bound = patch_bound(backbone)
        self.queries = nn.Parameter(torch.empty(layers, tokens, width).uniform_(-bound, bound).to(like))
        self.weights = nn.Parameter(torch.ones(layers, tokens).to(like)) if combine == "weighted" else None
        a_layer = (tokens if combine == "concat" else min(tokens, 1)) * width
        self.begin(width + layers * a_layer, classes)

    def all_features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b F"]:
        """The class token and each layer's summary, every one of them of length 1."""
        return self._side_by_side(*self.read(images))

    def read(self, images: Float[Tensor, "b c h w"]) -> tuple[Float[Tensor, "b D"], list[Float[Tensor, "b t D"]]]:
        """The last class token, and what the query tokens of each layer read."""
        h, summaries = self.of_backbone(self.backbone.embed, images), []
        for layer, block in enumerate(self.backbone.blocks):
            h, before = self.of_backbone(block, h), h
            summaries += self._summaries(layer, before)
        return self._last(h), summaries

    @torch.no_grad()
    def states(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b l n D"]:
        """What each layer of the backbone is given, and what the last one gives.

        They never change where the backbone is frozen: kept once for each picture, ``from_states`` needs no pass
        through the backbone. They take n·D numbers a layer and picture.
        """
        found = [self.of_backbone(self.backbone.embed, images)]
        for block in self.backbone.blocks:
            found.append(self.of_backbone(block, found[-1]))
        return torch.stack(found, 1)

    def from_states(self, states: Float[Tensor, "b l n D"]) -> Float[Tensor, "b classes"]:
        """The logits, from ``states`` of the pictures."""
        if not self.detach_backbone:
            raise SizeError("the backbone is trained, so states that were kept are not its own: give it the pictures.")
        self.see_what_learns()
        *before, last = states.unbind(1)
        summaries = [each for layer, h in enumerate(before) for each in self._summaries(layer, h)]
        return self.head(self.only_selected(self._side_by_side(self._last(last), summaries)))

    def _summaries(self, layer: int, h: Float[Tensor, "b n D"]) -> list[Float[Tensor, "b t D"]]:
        """What the query tokens of a layer read, if there are any."""
        if not self.tokens:
            return []
        self.keep_still()
        p = F.dropout(self.queries[layer].expand(len(h), -1, -1), self.dropout, self.training)
        return [summary(self.backbone.blocks[layer], p, h)]

    def _side_by_side(self, last: Float[Tensor, "b D"], summaries: list[Tensor]) -> Float[Tensor, "b F"]:
        blocks = [last, *(self._combined(layer, z) for layer, z in enumerate(summaries))]
        return torch.cat([unit(each) for each in blocks], -1)

    def _last(self, h: Float[Tensor, "b n D"]) -> Float[Tensor, "b D"]:
        if self.pool == "class":
            return self.of_backbone(self.backbone.norm, h)[:, 0]
        return F.layer_norm(h[:, 1:].mean(1), h.shape[-1:], eps=self.backbone.norm.eps)

    def _combined(self, layer: int, z: Float[Tensor, "b t D"]) -> Float[Tensor, "b d"]:
        """The summaries of a layer as one block of features."""
        if self.combine == "concat":
            return z.flatten(1)
        return z.mean(1) if self.weights is None else torch.einsum("btD,t->bD", z, self.weights[layer])

    def _alike(self, backbone: ViT, classes: int) -> "VisualQueryTuning":
        made = type(self)(
            backbone, classes, tokens=self.tokens, combine=self.combine, dropout=self.dropout, pool=self.pool
        )
        made.queries, made.weights = (
            None if each is None else nn.Parameter(each.detach().clone()) for each in (self.queries, self.weights)
        )
        made.head.to(self.head.weight)
        return made

    def extra_repr(self) -> str:
        """How many tokens, and how they are combined."""
        return f"tokens={self.tokens}, combine={self.combine!r}, detach_backbone={self.detach_backbone}"


def see_that_queries_are_free(backbone: ViT, frozen: bool) -> None:
    """What a query gives must not depend on its place or on the queries beside it, and must change nothing."""
    for block in backbone.blocks:
        layer: Any = block.attn
        if isinstance(layer, DynamicAttention) and (layer.mode == "reference" or not frozen):
            raise SizeError(
                "query tokens would count as passes of this 'dgqa', and move its allocation: visual query tuning takes "
                "it frozen (detach_backbone=True) and in its clean mode."
            )
        if isinstance(layer, PerturbedAttention) and layer.scale and not layer.train_only:
            raise SizeError(
                "this 'pgqa' has noise in evaluation too, so no two passes of it are the same: visual query tuning "
                "takes it with train_only=True."
            )
        placed = isinstance(layer, ConvAttention | ConvolvedAttention | RelativeAttention | SparseAttention)
        if placed or isinstance(layer.kernel, SparseKernel):
            raise SizeError(
                f"queries of a {type(layer).__name__} depend on their place among others, and query tokens have none: "
                "visual query tuning takes backbones with other attentions, such as softmax, bn, sh, linear or gqa."
            )
