"""A language model that processes a text in segments, with a memory of each layer's inputs (Transformer-XL)."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dualform.arguments import one_of, whole_number
from dualform.attention import ATTENTIONS, ConvAttention, Heads, TablePositions, sinusoids
from dualform.errors import SizeError

from .block import Activation, TransformerBlock

Remembered = tuple[Float[Tensor, "b _ D"], ...]
"""The last input tokens of each layer, detached."""
Positions = Literal["default", "sinusoid"] | None


class SegmentLM(nn.Module):
    r"""Tokens, causal transformer blocks that also attend to their memory, and a linear layer to the next token.

    The last ``memory`` inputs of every layer are kept, oldest first; the next segment attends to them too, after the
    same normalisation, and no gradient flows back into them. With a memory of the whole past, processing a text in
    segments is the same as processing it at once. ``positions`` "sinusoid" adds sinusoids of the positions, None adds
    nothing, and "default" means None for relative attentions and sinusoids for all others. A token's position is
    counted from the oldest token in memory, so once tokens are forgotten, different tokens get the same position: the
    problem that relative positions solve. ``scaled``: embeddings are initialised with a deviation of :math:`D^{-1/2}`
    and multiplied by :math:`\sqrt D`, so that they are as large as sinusoids and learn faster; None: if there are
    sinusoids.

    The default sizes are those of RCMHA's released code (Sugiharto et al. 2023, arXiv 2308.03429), except for its
    ``reach`` of 4096 and memory of 32. There, queries are convolved over their segment only (here with
    ``mode="reference"``), and all layers are initialised as copies of the first.
    """

    def __init__(
        self, tokens: int, *, width: int = 128, heads: int = 8, layers: int = 6, hidden: int = 256,
        attention: str = "relative-conv", memory: int = 128, positions: Positions = "default",
        scaled: bool | None = None, dropout: float = 0.0, activation: Activation = "relu", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.memory = whole_number("memory", memory)
        one_of("positions", positions, ("default", "sinusoid", None))
        self.positions = not attention.startswith("relative") if positions == "default" else positions is not None
        self.scaled = self.positions if scaled is None else scaled
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                width, heads, hidden, attention=attention, dropout=dropout, activation=activation, **options
            )
            for _ in range(whole_number("layers", layers, 1))
        )
        for module in self.modules():
            if isinstance(module, Heads):
                require_segment_attention(self, attention, module)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)
        if self.scaled:
            nn.init.normal_(self.embed.weight, std=width**-0.5)

    def forward(
        self, tokens: Int[Tensor, "b n"], state: Remembered | None = None
    ) -> tuple[Float[Tensor, "b n v"], Remembered]:
        """The logits of the next token at every position, and the memory for the next segment."""
        memories = [None] * len(self.blocks) if state is None or not self.memory else list(state)
        self._check_state(memories, len(tokens))
        x = self._embedded(tokens, 0 if memories[0] is None else memories[0].shape[1])
        after = []
        for block, memory in zip(self.blocks, memories, strict=True):
            after.append(newest(memory, x, self.memory))
            x = block(x, memory=memory, causal=True)
        return self.head(self.norm(x)), tuple(after)

    def _check_state(self, memories: Sequence[Tensor | None], batch: int) -> None:
        """Require one memory per layer, all of one length and of this batch size, width and dtype."""
        if len(memories) != len(self.blocks):
            raise SizeError(f"the state has {len(memories)} layers, but this model has {len(self.blocks)}.")
        if memories[0] is None:
            return
        weight = self.embed.weight
        expected = (batch, min(memories[0].shape[1], self.memory), weight.shape[1])
        for layer, tokens in enumerate(memories):
            if tokens is None or tokens.shape != expected or tokens.dtype != weight.dtype:
                kind = "None" if tokens is None else f"{tokens.dtype} of {tuple(tokens.shape)}"
                raise SizeError(
                    f"the state of layer {layer} is {kind}, but must be {weight.dtype} of {expected}: (batch, tokens "
                    f"remembered, at most memory={self.memory}, width), as the last call returned it."
                )

    def _embedded(self, tokens: Int[Tensor, "b n"], remembered: int) -> Float[Tensor, "b n D"]:
        x = self.embed(tokens)
        x = math.sqrt(x.shape[-1]) * x if self.scaled else x
        if not self.positions:
            return x
        places = remembered + torch.arange(tokens.shape[1], device=x.device)
        return x + sinusoids(places, x.shape[-1]).to(x.dtype)


def require_segment_attention(model: SegmentLM, name: str, attention: Heads) -> None:
    """Require an attention that can be causal and, if the model has a memory, takes segments."""
    able = [attention_name for attention_name, kind in ATTENTIONS.items() if getattr(kind, "segments", False)]
    if not attention.ordered:
        also = ", or one_sided=True" if isinstance(attention, ConvAttention) and attention.axes == 1 else ""
        raise SizeError(
            f"the attention '{name}' cannot be causal with these options, as it must be here. Use one of {able}{also}."
        )
    if model.memory and not attention.segments:
        raise SizeError(
            f"the attention '{name}' does not use a memory, but this SegmentLM has one of {model.memory}. Use one of "
            f"{able}, or memory=0."
        )
    position = getattr(attention.kernel, "position", None)
    if isinstance(position, TablePositions) and position.reach <= model.memory:
        raise SizeError(
            f"reach={position.reach} is not more than memory={model.memory}: the oldest tokens would have no position. "
            f"Build it with a reach of at least {model.memory} plus the length of a segment."
        )


def newest(memory: Float[Tensor, "b m D"] | None, x: Float[Tensor, "b n D"], most: int) -> Float[Tensor, "b k D"]:
    """The memory after a segment: the last ``most`` tokens of the old memory and the segment, detached."""
    tokens = x if memory is None else torch.cat([memory, x], 1)
    return tokens[:, max(0, tokens.shape[1] - most) :].detach()


def noam(update: int, width: int, warmup: int = 2000, factor: float = 1.0) -> float:
    r"""The learning rate of an update, counted from 1: linear warm-up, then decay with the inverse square root.

    .. math:: \eta_t = \text{factor}\cdot D^{-1/2}\min(t^{-1/2},\ t\cdot\text{warmup}^{-3/2})

    As a torch schedule: ``LambdaLR(Adam(…, lr=1.0), lambda done: noam(done + 1, width))``. Reference: Vaswani et al.
    (2017), arXiv 1706.03762, eq. 3.
    """
    return factor * width**-0.5 * min(update**-0.5, update * warmup**-1.5)
