"""What causal attention keeps of the tokens it has read, so that the next one costs no more than its own share."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)  # tensors are not compared
class Cache:
    """Keys and values of all tokens so far, of as many heads as have their own; they are convolved already.

    ``before`` are the last inputs of the convolutions, of queries, keys and values: what the next token is mixed with.
    """

    k: Float[Tensor, "b G m d"]
    v: Float[Tensor, "b G m e"]
    before: tuple[Float[Tensor, "b _ D"], ...] = ()

    def __len__(self) -> int:
        """How many tokens there are."""
        return self.k.shape[-2]

    @property
    def bytes(self) -> int:
        """How much memory it takes."""
        return sum(each.numel() * each.element_size() for each in (self.k, self.v, *self.before))
