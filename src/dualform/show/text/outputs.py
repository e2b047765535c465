"""What a network says, in the shape that people read: one line of logits an example."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError
from dualform.explain.query import examples_first, logits_of


def logits_at_end(output: Any) -> Float[Tensor, "n classes"] | None:
    """The logits of each example, of a sequence those at its end; None where there are none to be found."""
    try:
        return examples_first(logits_of(output), {}).detach()
    except QueryError:
        return None


def need_logits(output: Any) -> Float[Tensor, "n classes"]:
    """The same, where there must be some."""
    found = logits_at_end(output)
    if found is None:
        raise QueryError(f"the model gives a {type(output).__name__}, in which no logits can be found.")
    return found
