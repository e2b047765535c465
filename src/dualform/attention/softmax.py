"""Multi-head softmax attention (Vaswani et al. 2017, arXiv 1706.03762), on torch's fused kernel."""

from jaxtyping import Float
from torch import Tensor

from .core import MultiHead, Padding, attend, attention_weights


class SoftmaxAttention(MultiHead):
    r"""Attention as everybody knows it: :math:`h_i = \sum_j \mathrm{softmax}_j(q_i^\top k_j/\sqrt d)\, v_j`.

    As a support vector expansion (Nguyen et al. 2023, arXiv 2406.13781, Theorem 1) the keys are training inputs and the
    values their dual variables.
    """

    def head_outputs(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> Float[Tensor, "b H n d"]:  # fmt: skip
        """What each head gives, before the heads are merged."""
        q, k, v = self.projected(x, x if context is None else context)
        return attend(q, k, v, padding=padding, causal=causal, dropout=self.drop)

    def weights(
        self, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *, padding: Padding = None,
        causal: bool = False,
    ) -> Float[Tensor, "b H n m"]:  # fmt: skip
        """How much each token attends to each other one, head by head."""
        q, k, _ = self.projected(x, x if context is None else context)
        return attention_weights(q, k, padding=padding, causal=causal)
