r"""Visual query tuning (Tu, Mai, Chao 2023, arXiv 2212.03220): learned query tokens in a frozen backbone.

Each layer of a frozen vision transformer gets a few learned tokens p that are queries of its attention, but neither
keys nor values. They attend to the layer's tokens, and no token attends to them, so all features stay unchanged:

.. math::
    r_l &= p_l + \mathrm{Attention}_l(\mathrm{LN}_1 p_l,\ \mathrm{LN}_1 h_{l-1}),\qquad
    z_l = r_l + \mathrm{MLP}_l(\mathrm{LN}_2 r_l) \\
    h_l &= \mathrm{Block}_l(h_{l-1})

A linear layer is applied to the last class token and the summaries z of all layers, each scaled to norm 1.
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
    """The outputs of a block for query tokens p that attend to its input tokens h, but not to each other."""
    r = p + block.drop(block.attn(block.norm1(p), block.norm1(h)))
    return r + block.drop(block.mlp(block.norm2(r)))


class VisualQueryTuning(Tuned):
    """A frozen backbone, ``tokens`` queries per layer, and a linear layer on their summaries and the class token.

    ``combine``: the summaries of a layer are concatenated ("concat"), averaged ("mean") or summed with learned weights
    ("weighted"). ``dropout`` is applied to the query tokens in training. ``pool``: the first block of features is the
    last "class" token or (for backbones whose class token was not trained) the normalised "mean" of the patches.

    The backbone runs separately from the queries and keeps no graph: the backward pass only needs keys, values and rows
    of query tokens. The released code runs both together, which gives the same values but stores more. With
    ``detach_backbone=False`` adapters in the backbone are trained too.
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
        require_free_queries(backbone, detach_backbone)
        self.tokens, self.dropout = whole_number("tokens", tokens), dropout
        layers, width, like = len(backbone.blocks), backbone.norm.normalized_shape[0], backbone.norm.weight
        bound = patch_bound(backbone)
        self.queries = nn.Parameter(torch.empty(layers, tokens, width).uniform_(-bound, bound).to(like))
        self.weights = nn.Parameter(torch.ones(layers, tokens).to(like)) if combine == "weighted" else None
        a_layer = (tokens if combine == "concat" else min(tokens, 1)) * width
        self.build_head(width + layers * a_layer, classes)

    def all_features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b F"]:
        """The class token and each layer's summary, each scaled to norm 1."""
        return self._side_by_side(*self.read(images))

    def read(self, images: Float[Tensor, "b c h w"]) -> tuple[Float[Tensor, "b D"], list[Float[Tensor, "b t D"]]]:
        """The last class token, and the summaries of each layer's query tokens."""
        h, summaries = self.run_backbone(self.backbone.embed, images), []
        for layer, block in enumerate(self.backbone.blocks):
            h, before = self.run_backbone(block, h), h
            summaries += self._summaries(layer, before)
        return self._last(h), summaries

    @torch.no_grad()
    def states(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b l n D"]:
        """The input tokens of each layer of the backbone, and the output of the last one.

        They never change if the backbone is frozen: stored once for each image, they let ``from_states`` skip the
        backbone. They take n·D numbers per layer and image.
        """
        states = [self.run_backbone(self.backbone.embed, images)]
        for block in self.backbone.blocks:
            states.append(self.run_backbone(block, states[-1]))
        return torch.stack(states, 1)

    def from_states(self, states: Float[Tensor, "b l n D"]) -> Float[Tensor, "b classes"]:
        """The logits, from the ``states`` of the images."""
        if not self.detach_backbone:
            raise SizeError("the backbone is trained, so stored states are out of date: give it the images.")
        self._check_backbone_training()
        *before, last = states.unbind(1)
        summaries = [layer_summary for layer, h in enumerate(before) for layer_summary in self._summaries(layer, h)]
        return self.head(self.only_selected(self._side_by_side(self._last(last), summaries)))

    def _summaries(self, layer: int, h: Float[Tensor, "b n D"]) -> list[Float[Tensor, "b t D"]]:
        """The summaries of a layer's query tokens, if there are any."""
        if not self.tokens:
            return []
        self._set_backbone_to_eval()
        p = F.dropout(self.queries[layer].expand(len(h), -1, -1), self.dropout, self.training)
        return [summary(self.backbone.blocks[layer], p, h)]

    def _side_by_side(self, last: Float[Tensor, "b D"], summaries: list[Tensor]) -> Float[Tensor, "b F"]:
        blocks = [last, *(self._combined(layer, z) for layer, z in enumerate(summaries))]
        return torch.cat([unit(block) for block in blocks], -1)

    def _last(self, h: Float[Tensor, "b n D"]) -> Float[Tensor, "b D"]:
        if self.pool == "class":
            return self.run_backbone(self.backbone.norm, h)[:, 0]
        return F.layer_norm(h[:, 1:].mean(1), h.shape[-1:], eps=self.backbone.norm.eps)

    def _combined(self, layer: int, z: Float[Tensor, "b t D"]) -> Float[Tensor, "b d"]:
        """The summaries of a layer as one block of features."""
        if self.combine == "concat":
            return z.flatten(1)
        return z.mean(1) if self.weights is None else torch.einsum("btD,t->bD", z, self.weights[layer])

    def _with_new_head(self, backbone: ViT, classes: int) -> "VisualQueryTuning":
        twin = type(self)(
            backbone, classes, tokens=self.tokens, combine=self.combine, dropout=self.dropout, pool=self.pool
        )
        twin.queries, twin.weights = (
            None if parameter is None else nn.Parameter(parameter.detach().clone())
            for parameter in (self.queries, self.weights)
        )
        twin.head.to(self.head.weight)
        return twin

    def extra_repr(self) -> str:
        """The number of query tokens, and how they are combined."""
        return f"tokens={self.tokens}, combine={self.combine!r}, detach_backbone={self.detach_backbone}"


def require_free_queries(backbone: ViT, frozen: bool) -> None:
    """Require attention in which a query's output does not depend on its position or on the other queries."""
    for block in backbone.blocks:
        layer: Any = block.attn
        if isinstance(layer, DynamicAttention) and (layer.mode == "reference" or not frozen):
            raise SizeError(
                "query tokens would count as passes of this 'dgqa' and change its allocation: visual query tuning "
                "needs it frozen (detach_backbone=True) and in its clean mode."
            )
        if isinstance(layer, PerturbedAttention) and layer.scale and not layer.train_only:
            raise SizeError(
                "this 'pgqa' has noise in evaluation too, so no two passes of it are the same: visual query tuning "
                "needs it with train_only=True."
            )
        placed = isinstance(layer, ConvAttention | ConvolvedAttention | RelativeAttention | SparseAttention)
        if placed or isinstance(layer.kernel, SparseKernel):
            raise SizeError(
                f"queries of a {type(layer).__name__} depend on their position, and query tokens have none: visual "
                "query tuning needs a backbone with another attention, such as softmax, bn, sh, linear or gqa."
            )
