r"""Dynamic grouped-query attention (Khan et al. 2024, arXiv 2408.08454): the allocation is constant between updates.

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

from .allocating import Allocating, in_backward_pass
from .allocation import head_norms, proportional, repaired_at_random, rounding, uniform
from .masked_attention import Mode, wide
from .pairs import Padding

UpdateKind = Literal["diff", "ema"]


class DynamicAttention(Allocating):
    """DGQA. Buffers: the ``allocation`` in use, the previous norms (``cache``) and the number of training ``passes``.

    "clean": norms are means over a batch. An update is stored in ``waiting`` until the next pass, so no allocation
    depends on tokens later than its queries: causal attention can be trained with it. All processes of a data-parallel
    training use the allocation of the first, since torch broadcasts buffers before a pass (not under ``no_sync()``,
    where they differ). Gradient checkpointing repeats the same computation, unless a pass with an update lies between a
    pass and its backward pass: then it uses the newer allocation. Evaluation does not change the allocation, which is
    saved. Heads are rounded by largest remainders. "diff" uses the norms themselves in the first update and where
    nothing has changed.

    "reference", as released: norms are sums over a batch; an update takes effect at once and sets the cache to
    (cache + norms) / window; ``begin_epoch()`` resets the count of passes. Evaluation updates at every call and stores
    the last norms in the cache, so its results depend on earlier evaluations. Rounding is corrected at random, and the
    allocation is not saved, so ``memory.at(step)`` of a recording does not restore it. ``weights`` and ``expansions``
    use the allocation of the last pass.

    Loading a state dict without allocations, such as that of ``gqa``, resets the layer to an even allocation.
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
        for name, buffer in initial_buffers(heads, self.kv_heads).items():
            self.register_buffer(name, buffer, persistent=mode == "clean" or name == "cache")
        self.register_load_state_dict_pre_hook(begin_without_allocations)

    @property
    def ordered(self) -> bool:
        """Whether an update waits for the next pass, as in the clean mode."""
        return self.mode == "clean"

    def reset_allocation(self) -> None:
        """Reset all buffers: an even allocation, and no passes so far."""
        with self.allocation.device:
            new = initial_buffers(self.heads, self.kv_heads)
        for name, buffer in new.items():
            self.get_buffer(name).copy_(buffer)

    def begin_epoch(self) -> None:
        """Reset the count of passes, as the released code does at every epoch. No effect in the clean mode."""
        if self.mode == "reference":
            self.passes.zero_()

    @torch.no_grad()
    def decided(self, k: Float[Tensor, "b G m d"], padding: Padding, causal: bool) -> Int[Tensor, "1 G"]:
        """The current allocation, after an update if one is due."""
        if causal and self.mode == "reference":
            raise SizeError(
                "an update of mode='reference' takes effect at once, so the future would leak: it is not causal. Use "
                "mode='clean', which is."
            )
        if self.passing and (self.training or self.mode == "reference") and not in_backward_pass():
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
            if self.kind == "ema":  # the first norms are the first average
                weights = after = self.beta * norms + (1 - self.beta) * before if bool(before.any()) else norms
            else:
                weights, after = (norms - before).abs(), norms
                weights = weights if bool(weights.sum() > rounding(norms) * norms.sum()) else norms
            if bool(weights.isfinite().all() & (weights.sum() > 0)):  # otherwise no allocation follows from them
                self.waiting.copy_(proportional(weights, self.heads))
                self.cache.copy_(after)
        self.passes += 1

    def _pass_as_released(self, k: Tensor, padding: Padding) -> None:
        if len(k) and (not self.training or int(self.passes) % self.window == 0):
            norms = head_norms(k, padding).sum(0)
            cache = self.cache.to(norms.dtype)
            weights = (cache - norms).abs() if self.kind == "diff" else self.beta * norms + (1 - self.beta) * cache
            self.allocation.copy_(repaired_at_random(weights, self.heads))
            self.waiting.copy_(self.allocation)  # for a clean layer that loads these buffers
            self.cache.copy_((cache + norms) / self.window if self.training else norms)
        self.passes += int(self.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move and cast as torch does, but keep the cache in float32 or wider: rounding would count as a change."""
        before = self.cache
        super()._apply(fn, recurse)
        dtype = torch.promote_types(self.cache.dtype, torch.float32)
        if dtype != self.cache.dtype:
            self.cache = before.to(self.cache.device, dtype)
        return self

    def extra_repr(self) -> str:
        """The options of ``GroupedQueryAttention`` and those of the allocation."""
        return f"{super().extra_repr()}, kind={self.kind!r}, window={self.window}, mode={self.mode!r}"


def initial_buffers(heads: int, groups: int) -> dict[str, Tensor]:
    """The buffers of a layer before its first pass."""
    even = uniform(heads, groups)
    passes = torch.zeros((), dtype=torch.int64)
    return {"allocation": even, "waiting": even.clone(), "cache": torch.zeros(groups), "passes": passes}


def begin_without_allocations(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Pre-hook of ``load_state_dict``: add the buffers of a new layer to a state dict that has none.

    Buffers that are not saved are then reset too, and so are those on the meta device.
    """
    weight = state.get(f"{prefix}key.weight")
    if weight is None:
        return
    with torch.device("cpu"):
        new = initial_buffers(layer.heads, layer.kv_heads)
    new["cache"] = wide(new["cache"].to(weight.dtype))
    plain = not any(f"{prefix}{name}" in state for name in new)
    for name, buffer in new.items():
        if name in layer._non_persistent_buffers_set:
            if plain or layer.get_buffer(name).is_meta:
                setattr(layer, name, buffer.to(weight.device))
        elif plain:
            state[f"{prefix}{name}"] = buffer.to(weight.device)
