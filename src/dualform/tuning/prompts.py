"""Visual prompt tuning (Jia et al. 2022, arXiv 2203.12119): new learned tokens among the others in each layer."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.arguments import whole_number
from dualform.models import ViT

from .tuned import frozen_copy, patch_bound, require_vit


class PromptedBlock(nn.Module):
    """A block with learned prompts after the class token. Its outputs for the prompts are discarded.

    Unlike the tokens of visual query tuning, prompts are keys and values too: they change all later features.
    """

    adapts = ("prompts",)

    def __init__(self, block: nn.Module, count: int, bound: float, like: Float[Tensor, "1 n D"]) -> None:
        super().__init__()
        self.block = block
        prompts = torch.empty(whole_number("prompts", count, 1), like.shape[-1]).uniform_(-bound, bound)
        self.prompts = nn.Parameter(prompts.to(like))

    def forward(self, x: Float[Tensor, "b n D"]) -> Float[Tensor, "b n D"]:
        """The tokens after this block."""
        prompts = self.prompts.expand(len(x), -1, -1)
        tokens = self.block(torch.cat([x[:, :1], prompts, x[:, 1:]], 1))
        return torch.cat([tokens[:, :1], tokens[:, 1 + len(self.prompts) :]], 1)

    def __getattr__(self, name: str) -> Any:
        """Look up other attributes in the block: norm1, attn, norm2, mlp, drop."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


def with_prompts(backbone: ViT, prompts: int = 8) -> ViT:
    """A frozen copy of a backbone with learned prompts in every layer. Existing adapters remain trainable."""
    require_vit(backbone)
    prompted = frozen_copy(backbone)
    bound, like = patch_bound(prompted), prompted.pos_embed
    prompted.blocks = nn.ModuleList(PromptedBlock(block, prompts, bound, like) for block in prompted.blocks)
    return prompted
