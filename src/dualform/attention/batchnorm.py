r"""Attention-BN: a batch normalisation layer in the primal (Nguyen et al. 2023, arXiv 2406.13781).

Keys and queries are centred and scaled by the statistics of the keys, per head and feature, over the tokens of a
sequence. What is constant in j cancels in the softmax, so only the query needs changing, and fused kernels stay in use:

.. math:: \tilde q_i = (q_i - \beta\mu) \odot \frac{1}{\sigma^2 + \varepsilon},\qquad
    h_i = \sum_j \mathrm{softmax}_j(\tilde q_i^\top k_j/\sqrt d)\, v_j

The paper's exact formula was not available: β, ``use_var`` and ε are options, with strict batch normalisation (β = 1)
as the default.
"""

from .heads import AttentionKernel, MultiHead
from .norm import KeyNorm
from .softmax import SoftmaxKernel


class BatchNormAttention(MultiHead):
    """Attention-BN. It adds no parameters; with ``beta=0, use_var=False`` it is the kernel's plain attention.

    ``learnable_beta`` makes β a parameter, one number per head (an extension).
    """

    def __init__(
        self, width: int, heads: int, *, kernel: AttentionKernel | None = None, beta: float = 1.0, use_var: bool = True,
        eps: float = 1e-5, learnable_beta: bool = False, dropout: float = 0.0, bias: bool = True,
    ) -> None:  # fmt: skip
        norm = KeyNorm(heads, beta=beta, use_var=use_var, eps=eps, learnable_beta=learnable_beta)
        super().__init__(width, heads, kernel or SoftmaxKernel(), norm=norm, dropout=dropout, bias=bias)
