"""The logits in a network's output, one row per example."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError
from dualform.explain.query import examples_first, logits_of


def logits_at_end(output: Any) -> Float[Tensor, "n classes"] | None:
    """The logits of each example, for a sequence those at its end; None if the output has no logits."""
    try:
        return examples_first(logits_of(output), {}).detach()
    except QueryError:
        return None


def need_logits(output: Any) -> Float[Tensor, "n classes"]:
    """The logits of each example; an error if the output has none."""
    logits = logits_at_end(output)
    if logits is None:
        raise QueryError(f"the model returns a {type(output).__name__}, which holds no logits.")
    return logits
