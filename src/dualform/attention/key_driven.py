r"""Key-driven grouped-query attention (Khan et al. 2024, arXiv 2408.08454): larger keys get more query heads.

.. math:: a = \mathrm{alloc}(n_1, …, n_G),\qquad n_g = \|K_g\|_F

with alloc of :func:`~dualform.attention.allocation.key_driven`. In training and evaluation alike every pass decides
anew, over all tokens, so there is no causal variant. The body of the paper was not at hand; this is what its released
code does, but for what ``mode`` says.
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
    """KDGQA. ``least`` query heads go to each key/value head before norms count; with 0 the smallest mostly gets none.

    "clean": each example has an allocation of its own, so what comes out never depends on the others of its batch.
    "reference", as released: norms are summed over the batch, and one allocation is for all; where norms are equal
    that code does not end, and this raises an error (clean shares evenly).
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
                f"least={least} for each of {self.kv_heads} groups is more than {heads} heads: it is at most "
                f"{heads // self.kv_heads}."
            )

    @property
    def ordered(self) -> bool:
        """All tokens decide."""
        return False

    def decided(self, k: Float[Tensor, "b G m d"], padding: Padding, causal: bool) -> Int[Tensor, "#b G"]:
        """By the norms of the keys."""
        if causal:
            raise SizeError(
                "the keys of all tokens decide which heads share them, so the future would leak: 'kdgqa' is not "
                "causal. Take 'dgqa', whose allocation comes of earlier passes."
            )
        norms = head_norms(k, padding)
        if self.mode == "clean" or not len(k):
            return key_driven(norms, self.heads, self.least)
        norms = norms.sum(0, keepdim=True)
        if not bool(norms.isfinite().all()):
            raise SizeError(
                f"the norms of the keys are {norms.flatten().tolist()}: not all of them are finite. Look at what the "
                "layer is given; mode='clean' shares evenly where a norm is no number."
            )
        if not bool(norms.amax() > norms.amin()):
            raise SizeError(
                f"the keys of all {self.kv_heads} groups are of one size ({norms.flatten()[0]:g}): their shares are "
                "0/0, and the released code does not end. mode='clean' shares evenly."
            )
        return key_driven(norms, self.heads, self.least, eps=0.0)

    def extra_repr(self) -> str:
        """Also how it allocates."""
        return f"{super().extra_repr()}, least={self.least}, mode={self.mode!r}"
