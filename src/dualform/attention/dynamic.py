r"""Dynamic grouped-query attention (Khan et al. 2024, arXiv 2408.08454): the allocation is held between updates.

.. math:: a = \mathrm{round}(H\, w/\textstyle\sum w),\qquad w = |n_t - n_{t-1}| \;(\text{diff})\quad\text{or}\quad
    w = e_t = \beta n_t + (1 - \beta)\, e_{t-1} \;(\text{ema})

n are the norms of the keys, head by head, at every ``window``-th pass of training. β weighs the new value, as in the
released code, the reverse of what is usual.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dualform.arguments import one_of, whole_number
from dualform.errors import SizeError

from .allocating import Allocating, going_back
from .allocation import head_norms, proportional, repaired_at_random, rounding, uniform
from .masked_attention import Mode, wide
from .pairs import Padding

UpdateKind = Literal["diff", "ema"]


class DynamicAttention(Allocating):
    """DGQA. Buffers: ``allocation``, which is in use; ``cache``, norms of before; ``passes`` of training so far.

    "clean": norms are means over a batch. An update is ``waiting`` until the next pass, so no query is answered by an
    allocation that later tokens had a say in: causal attention may be trained with it. All processes of a data-parallel
    training use that of the first, as torch sends buffers round before a pass (under ``no_sync()`` it does not, and
    they differ). Gradient checkpointing computes again what it computed, unless another pass with an update lies
    between a pass and its way back: then with the newer allocation. Evaluation holds the allocation, which is saved.
    Heads are rounded by largest remainders. "diff" takes the norms themselves where nothing changed, and at first.

    "reference", as released: norms are sums over a batch; an update counts at once; the cache is (cache + norms) /
    window after it; passes begin anew at ``begin_epoch()``. Evaluation updates at every call, and leaves the last norms
    as cache: what it gives depends on what was evaluated before. Rounding is repaired at random, and the allocation is
    not saved, so ``memory.at(step)`` of a recording does not bring it back. Weights and expansions show the allocation
    of the last pass.

    A state dict without allocations, such as that of ``gqa``, begins anew: evenly, with no pass behind it.
    """

    allocation: Tensor
    waiting: Tensor
    cache: Tensor
    passes: Tensor

    def __init__(
        self, width: int, heads: int, *, groups: int | None = None, kind: UpdateKind = "ema", window: int = 300,
        beta: float = 0.9, mode: Mode = "clean", dropout: float = 0.0, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(width, heads, groups=groups, dropout=dropout, bias=bias)
        self.kind: UpdateKind = one_of("kind", kind, ("diff", "ema"))
        self.mode: Mode = one_of("mode", mode, ("clean", "reference"))
        self.window, self.beta = whole_number("window", window, 1), beta
        if not 0 <= beta <= 1:
            raise SizeError(f"beta={beta} must lie in [0, 1]: it is the share of the new norms.")
        for name, each in fresh(heads, self.kv_heads).items():
            self.register_buffer(name, each, persistent=mode == "clean" or name == "cache")
        self.register_load_state_dict_pre_hook(begin_without_allocations)

    @property
    def ordered(self) -> bool:
        """Where an update waits for the next pass."""
        return self.mode == "clean"

    def begin_anew(self) -> None:
        """Forget the past: an even allocation, with no pass behind it."""
        with self.allocation.device:
            new = fresh(self.heads, self.kv_heads)
        for name, each in new.items():
            self.get_buffer(name).copy_(each)

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
        if self.passing and (self.training or self.mode == "reference") and not going_back():
            if self.mode == "clean":
                self._pass(k, padding)
            else:
                self._pass_as_released(k, padding)
        return self.allocation.unsqueeze(0)

    def _pass(self, k: Tensor, padding: Padding) -> None:
        self.allocation.copy_(self.waiting)
        if int(self.passes) % self.window == 0:
            norms = head_norms(k, padding).mean(0)
            before = self.cache.to(norms.dtype)
            if self.kind == "ema":  # the first norms that there are stand for themselves
                weights = after = self.beta * norms + (1 - self.beta) * before if bool(before.any()) else norms
            else:
                weights, after = (norms - before).abs(), norms
                weights = weights if bool(weights.sum() > rounding(norms) * norms.sum()) else norms
            if bool(weights.isfinite().all() & (weights.sum() > 0)):  # or there is nothing to go by
                self.waiting.copy_(proportional(weights, self.heads))
                self.cache.copy_(after)
        self.passes += 1

    def _pass_as_released(self, k: Tensor, padding: Padding) -> None:
        if len(k) and (not self.training or int(self.passes) % self.window == 0):
            norms = head_norms(k, padding).sum(0)
            cache = self.cache.to(norms.dtype)
            weights = (cache - norms).abs() if self.kind == "diff" else self.beta * norms + (1 - self.beta) * cache
            self.allocation.copy_(repaired_at_random(weights, self.heads))
            self.waiting.copy_(self.allocation)  # which a clean layer may take over
            self.cache.copy_((cache + norms) / self.window if self.training else norms)
        self.passes += int(self.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """As torch moves and casts; but the cache stays in float32 at least, or rounding would pass for a change."""
        before = self.cache
        super()._apply(fn, recurse)
        dtype = torch.promote_types(self.cache.dtype, torch.float32)
        if dtype != self.cache.dtype:
            self.cache = before.to(self.cache.device, dtype)
        return self

    def extra_repr(self) -> str:
        """Also how it allocates."""
        return f"{super().extra_repr()}, kind={self.kind!r}, window={self.window}, mode={self.mode!r}"


def fresh(heads: int, groups: int) -> dict[str, Tensor]:
    """What a layer holds before its first pass."""
    even = uniform(heads, groups)
    passes = torch.zeros((), dtype=torch.int64)
    return {"allocation": even, "waiting": even.clone(), "cache": torch.zeros(groups), "passes": passes}


def begin_without_allocations(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: if it is of a layer without allocations, those of a new one are put in.

    What is not saved begins anew then too, and where it has no device yet.
    """
    weight = state.get(f"{prefix}key.weight")
    if weight is None:
        return
    with torch.device("cpu"):
        new = fresh(layer.heads, layer.kv_heads)
    new["cache"] = wide(new["cache"].to(weight.dtype))
    plain = not any(f"{prefix}{name}" in state for name in new)
    for name, each in new.items():
        if name in layer._non_persistent_buffers_set:
            if plain or layer.get_buffer(name).is_meta:
                setattr(layer, name, each.to(weight.device))
        elif plain:
            state[f"{prefix}{name}"] = each.to(weight.device)
