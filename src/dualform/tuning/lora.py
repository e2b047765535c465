"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) in a backbone."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from dualform.arguments import whole_number
from dualform.errors import LayerNotFound

from .tuned import ModelT, frozen_copy


class LoRA(nn.Module):
    r"""A frozen linear layer with a learned low-rank update, :math:`Wx + \tfrac{\alpha}{r} B A x`. B starts at 0."""

    adapts = ("down", "up")

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / whole_number("rank", rank, 1)
        self.down = nn.Linear(base.in_features, rank, bias=False).to(base.weight)
        self.up = nn.Linear(rank, base.out_features, bias=False).to(base.weight)
        nn.init.zeros_(self.up.weight)

    @property
    def weight(self) -> Float[Tensor, "o i"]:
        """The weight of the equivalent linear layer."""
        return self.base.weight + self.scale * self.up.weight @ self.down.weight

    @property
    def bias(self) -> Float[Tensor, " o"] | None:
        """The bias of the frozen layer."""
        return self.base.bias

    def forward(self, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        """The output of the frozen layer plus the low-rank update."""
        return self.base(x) + self.scale * self.up(self.down(x))


def with_lora(model: ModelT, rank: int = 4, *, alpha: float = 8.0, names: Sequence[str] = ("query", "value")) -> ModelT:
    """A frozen copy of a model in which the linear layers with these names have a learned low-rank update.

    Adapters that the model already has are kept and remain trainable.
    """
    adapted = frozen_copy(model)
    linear = [name for name, module in adapted.named_modules() if isinstance(module, nn.Linear)]
    replaced = [name for name in linear if _last(name) in names]
    last_names = sorted({_last(name) for name in linear})
    if missing := [name for name in names if name not in last_names]:
        raise LayerNotFound(f"no linear layer is called '{missing[0]}': there are {last_names}.")
    for name in replaced:
        base = adapted.get_submodule(name)
        assert isinstance(base, nn.Linear)
        setattr(adapted.get_submodule(name.rpartition(".")[0]), _last(name), LoRA(base, rank, alpha))
    return adapted


def _last(name: str) -> str:
    return name.rpartition(".")[2]
