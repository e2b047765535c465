"""What a network says, in the shape that people read: one line of logits an example."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError


def logits_at_end(output: Any) -> Float[Tensor, "n classes"] | None:
    """The logits of each example, of a sequence those at its end; None where there are none to be found."""
    found = getattr(output, "logits", output[0] if isinstance(output, tuple | list) and output else output)
    if not isinstance(found, Tensor) or found.ndim == 0:
        return None
    found = found.detach()
    while found.ndim > 2:
        found = found[:, -1]
    return found.unsqueeze(1) if found.ndim == 1 else found


def need_logits(output: Any) -> Float[Tensor, "n classes"]:
    """The same, where there must be some."""
    found = logits_at_end(output)
    if found is None:
        raise QueryError(f"the model gives a {type(output).__name__}, in which no logits can be found.")
    return found
