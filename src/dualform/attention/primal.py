r"""Make your own attention: from a map g in the primal layer (Nguyen et al. 2023, arXiv 2406.13781).

.. math:: f(x) = \frac{W\Phi(g(x))}{h(g(x))}\quad\Longrightarrow\quad
    h_i = \sum_j \mathrm{softmax}_j\big(g(q_i)^\top g(k_j)/\sqrt d\big)\, v_j

The recipe of the paper: write a layer with g, fit it at the keys, and read its support vector expansion at the queries.
With g a batch normalisation this is Attention-BN, with g a convolution Attention-Conv.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from dualform.errors import SizeError

from .heads import AttentionKernel, HeadGroup, MultiHead
from .pairs import Padding
from .softmax import SoftmaxKernel

PrimalMap = Callable[[Tensor], Tensor]
"""From (b, H, n, d) to (b, H, n, e): queries or keys of all heads."""


class PrimalAttention(MultiHead):
    """Multi-head attention between g(q) and g(k): the same map g at queries and keys.

    ``g`` is a function, or a module whose parameters are then trained too. It is applied to one tensor at a time,
    including padding tokens. If it mixes tokens, it must not look ahead in a causal layer.
    """

    def __init__(
        self, g: PrimalMap, width: int, heads: int, *, kernel: AttentionKernel | None = None, dropout: float = 0.0,
        bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(width, heads, kernel or SoftmaxKernel(), dropout=dropout, bias=bias)
        self.g = g

    def groups(self, x: Tensor, context: Tensor, padding: Padding, causal: bool) -> Iterator[HeadGroup]:
        """All heads as one group, with g applied to queries and keys."""
        for group in super().groups(x, context, padding, causal):
            pairs = replace(group.pairs, k=self._mapped(group.pairs.k))
            yield group._replace(q=self._mapped(group.q), pairs=pairs)

    def _mapped(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n e"]:
        mapped = self.g(x)
        if mapped.shape[:-1] != x.shape[:-1]:
            raise SizeError(
                f"g makes {tuple(mapped.shape)} of {tuple(x.shape)} (batch, heads, tokens, channels): it must keep all "
                "axes but the last."
            )
        return mapped


def from_primal(g: PrimalMap, width: int, heads: int, **options: Any) -> PrimalAttention:
    """An attention layer from a map g: ``from_primal(torch.tanh, 64, 8)``. Options are those of ``PrimalAttention``."""
    return PrimalAttention(g, width, heads, **options)
