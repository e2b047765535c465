"""What was kept whole (the rest, and at the end all parameters), and at which steps it is therefore known."""

from collections.abc import Callable, Mapping

from torch import Tensor

from dualform.errors import HorizonError

from .format import Manifest


class Snapshots:
    """The tensors ``<name>@<step>`` of a memory.

    The rest is looked at after every ``snapshot_every``-th step and after the last step of each shard, and what changed
    since the look before is kept. So a tensor that was kept at no look from s on is the same at s and at that look.
    """

    def __init__(self, manifest: Manifest, read: Callable[[str], Mapping[str, Tensor]]) -> None:
        self._every = manifest.snapshot_every
        self._looks = {shard.last for shard in manifest.shards}
        self._kept: dict[str, dict[int, Tensor]] = {}
        for shard in manifest.shards:
            file = shard.file("snapshots")
            for key, tensor in read(file).items() if file else ():
                name, step = key.rsplit("@", 1)
                if int(step) <= shard.last:
                    self._kept.setdefault(name, {})[int(step)] = tensor

    def has(self, name: str, step: int) -> bool:
        """Whether a tensor was kept at this very step."""
        return step in self._kept.get(name, {})

    @property
    def steps(self) -> list[int]:
        """The steps after which anything was kept."""
        return sorted({step for kept in self._kept.values() for step in kept if step})

    def last(self, name: str, step: int) -> Tensor | None:
        """A tensor as it was last kept up to a step; None if that was when recording began."""
        kept = self._kept.get(name, {})
        return kept.get(max((s for s in kept if s <= step), default=0))

    def need(self, name: str, step: int) -> None:
        """Say so if a tensor may have changed between the last time it was kept and ``step``."""
        kept = self._kept.get(name, {})
        before = max((s for s in kept if s <= step), default=0)
        after = min((s for s in kept if s > step), default=None)
        if before == step or after is None:
            return
        looks = {*self._looks, -(-step // self._every) * self._every}
        if not any(step <= look < after for look in looks):
            raise HorizonError(
                f"'{name}' was kept at every {self._every}th step only, so the whole model of step {step} is not "
                f"known; ask for step {before} or {after}, or record with snapshot_every=1."
            )
