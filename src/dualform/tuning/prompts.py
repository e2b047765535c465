"""Visual prompt tuning (Jia et al. 2022, arXiv 2203.12119): learned tokens among the others, anew in each layer."""

import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.attention.core import whole_number
from dualform.models import ViT

from .tuned import patch_bound


class PromptedBlock(nn.Module):
    """A block that sees learned prompts behind the class token. What it makes of them is dropped.

    Unlike the tokens of visual query tuning, prompts are keys and values too: they change all later features.
    """

    def __init__(self, block: nn.Module, count: int, width: int, bound: float) -> None:
        super().__init__()
        self.block = block
        self.prompts = nn.Parameter(torch.empty(whole_number("prompts", count, 1), width).uniform_(-bound, bound))

    def forward(self, x: Float[Tensor, "b n D"]) -> Float[Tensor, "b n D"]:
        """The tokens after this block."""
        prompts = self.prompts.expand(len(x), -1, -1)
        made = self.block(torch.cat([x[:, :1], prompts, x[:, 1:]], 1))
        return torch.cat([made[:, :1], made[:, 1 + len(self.prompts) :]], 1)

    def __getattr__(self, name: str) -> Any:
        """Its parts are those of the block: norm1, attn, norm2, mlp, drop."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


def with_prompts(backbone: ViT, prompts: int = 8) -> ViT:
    """A frozen copy of a backbone with learned prompts in every layer."""
    made = copy.deepcopy(backbone).requires_grad_(False)
    width, bound = made.norm.normalized_shape[0], patch_bound(made)
    made.blocks = nn.ModuleList(PromptedBlock(block, prompts, width, bound).to(made.pos_embed) for block in made.blocks)
    return made
