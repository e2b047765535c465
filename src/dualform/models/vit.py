"""A vision transformer (Dosovitskiy et al. 2021, arXiv 2010.11929) whose modules are named as in timm."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.arguments import exact_ratio
from dualform.errors import SizeError

from .block import TransformerBlock
from .names import from_hf


class PatchEmbed(nn.Module):
    """Cut an image into patches and project each to a token."""

    def __init__(self, size: int, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.size = size
        self.proj = nn.Conv2d(channels, width, patch, patch)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n D"]:
        """The patches, row by row."""
        expected = (self.proj.in_channels, self.size, self.size)
        if images.ndim != 4 or images.shape[1:] != expected:
            raise SizeError(
                f"images of {tuple(images.shape)} for a model of (batch, {', '.join(map(str, expected))}): resize "
                "them, or add a batch axis with images[None]."
            )
        return self.proj(images).flatten(2).mT


class ViT(nn.Module):
    """A class token, patches with learned positions, transformer blocks, and a linear layer on the class token.

    ``ViT(224, 16, classes=1000, width=192, heads=3, layers=12)`` has the shape of DeiT-tiny. Convolutions get the grid
    as an option, and they and pooled heads the class token; ``grid=(side, side)`` pools in blocks of the image.

    State dicts of timm and of Hugging Face's ViT can be loaded; the latter is trained with ``norm_eps=1e-12``.
    """

    def __init__(
        self, size: int, patch: int, *, channels: int = 3, classes: int, width: int = 192, heads: int = 3,
        layers: int = 12, ratio: float = 4.0, attention: str = "softmax", dropout: float = 0.0, norm_eps: float = 1e-6,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        side = exact_ratio("size", size, "patch", patch)
        self.patch_embed = PatchEmbed(size, channels, patch, width)
        self.cls_token, self.pos_embed = (
            nn.Parameter(torch.zeros(1, 1, width)),
            nn.Parameter(torch.empty(1, side**2 + 1, width)),
        )
        self.pos_drop = nn.Dropout(dropout)
        options = about_tokens(attention, side) | options
        self.blocks = nn.ModuleList(
            TransformerBlock(
                width, heads, int(width * ratio), attention=attention, dropout=dropout, norm_eps=norm_eps, **options
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width, norm_eps), nn.Linear(width, classes)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=1e-6)
        self.register_load_state_dict_pre_hook(from_hf)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """The logits of each image."""
        return self.head(self.features(images)[:, 0])

    def features(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n D"]:
        """All tokens after the last block, normalised, the class token first."""
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def embed(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n D"]:
        """The input tokens of the first block."""
        x = self.patch_embed(images)
        return self.pos_drop(torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed)


def about_tokens(attention: str, side: int) -> dict[str, Any]:
    """The options that tell an attention layer about the class token and the grid of the others."""
    if attention.startswith("conv2d"):
        return {"class_tokens": 1, "grid": (side, side)}
    return {"class_tokens": 1} if attention.startswith("conv1d") or attention.endswith("sh") else {}
