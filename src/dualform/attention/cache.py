"""The key/value cache of causal attention, so that a new token is processed without recomputing the earlier ones."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)  # tensors are not compared
class Cache:
    """Keys and values of all tokens so far, for the key/value heads, after any convolution.

    ``before`` has the last inputs of the convolutions of queries, keys and values, which the next token needs.
    """

    k: Float[Tensor, "b G m d"]
    v: Float[Tensor, "b G m e"]
    before: tuple[Float[Tensor, "b _ D"], ...] = ()

    def __len__(self) -> int:
        """The number of cached tokens."""
        return self.k.shape[-2]

    @property
    def bytes(self) -> int:
        """The size of the cache in memory."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.k, self.v, *self.before))
