"""A question to a memory, asked and answered on the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor, nn

from dualform.errors import DualformError, ModelMismatch, QueryError
from dualform.explain import Memory
from dualform.types import Score

from .tables import caption, groups_table, hits_table
from .words import FIRST_ORDER, MASKED, sum_check

AGREE = 10
"""Weights this many times further from the rebuilt ones than the certificate says are not the memory's own."""


@dataclass(frozen=True)
class Question:
    """What to ask of each row."""

    layer: str
    by: str | None
    k: int
    score: Score
    target: int | None
    without: str | None


def see_that_they_agree(memory: Memory, model: nn.Module, file: Path) -> None:
    """Refuse weights that are not the memory's own."""
    if memory.is_of(model):
        return
    here, kept = memory.check(model), memory.certificate
    if len(here) and here.worst <= AGREE * max([kept.worst, *kept.floor.values()]):
        return
    far = f"they differ by {here.worst:.1e} from what it rebuilds, and the trained ones by {kept.worst:.1e}"
    raise ModelMismatch(
        f"the weights in {file} are not the memory's at step {memory.step}: {far if len(here) else 'it kept others'}. "
        "Leave --weights out to ask with the memory's own, or say with --step which step the file is from."
    )


def tell(memory: Memory, model: nn.Module, inputs: Any, rows: Sequence[int], question: Question, say: Console) -> None:
    """Ask, and print the answer for each row."""
    by = question.by or ("label" if "label" in memory.visits.column_names else "step")
    spot = memory.attend(model, inputs, target=question.target)
    try:
        answer = spot.ask(question.layer, top=question.k, by=[by], score=question.score)
    except (RuntimeError, TypeError, IndexError) as error:
        if isinstance(error, DualformError):
            raise
        shape, reason = tuple(inputs.shape[1:]), str(error).splitlines()[0]
        raise QueryError(f"this {type(model).__name__} cannot take rows of shape {shape}: {reason}") from error
    assert answer.hits is not None
    masked = memory.without(question.without).predict(model, inputs) if question.without else None
    say.print(f"[bold]{memory.path}[/] at step {memory.step:,}, layer {question.layer}; {caption(answer.hits)}.")
    if question.layer != memory.layers[-1]:
        say.print(FIRST_ORDER)
    for i, row in enumerate(rows):
        say.print(f"\n[bold]row {row}:[/]{_prediction(spot.prediction, i)}")
        say.print(hits_table(answer.hits[i]))
        say.print(groups_table(answer.groups[by], i, question.k))
        if question.score == "contribution":
            say.print(sum_check(answer.groups[by], i))
        if masked is not None:
            say.print(f"Without the visits where {question.without}{_prediction(masked, i)}. {MASKED}")


def _prediction(output: Any, i: int) -> str:
    """What the network says about one row: its class, or its number; of a sequence what it says at the end."""
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        return ""
    while output.ndim > 2:
        output = output[:, -1]
    if output.ndim < 2 or output.shape[1] == 1:
        return f" the network says {float(output[i]):+.4g}"
    best = int(output[i].argmax())
    return f" the network says class {best}, with a logit of {float(output[i, best]):+.2f}"
