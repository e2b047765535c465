"""Snapshots: tensors that were stored whole (the rest, and at the end all parameters), and when they are known."""

from collections.abc import Callable, Mapping

from torch import Tensor

from dualform.errors import HorizonError

from .format import Manifest


class Snapshots:
    """The tensors ``<name>@<step>`` of a memory.

    The rest is checked after every ``snapshot_every``-th step and after the last step of each shard, and what changed
    since the previous check is stored. So a tensor without a snapshot between step s and a later check was the same at
    both.
    """

    def __init__(self, manifest: Manifest, read: Callable[[str], Mapping[str, Tensor]]) -> None:
        self._every = manifest.snapshot_every
        self._only_ends = manifest.run_log is not None and manifest.run_log.only
        self._checks = {shard.last for shard in manifest.shards}
        self._snapshots: dict[str, dict[int, Tensor]] = {}
        for shard in manifest.shards:
            file = shard.file("snapshots")
            for key, tensor in read(file).items() if file else ():
                name, step = key.rsplit("@", 1)
                if int(step) <= shard.last:
                    self._snapshots.setdefault(name, {})[int(step)] = tensor

    def has(self, name: str, step: int) -> bool:
        """Whether there is a snapshot of a tensor at exactly this step."""
        return step in self._snapshots.get(name, {})

    @property
    def steps(self) -> list[int]:
        """The steps that have a snapshot of any tensor."""
        return sorted({step for snapshots in self._snapshots.values() for step in snapshots if step})

    def last(self, name: str, step: int) -> Tensor | None:
        """The last snapshot of a tensor up to a step; None if only its initial value is known."""
        snapshots = self._snapshots.get(name, {})
        return snapshots.get(max((s for s in snapshots if s <= step), default=0))

    def need(self, name: str, step: int) -> None:
        """Raise an error if a tensor may have changed between its last snapshot and ``step``."""
        snapshots = self._snapshots.get(name, {})
        before = max((s for s in snapshots if s <= step), default=0)
        after = min((s for s in snapshots if s > step), default=None)
        if before == step:
            return
        if self._only_ends:
            if step in self.steps and not snapshots:
                return  # it never changes
            raise HorizonError(
                f"the memory holds the weights of steps {[0, *self.steps]} only, since it was recorded with "
                'keep="replay". Run it again for others: run = memory.replay(model, losses, data); run.at(step).'
            )
        if after is None:
            return
        checks = {*self._checks, -(-step // self._every) * self._every}
        if not any(step <= check < after for check in checks):
            raise HorizonError(
                f"'{name}' was kept at every {self._every}th step only, so the whole model of step {step} is not "
                f"known. Ask for step {before} or {after}, or record with snapshot_every=1."
            )
