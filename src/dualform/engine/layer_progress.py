"""Progress of a pass over several layers: a slot of a large layer counts for more than one of a small layer."""

from collections.abc import Iterable

from dualform.progress import OnProgress
from dualform.store import Store
from dualform.types import LayerInfo


class LayerProgress:
    """Shares out the slots of all ``layers`` by the work that each layer takes, so that their sum stays the same.

    The work of a slot is the size of its layer's matrix: without this, a network whose first layer is the large one
    would seem to be half done when nearly all of the work is.
    """

    def __init__(self, store: Store, layers: Iterable[LayerInfo], watch: OnProgress | None) -> None:
        self.store, self.watch = store, watch
        slots = {layer.name: (store.slots(layer.name), _work(layer)) for layer in layers}
        work = sum(count * of_slot for count, of_slot in slots.values())
        self._factor = sum(count for count, _ in slots.values()) / work if work else 0.0
        self._done, self._told = 0.0, 0

    def of(self, layers: Iterable[LayerInfo]) -> OnProgress | None:
        """The progress for a part of the pass, which reads the slots of these layers together."""
        if self.watch is None:
            return None
        counts = {layer.name: (self.store.slots(layer.name), _work(layer)) for layer in layers}
        slots = sum(count for count, _ in counts.values())
        factor = self._factor * sum(count * of_slot for count, of_slot in counts.values()) / max(1, slots)

        def count(slots: int) -> None:
            assert self.watch is not None
            self._done += slots * factor
            whole = round(self._done) - self._told
            if whole:
                self._told += whole
                self.watch(whole)

        return count


def _work(layer: LayerInfo) -> int:
    return layer.d_in * layer.d_out + layer.key_size + layer.d_out
