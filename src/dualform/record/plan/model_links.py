"""The links between modules, children and parameters of a model: was one replaced since recording began?"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class ModelLinks:
    """The links from modules to their children and parameters when recording began. ``tensors`` are the parameters and
    buffers by name.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self.model = model
        self._parameters = {name: t for name, t in tensors.items() if isinstance(t, nn.Parameter)}
        tables: list[Mapping[str, Any]] = [
            table for module in model.modules() for table in (module._modules, module._parameters)
        ]
        self._links = [(table, key, value) for table in tables for key, value in table.items() if value is not None]

    def same(self) -> bool:
        """Whether every link is unchanged. Cheap enough for every step; an added link is not noticed."""
        return all(table.get(key) is value for table, key, value in self._links)

    def replaced(self) -> list[str]:
        """The parameters that were removed, or whose place another tensor has taken."""
        now = self._now()
        return [name for name, parameter in self._parameters.items() if now.get(name) is not parameter]

    def added(self) -> list[str]:
        """The parameters that were added since recording began."""
        first = {id(parameter) for parameter in self._parameters.values()}  # some have several names
        return [name for name, p in self._now().items() if name not in self._parameters and id(p) not in first]

    def name_of(self, parameter: Tensor) -> str | None:
        """The present name of a parameter in the model."""
        return next((name for name, present in self._now().items() if present is parameter), None)

    def _now(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters(remove_duplicate=False))
