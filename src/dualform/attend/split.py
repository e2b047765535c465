"""Parameters split by groups of slots: in one pass where numbers tell what a slot counts for, else by replay."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from dualform.memory import Store

from .parameters import explained_layers, initial_part, layer_sums
from .rebuild import add_up
from .replay import GroupOf, replay
from .stream import View, Watch


@dataclass(frozen=True)
class Split:
    """A parameter as a sum, in float64: what is left of the beginning, and what each group put into it."""

    initial: Float[Tensor, "..."]
    groups: Float[Tensor, "..."]

    @property
    def total(self) -> Float[Tensor, "..."]:
        """All of it."""
        return self.initial + self.groups.sum(0)


def split(
    store: Store, view: View, names: Iterable[str], *, group_of: GroupOf | None = None, groups: int = 1,
    watch: Watch | None = None,
) -> dict[str, Split]:  # fmt: skip
    """Split some explained parameters at the horizon, by groups of the slots that are shown (one group: all)."""
    wanted = list(names)
    shaped = [name for name in wanted if store.shaped(name)]
    found = {name: _nothing(store, view, name, groups) for name in wanted if name not in shaped}
    for layer in explained_layers(store):
        if view.horizon and any(name in found for name in layer.parameters):
            sums = layer_sums(store, layer, view.horizon, group_of=group_of, groups=groups)
            sums = {name: term for name, term in sums.items() if name in found}
            add_up(store, layer.name, view, list(sums.values()), watch)
            for name, term in sums.items():
                before = found[name]
                total = before.groups + term.as_parameter(store.parameters[name].shape)
                found[name] = Split(before.initial, total)
    for name, parts in replay(store, shaped, view, group_of=group_of, groups=groups, watch=watch).items():
        found[name] = Split(parts.initial, parts.groups)
    return {name: found[name] for name in wanted}


def _nothing(store: Store, view: View, name: str, groups: int) -> Split:
    initial = initial_part(store, name, view.horizon)
    return Split(initial, initial.new_zeros(groups, *initial.shape))
