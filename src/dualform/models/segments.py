"""A language model that reads segment after segment, and remembers what its layers saw (Transformer-XL)."""

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
"""The last tokens that each layer was given, without their gradient."""
Positions = Literal["default", "sinusoid"] | None


class SegmentLM(nn.Module):
    r"""Tokens, causal transformer blocks that also see what they remember, and a linear layer to the next token.

    Of every layer the last ``memory`` inputs are kept, oldest first; the next segment attends to them too, behind the
    same normalisation, and no gradient goes back into them. With a memory that holds all of the past, reading in
    segments is the same as reading at once. ``positions`` "sinusoid" adds sinusoids of the places; None adds nothing.
    "default": relative attentions have None, all others sinusoids: a token's place is counted from the oldest one
    remembered, so where something is forgotten it has a place that older ones had too, which is what relative positions
    were made against. ``scaled``: embeddings begin with a deviation of :math:`D^{-1/2}` and are multiplied by
    :math:`\sqrt D`, so that they are as large as sinusoids, and learn faster; None: where there are sinusoids.

    The default has the sizes of RCMHA's released code (Sugiharto et al. 2023, arXiv 2308.03429), but for its ``reach``
    of 4096 and memory of 32. There queries are convolved over their segment alone (``mode="reference"`` does it here),
    and all layers begin as copies of the first.
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
        for each in self.modules():
            if isinstance(each, Heads):
                see_that_it_reads_on(self, attention, each)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)
        if self.scaled:
            nn.init.normal_(self.embed.weight, std=width**-0.5)

    def forward(
        self, tokens: Int[Tensor, "b n"], state: Remembered | None = None
    ) -> tuple[Float[Tensor, "b n v"], Remembered]:
        """The logits of the next token at every place, and what is remembered for the next segment."""
        memories = [None] * len(self.blocks) if state is None or not self.memory else list(state)
        self._see_that_it_fits(memories, len(tokens))
        x = self._embedded(tokens, 0 if memories[0] is None else memories[0].shape[1])
        after = []
        for block, memory in zip(self.blocks, memories, strict=True):
            after.append(newest(memory, x, self.memory))
            x = block(x, memory=memory, causal=True)
        return self.head(self.norm(x)), tuple(after)

    def _see_that_it_fits(self, memories: Sequence[Tensor | None], batch: int) -> None:
        """What each layer remembers: as many tokens in all layers, of this batch, and of the model's width and kind."""
        if len(memories) != len(self.blocks):
            raise SizeError(f"the state has {len(memories)} layers, and this model {len(self.blocks)}.")
        if memories[0] is None:
            return
        weight = self.embed.weight
        expected = (batch, min(memories[0].shape[1], self.memory), weight.shape[1])
        for layer, each in enumerate(memories):
            if each is None or each.shape != expected or each.dtype != weight.dtype:
                kind = "None" if each is None else f"{each.dtype} of {tuple(each.shape)}"
                raise SizeError(
                    f"the state of layer {layer} is {kind}, and must be {weight.dtype} of {expected}: (batch, tokens "
                    f"remembered, at most memory={self.memory}, width), as the last call gave it."
                )

    def _embedded(self, tokens: Int[Tensor, "b n"], remembered: int) -> Float[Tensor, "b n D"]:
        x = self.embed(tokens)
        x = math.sqrt(x.shape[-1]) * x if self.scaled else x
        if not self.positions:
            return x
        places = remembered + torch.arange(tokens.shape[1], device=x.device)
        return x + sinusoids(places, x.shape[-1]).to(x.dtype)


def see_that_it_reads_on(model: SegmentLM, name: str, attention: Heads) -> None:
    """An attention of a language model is causal and, if there is a memory, takes segments."""
    able = [each for each, kind in ATTENTIONS.items() if getattr(kind, "segments", False)]
    if not attention.ordered:
        also = ", or one_sided=True" if isinstance(attention, ConvAttention) and attention.axes == 1 else ""
        raise SizeError(
            f"the attention '{name}' cannot be causal as it is built, as it must be here. Take one of {able}{also}."
        )
    if model.memory and not attention.segments:
        raise SizeError(
            f"the attention '{name}' sees no memory, and this SegmentLM has one of {model.memory}. Take one of {able}, "
            "or memory=0."
        )
    position = getattr(attention.kernel, "position", None)
    if isinstance(position, TablePositions) and position.reach <= model.memory:
        raise SizeError(
            f"reach={position.reach} is not more than memory={model.memory}: the oldest tokens would have no position. "
            f"Build it with a reach of at least {model.memory} and the length of a segment."
        )


def newest(memory: Float[Tensor, "b m D"] | None, x: Float[Tensor, "b n D"], most: int) -> Float[Tensor, "b k D"]:
    """What is remembered after a segment: the last tokens of what was and what is new, without their gradient."""
    whole = x if memory is None else torch.cat([memory, x], 1)
    return whole[:, max(0, whole.shape[1] - most) :].detach()


def noam(update: int, width: int, warmup: int = 2000, factor: float = 1.0) -> float:
    r"""The learning rate of an update, counted from 1: up, then down with the root of the time.

    .. math:: \eta_t = \text{factor}\cdot D^{-1/2}\min(t^{-1/2},\ t\cdot\text{warmup}^{-3/2})

    As a schedule of torch: ``LambdaLR(Adam(…, lr=1.0), lambda done: noam(done + 1, width))``. Reference: Vaswani et al.
    (2017), arXiv 1706.03762, eq. 3.
    """
    return factor * width**-0.5 * min(update**-0.5, update * warmup**-1.5)
