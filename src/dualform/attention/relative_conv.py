r"""Attention between convolved heads: MDHA, and with relative scores RCMHA.

After their projections, queries, keys and values each pass through a depth-wise convolution over the tokens that only
looks back, either the same one in all heads or one per head:

.. math:: \mathrm{DW}(y)_t = \beta + \sum_{s=0}^{k-1} w_s \odot y_{t-(k-1)+s},\qquad y_t = 0 \text{ for } t < 0

References: So et al. (2021), Primer, arXiv 2109.08668 (MDHA); Sugiharto, Aradea, Mubarok (2023), arXiv 2308.03429
(RCMHA), of which the abstract and the released code were available. The abstract describes a convolution of the input
embedding; the released code, and this module, convolve the projections.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from dualform.arguments import one_of, whole_number

from .heads import AttentionKernel, EarlierTokens, MultiHead, Projected
from .masked_attention import Mode
from .pairs import Padding, zero_padding
from .relative import PositionName, RelativeSoftmaxKernel
from .softmax import SoftmaxKernel

Sharing = Literal["channel", "head"]
Init = Literal["default", "primer", "identity"]
QueryContext = Literal["memory", "segment"]


class LookingBack(nn.Module):
    """A depth-wise convolution over the tokens that only looks back; its last tap is the current token.

    ``sharing`` "channel": one kernel for each channel of a head, shared by all heads; "head": one for each channel of a
    token. ``init`` "default": torch's; "primer": 0.5 for the current token and 0.5/k for each earlier one; "identity".
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
        """Mix each token with those before it."""
        x = F.pad(x, (0, 0, self.past, 0))
        if self.sharing == "head":
            return self.conv(x.mT).mT
        return self.conv(x.unflatten(-1, (self.heads, -1)).permute(0, 3, 2, 1)).permute(0, 3, 2, 1).flatten(-2)


class ConvolvedAttention(MultiHead):
    """MDHA: softmax attention between convolved queries, keys and values.

    Convolutions look back, whether the layer is causal or not; padding tokens count as zeros. If a segment follows
    remembered tokens, keys, values and queries are convolved over both, so that two segments give the same as one (as
    long as nothing is forgotten: the oldest remaining tokens have nothing before them). ``query_context="segment"``
    convolves queries over the segment only, as the released code of RCMHA does; ``mode="reference"`` always does so.
    The defaults of ``sharing``, ``conv_bias`` and ``init`` are those of that code; Primer uses "head", False and
    "primer". ``weigh`` is the attention kernel (None: softmax); with one that is neither softmax nor relative, the
    layer takes no segments.
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
            q = zero_padding(q, padding[:, -x.shape[1] :])
        k, v = zero_padding(k, padding), zero_padding(v, padding)
        return self.query_conv(q)[:, -n:], self.key_conv(k), self.value_conv(v)

    def before_next(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """The last projected queries, keys and values, as many as a convolution looks back."""
        return ((min(tokens, self.query_conv.past), self.width),) * 3

    def continued(self, x: Tensor, before: EarlierTokens) -> tuple[Projected, EarlierTokens]:
        """Queries, keys and values of new tokens, and the last inputs of the convolutions."""
        q, k, v = super().projected(x, x, None, True)
        if before:
            q, k, v = (torch.cat([old, new], 1) for old, new in zip(before, (q, k, v), strict=True))
        n, past = x.shape[1], self.query_conv.past
        after = tuple(tokens[:, max(0, tokens.shape[1] - past) :] for tokens in (q, k, v))
        return (self.query_conv(q)[:, -n:], self.key_conv(k)[:, -n:], self.value_conv(v)[:, -n:]), after

    def extra_repr(self) -> str:
        """The options of ``Heads`` and ``query_context``."""
        return f"{super().extra_repr()}, query_context={self.query_context!r}"


class RelativeConvAttention(ConvolvedAttention):
    """RCMHA: the convolutions of MDHA with the scores of relative attention, and the options of both."""

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
