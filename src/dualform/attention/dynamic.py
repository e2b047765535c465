r"""Dynamic grouped-query attention (Khan et al. 2024, arXiv 2408.08454): the allocation is held between updates.

.. math:: a = \mathrm{round}(H\, w/\textstyle\sum w),\qquad w = |n_t - n_{t-1}| \;(\text{diff})\quad\text{or}\quad
    w = e_t = \beta n_t + (1 - \beta)\, e_{t-1} \;(\text{ema})

n are the norms of the keys, head by head, at every ``window``-th pass of training. β weighs the new value, as in the
released code, the reverse of what is usual.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.errors import SizeError

from .allocating import Allocating
from .allocation import head_norms, proportional, repaired_at_random, uniform
from .core import Mode, chosen, whole_number
from .pairs import Padding

Kind = Literal["diff", "ema"]


class DynamicAttention(Allocating):
    """DGQA. Buffers: ``allocation``, which is in use; ``cache``, norms of before; ``passes`` of training so far.

    "clean": norms are means over a batch. An update is ``waiting`` until the next pass, so no query is answered by an
    allocation that later tokens had a say in (causal attention may be trained with it), all processes of a data-
    parallel training use that of the first, and gradient checkpointing computes again what it computed. Evaluation
    holds the allocation, which is saved. Heads are rounded by largest remainders. "diff" takes the norms themselves
    where nothing changed, and at first.

    "reference", as released: norms are sums over a batch; an update counts at once; the cache is (cache + norms) /
    window after it; passes begin anew at ``begin_epoch()``. Evaluation updates at every call, and leaves the last norms
    as cache: what it gives depends on what was evaluated before. Rounding is repaired at random, and the allocation is
    not saved. Weights and expansions show the allocation of the last pass.
    """

    allocation: Tensor
    waiting: Tensor
    cache: Tensor
    passes: Tensor

    def __init__(
        self, width: int, heads: int, *, groups: int | None = None, kind: Kind = "ema", window: int = 300,
        beta: float = 0.9, mode: Mode = "clean", dropout: float = 0.0, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(width, heads, groups=groups, dropout=dropout, bias=bias)
        self.kind: Kind = chosen("kind", kind, ("diff", "ema"))
        self.mode: Mode = chosen("mode", mode, ("clean", "reference"))
        self.window, self.beta = whole_number("window", window, 1), beta
        if not 0 <= beta <= 1:
            raise SizeError(f"beta={beta} must lie in [0, 1]: it is the share of the new norms.")
        for name in ("allocation", "waiting"):
            self.register_buffer(name, uniform(heads, self.kv_heads), persistent=mode == "clean")
        self.register_buffer("cache", torch.zeros(self.kv_heads))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64), persistent=mode == "clean")
        self.register_load_state_dict_pre_hook(begin_with_own)

    def begin_epoch(self) -> None:
        """Let the passes begin anew, as the released code does at every epoch. The clean mode counts on."""
        if self.mode == "reference":
            self.passes.zero_()

    @torch.no_grad()
    def decided(self, k: Float[Tensor, "b G m d"], padding: Padding, causal: bool) -> Int[Tensor, "1 G"]:
        """What is held, after an update where one is due."""
        if causal and self.mode == "reference":
            raise SizeError(
                "an update of mode='reference' counts at once, so the future would leak: it is not causal. The clean "
                "mode is."
            )
        if self.passing and (self.training or self.mode == "reference"):
            if self.mode == "clean":
                self._pass(k, padding)
            else:
                self._pass_as_released(k, padding)
        return self.allocation.unsqueeze(0)

    def _pass(self, k: Tensor, padding: Padding) -> None:
        self.allocation.copy_(self.waiting)
        passes = int(self.passes)
        if passes % self.window == 0:
            norms = head_norms(k, padding).mean(0)
            first, before = passes == 0, self.cache.to(norms.dtype)
            if self.kind == "ema":
                weights = after = norms if first else self.beta * norms + (1 - self.beta) * before
            else:
                weights, after = (norms - before).abs(), norms
                least = torch.finfo(norms.dtype).eps * norms.sum()
                weights = weights if bool(weights.sum() > least) else norms
            if bool(weights.isfinite().all() & (weights.sum() > 0)):  # or there is nothing to go by
                self.waiting.copy_(proportional(weights, self.heads))
                self.cache.copy_(after)
        self.passes += 1

    def _pass_as_released(self, k: Tensor, padding: Padding) -> None:
        if not self.training or int(self.passes) % self.window == 0:
            norms = head_norms(k, padding).sum(0)
            cache = self.cache.to(norms.dtype)
            weights = (cache - norms).abs() if self.kind == "diff" else self.beta * norms + (1 - self.beta) * cache
            self.allocation.copy_(repaired_at_random(weights, self.heads))
            self.cache.copy_((cache + norms) / self.window if self.training else norms)
        self.passes += int(self.training)

    def extra_repr(self) -> str:
        """Also how it allocates."""
        return f"{super().extra_repr()}, kind={self.kind!r}, window={self.window}, mode={self.mode!r}"


def begin_with_own(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: that of a layer without allocations leaves this one's as they are."""
    mine = {f"{prefix}{name}": each for name, each in layer.state_dict().items() if "." not in name}
    if not mine.keys() & state.keys():
        state |= mine
