"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) in a backbone."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from dualform.arguments import whole_number
from dualform.errors import LayerNotFound

from .tuned import ModelT, frozen_copy


class LoRA(nn.Module):
    r"""A frozen linear layer with a learned change of low rank: :math:`Wx + \tfrac{\alpha}{r} B A x`. B begins at 0."""

    adapts = ("down", "up")

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / whole_number("rank", rank, 1)
        self.down = nn.Linear(base.in_features, rank, bias=False).to(base.weight)
        self.up = nn.Linear(rank, base.out_features, bias=False).to(base.weight)
        nn.init.zeros_(self.up.weight)

    @property
    def weight(self) -> Float[Tensor, "o i"]:
        """The weight of one linear layer that does the same."""
        return self.base.weight + self.scale * self.up.weight @ self.down.weight

    @property
    def bias(self) -> Float[Tensor, " o"] | None:
        """Its bias."""
        return self.base.bias

    def forward(self, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        """What the layer gives, and its change."""
        return self.base(x) + self.scale * self.up(self.down(x))


def with_lora(model: ModelT, rank: int = 4, *, alpha: float = 8.0, names: Sequence[str] = ("query", "value")) -> ModelT:
    """A frozen copy of a model, whose linear layers of these names have a learned change of low rank.

    Adapters that it has already stay, and learn.
    """
    made = frozen_copy(model)
    linear = [name for name, each in made.named_modules() if isinstance(each, nn.Linear)]
    found = [name for name in linear if _last(name) in names]
    known = sorted({_last(name) for name in linear})
    if missing := [name for name in names if name not in known]:
        raise LayerNotFound(f"no linear layer is called '{missing[0]}': there are {known}.")
    for name in found:
        base = made.get_submodule(name)
        assert isinstance(base, nn.Linear)
        setattr(made.get_submodule(name.rpartition(".")[0]), _last(name), LoRA(base, rank, alpha))
    return made


def _last(name: str) -> str:
    return name.rpartition(".")[2]
