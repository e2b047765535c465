r"""Attention-Conv1D and Attention-Conv2D: a convolution in the primal (Nguyen et al. 2023, arXiv 2406.13781).

.. math:: h_i = \sum_j \mathrm{softmax}_j\big((c * Q)_i^\top (c * K)_j/\sqrt d\big)\, v_j

c is a depthwise convolution over the tokens, one kernel for each channel of a token, without bias. It is initialised as
the delta kernel, so training starts from softmax attention. Queries and keys share it: the same map at training and
test inputs. The paper only names this layer; what is convolved and the kernel's size are arguments.
"""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dualform.arguments import one_of, whole_number
from dualform.errors import SizeError

from .heads import MultiHead
from .norm import KeyNorm
from .pairs import Padding, zero_padding
from .softmax import SoftmaxKernel
from .windows import Grid

ApplyTo = Literal["qk", "k", "qkv"]


class ConvAttention(MultiHead):
    """Softmax attention between convolved queries and keys.

    ``axes=2`` treats the tokens after ``class_tokens``, which stay unchanged, as a grid (``grid``; None: a square),
    ``axes=1`` as a sequence. ``one_sided`` convolutions of a sequence only look back, as causal attention requires.
    ``normalise`` applies Attention-BN after the convolution.
    """

    def __init__(
        self, width: int, heads: int, *, axes: Literal[1, 2] = 2, kernel: int = 3, apply_to: ApplyTo = "qk",
        one_sided: bool = False, grid: Grid = None, class_tokens: int = 0, normalise: bool = False, beta: float = 1.0,
        use_var: bool = True, eps: float = 1e-5, dropout: float = 0.0, bias: bool = True,
    ) -> None:  # fmt: skip
        norm = KeyNorm(heads, beta=beta, use_var=use_var, eps=eps) if normalise else None
        super().__init__(width, heads, SoftmaxKernel(), norm=norm, dropout=dropout, bias=bias)
        if not one_sided and whole_number("kernel", kernel, 1) % 2 == 0:
            raise SizeError(f"kernel={kernel} must be odd, so that it is centred on a token.")
        if axes not in (1, 2) or (one_sided and axes == 2):
            raise SizeError(
                f"axes={axes} with one_sided={one_sided}: axes is 1 (a sequence) or 2 (a grid), and a grid cannot be "
                "one_sided."
            )
        self.axes, self.side, self.grid = axes, kernel, grid
        self.one_sided, self.class_tokens = one_sided, whole_number("class_tokens", class_tokens)
        self.apply_to: ApplyTo = one_of("apply_to", apply_to, ("qk", "k", "qkv"))
        self.conv = self._delta()
        self.value_conv = self._delta() if apply_to == "qkv" else None

    @property
    def ordered(self) -> bool:
        """Whether the convolution only looks back, and no class tokens precede the sequence."""
        return self.one_sided and not self.class_tokens

    def projected(
        self, x: Tensor, context: Tensor, padding: Padding, causal: bool
    ) -> tuple[Float[Tensor, "b n D"], Float[Tensor, "b m D"], Float[Tensor, "b m D"]]:
        """Queries, keys and values, convolved."""
        if causal and self.axes == 2:
            raise SizeError("a grid has no order, so Attention-Conv2D is not causal. Use conv1d for sequences.")
        if causal and not self.ordered:
            raise SizeError(
                "this convolution looks ahead. Build it with one_sided=True (and no class tokens) for causal attention."
            )
        q, k, v = super().projected(x, context, padding, causal)
        if self.apply_to != "k":
            q = self._over_tokens(self.conv, q, padding if causal or context is x else None)
        k = self._over_tokens(self.conv, k, padding)
        if self.value_conv is not None:
            v = self._over_tokens(self.value_conv, v, padding)
        return q, k, v

    def _over_tokens(self, conv: nn.Module, x: Tensor, padding: Padding) -> Tensor:
        """Convolve the tokens after the class tokens. Padding tokens are zero, as are those beyond the end."""
        x = zero_padding(x, padding)
        first, rest = x[:, : self.class_tokens], x[:, self.class_tokens :].mT  # b D n
        if rest.shape[-1] == 0:
            return x
        half = self.side // 2
        if self.axes == 1:
            sides = (self.side - 1, 0) if self.one_sided else (half, half)
            rest = conv(nn.functional.pad(rest, sides))
        else:
            sides = (half,) * 4
            rest = conv(nn.functional.pad(rest.unflatten(-1, self._grid(rest.shape[-1])), sides)).flatten(-2)
        return torch.cat([first, rest.mT], 1)

    def _grid(self, tokens: int) -> tuple[int, int]:
        side = math.isqrt(tokens)
        grid = self.grid or (side, side)
        if grid[0] * grid[1] != tokens:
            raise SizeError(
                f"{tokens} tokens (after {self.class_tokens} class tokens) are no grid of {grid[0]} × {grid[1]}. Give "
                "grid=(height, width), or use conv1d for sequences."
            )
        return grid

    def _delta(self) -> Any:
        """A depthwise convolution that is initialised as the identity."""
        kind = nn.Conv1d if self.axes == 1 else nn.Conv2d
        conv = kind(self.width, self.width, self.side, groups=self.width, bias=False)
        nn.init.zeros_(conv.weight)
        with torch.no_grad():
            conv.weight[(slice(None), slice(None), *(-1 if self.one_sided else self.side // 2,) * self.axes)] = 1.0
        return conv
