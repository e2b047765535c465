r"""Attention between convolved heads: MDHA, and with relative scores RCMHA.

Behind their projections queries, keys and values each go through a depth-wise convolution over the tokens that looks
back alone, the same or another one in each head:

.. math:: \mathrm{DW}(y)_t = \beta + \sum_{s=0}^{k-1} w_s \odot y_{t-(k-1)+s},\qquad y_t = 0 \text{ for } t < 0

References: So et al. (2021), Primer, arXiv 2109.08668 (MDHA); Sugiharto, Aradea, Mubarok (2023), arXiv 2308.03429
(RCMHA), of which the abstract and the released code were at hand. The abstract speaks of convolving the input
embedding; the code, and so this, convolves the projections.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dualform.arguments import one_of, whole_number

from .heads import AttentionKernel, EarlierTokens, MultiHead, Projected
from .masked_attention import Mode
from .pairs import Padding, blanked
from .relative import PositionName, RelativeSoftmaxKernel
from .softmax import SoftmaxKernel

Sharing = Literal["channel", "head"]
Init = Literal["default", "primer", "identity"]
QueryContext = Literal["memory", "segment"]


class LookingBack(nn.Module):
    """A depth-wise convolution over the tokens that looks back alone; the last tap is "now".

    ``sharing`` "channel": one kernel for each number of a head, the same in all heads; "head": for each number of a
    token. ``init`` "default": as torch begins; "primer": 0.5 for now and 0.5/k for each step back; "identity".
    """

    def __init__(self, width: int, heads: int, kernel: int, *, sharing: Sharing, bias: bool, init: Init) -> None:
        super().__init__()
        self.heads, self.past, size = heads, whole_number("kernel", kernel, 1) - 1, width // heads
        self.sharing: Sharing = one_of("sharing", sharing, ("channel", "head"))
        one_of("init", init, ("default", "primer", "identity"))
        self.conv = (
            nn.Conv2d(size, size, (1, kernel), groups=size, bias=bias) if sharing == "channel"
            else nn.Conv1d(width, width, kernel, groups=width, bias=bias)
        )  # fmt: skip
        if init != "default":
            with torch.no_grad():
                self.conv.weight.fill_(0.5 / kernel if init == "primer" else 0.0)
                self.conv.weight[..., -1] = 0.5 if init == "primer" else 1.0
                if self.conv.bias is not None:
                    self.conv.bias.zero_()

    def forward(self, x: Float[Tensor, "b n D"]) -> Float[Tensor, "b n D"]:
        """Each token with those before it."""
        x = F.pad(x, (0, 0, self.past, 0))
        if self.sharing == "head":
            return self.conv(x.mT).mT
        return self.conv(x.unflatten(-1, (self.heads, -1)).permute(0, 3, 2, 1)).permute(0, 3, 2, 1).flatten(-2)


class ConvolvedAttention(MultiHead):
    """MDHA: softmax attention between convolved queries, keys and values.

    Convolutions look back, whether it is causal or not; padded tokens count as zeros. Where a segment follows on what
    is remembered, keys and values are convolved over both, and so are queries, which makes two segments the same as
    one (as long as nothing is forgotten: the oldest tokens that are left have nothing before them).
    ``query_context="segment"`` convolves queries over the segment alone, as the released code of RCMHA does; so does
    ``mode="reference"``, whatever else is said. ``sharing``, ``conv_bias`` and ``init`` are by default as in that code;
    those of Primer are "head", False and "primer". ``weigh`` is the kernel that weighs keys (None: a softmax); with
    others than softmax and relative ones it takes no segments.
    """

    segments: bool = True

    def __init__(
        self, width: int, heads: int, *, kernel: int = 3, sharing: Sharing = "channel", conv_bias: bool = True,
        init: Init = "default", query_context: QueryContext = "memory", mode: Mode = "clean",
        weigh: AttentionKernel | None = None, dropout: float = 0.0, bias: bool = True, qk_bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(width, heads, weigh or SoftmaxKernel(), dropout=dropout, bias=bias, qk_bias=qk_bias)
        self.segments = isinstance(self.kernel, SoftmaxKernel | RelativeSoftmaxKernel)
        one_of("query_context", query_context, ("memory", "segment"))
        reference = one_of("mode", mode, ("clean", "reference")) == "reference"
        self.query_context: QueryContext = "segment" if reference else query_context
        self.query_conv, self.key_conv, self.value_conv = (
            LookingBack(width, heads, kernel, sharing=sharing, bias=conv_bias, init=init) for _ in range(3)
        )

    def projected(self, x: Tensor, context: Tensor, padding: Padding, causal: bool) -> Projected:
        """Queries, keys and values, convolved."""
        n, remembered = x.shape[1], context.shape[1] - x.shape[1]
        follows = causal and remembered > 0
        if follows and self.query_context == "memory":
            x = torch.cat([context[:, max(0, remembered - self.query_conv.past) : remembered], x], 1)
        q, k, v = super().projected(x, context, padding, causal)
        if padding is not None and (causal or x is context):
            q = blanked(q, padding[:, -x.shape[1] :])
        k, v = blanked(k, padding), blanked(v, padding)
        return self.query_conv(q)[:, -n:], self.key_conv(k), self.value_conv(v)

    def before_next(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """Of queries, keys and values the last tokens, as many as a convolution looks back."""
        return ((min(tokens, self.query_conv.past), self.width),) * 3

    def continued(self, x: Tensor, before: EarlierTokens) -> tuple[Projected, EarlierTokens]:
        """Queries, keys and values of new tokens, and the last inputs of the convolutions."""
        q, k, v = super().projected(x, x, None, True)
        if before:
            q, k, v = (torch.cat([old, new], 1) for old, new in zip(before, (q, k, v), strict=True))
        n, past = x.shape[1], self.query_conv.past
        after = tuple(each[:, max(0, each.shape[1] - past) :] for each in (q, k, v))
        return (self.query_conv(q)[:, -n:], self.key_conv(k)[:, -n:], self.value_conv(v)[:, -n:]), after

    def extra_repr(self) -> str:
        """Also what queries are convolved over."""
        return f"{super().extra_repr()}, query_context={self.query_context!r}"


class RelativeConvAttention(ConvolvedAttention):
    """RCMHA: both the convolutions of MDHA and the scores of relative attention, with the options of both."""

    def __init__(
        self, width: int, heads: int, *, kernel: int = 3, sharing: Sharing = "channel", conv_bias: bool = True,
        init: Init = "default", query_context: QueryContext = "memory", mode: Mode = "clean",
        pos: PositionName = "table", reach: int = 512, dropout: float = 0.0, bias: bool = True, qk_bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            width, heads, kernel=kernel, sharing=sharing, conv_bias=conv_bias, init=init, query_context=query_context,
            mode=mode, weigh=RelativeSoftmaxKernel(width, heads, pos=pos, reach=reach), dropout=dropout, bias=bias,
            qk_bias=qk_bias,
        )  # fmt: skip
