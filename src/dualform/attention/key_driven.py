r"""Key-driven grouped-query attention (Khan et al. 2024, arXiv 2408.08454): larger keys get more query heads.

.. math:: a = \mathrm{alloc}(n_1, …, n_G),\qquad n_g = \|K_g\|_F

with alloc of :func:`~dualform.attention.allocation.key_driven`. Every pass, in training and in evaluation, computes a
new allocation from all tokens, so there is no causal variant. The body of the paper was not available; this follows its
released code, with the differences that ``mode`` describes.
"""

from jaxtyping import Float, Int
from torch import Tensor

from dualform.arguments import one_of, whole_number
from dualform.errors import SizeError

from .allocating import Allocating
from .allocation import head_norms, key_driven
from .masked_attention import Mode
from .pairs import Padding


class KeyDrivenAttention(Allocating):
    """KDGQA. Each key/value head first gets ``least`` query heads; with 0 the one of smallest norm usually gets none.

    "clean": each example has an allocation of its own, so its output never depends on the rest of the batch.
    "reference", as released: norms are summed over the batch, and all examples share one allocation; for equal norms
    the released code does not terminate, and this raises an error ("clean" then allocates evenly).
    """

    segments: bool = False

    def __init__(
        self, width: int, heads: int, *, groups: int | None = None, least: int = 0, mode: Mode = "clean",
        dropout: float = 0.0, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(width, heads, groups=groups, dropout=dropout, bias=bias)
        self.mode, self.least = one_of("mode", mode, ("clean", "reference")), whole_number("least", least)
        if least * self.kv_heads > heads:
            raise SizeError(
                f"least={least} for each of {self.kv_heads} groups needs more than {heads} heads: it can be at most "
                f"{heads // self.kv_heads}."
            )

    @property
    def ordered(self) -> bool:
        """False: the allocation depends on all tokens."""
        return False

    def decided(self, k: Float[Tensor, "b G m d"], padding: Padding, causal: bool) -> Int[Tensor, "#b G"]:
        """The allocation by the norms of the keys."""
        if causal:
            raise SizeError(
                "the allocation depends on the keys of all tokens, so the future would leak: 'kdgqa' is not causal. "
                "Use 'dgqa', whose allocation comes from earlier passes."
            )
        norms = head_norms(k, padding)
        if self.mode == "clean" or not len(k):
            return key_driven(norms, self.heads, self.least)
        norms = norms.sum(0, keepdim=True)
        if not bool(norms.isfinite().all()):
            raise SizeError(
                f"the norms of the keys are {norms.flatten().tolist()}: not all of them are finite. Check the layer's "
                "inputs; mode='clean' allocates evenly where a norm is not finite."
            )
        if not bool(norms.amax() > norms.amin()):
            raise SizeError(
                f"the keys of all {self.kv_heads} groups have the same norm ({norms.flatten()[0]:g}): their shares are "
                "0/0, and the released code does not terminate. mode='clean' allocates evenly."
            )
        return key_driven(norms, self.heads, self.least, eps=0.0)

    def extra_repr(self) -> str:
        """The options of ``GroupedQueryAttention`` and those of the allocation."""
        return f"{super().extra_repr()}, least={self.least}, mode={self.mode!r}"
