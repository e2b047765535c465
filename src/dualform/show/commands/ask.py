"""A question to a memory, asked and answered on the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from dualform.errors import DualformError, ModelMismatch, QueryError
from dualform.explain import Hits, Memory
from dualform.types import Score

from ..examples import Examples
from ..text import FIRST_ORDER, MASKED, caption, groups_table, hits_table, logits_at_end, looks, same_digits, sum_check

LOOKED_AT = 5
"""Training examples that are shown as pictures or passages."""

AGREE = 10
"""Weights this many times further from the rebuilt ones than the certificate says are not the memory's own."""


@dataclass(frozen=True)
class RowQuestion:
    """What to ask of each row."""

    layer: str
    by: str | None
    k: int
    score: Score
    target: int | None
    without: str | None
    asked: Examples | None = None
    train: Examples | None = None
    index: str = "index"
    classes: Sequence[str] | None = None
    """What the rows, the training examples and the classes look like, where that is known."""


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


def tell(
    memory: Memory, model: nn.Module, inputs: Any, rows: Sequence[int], question: RowQuestion, say: Console
) -> None:
    """Ask, and print the answer for each row."""
    by = question.by or ("label" if "label" in memory.visits.column_names else "step")
    spot = memory.attend(model, inputs, target=question.target)
    try:
        answer = spot.ask(question.layer, top=question.k, by=[by], score=question.score)
    except (RuntimeError, TypeError, IndexError) as error:
        if isinstance(error, DualformError):
            raise
        first = next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs
        shape, reason = tuple(first.shape[1:]), str(error).splitlines()[0]
        raise QueryError(f"this {type(model).__name__} cannot take rows of shape {shape}: {reason}") from error
    assert answer.hits is not None
    masked = memory.without(question.without).predict(model, inputs) if question.without else None
    say.print(f"[bold]{memory.path}[/] at step {memory.step:,}, layer {question.layer}; {caption(answer.hits)}.")
    if question.layer != memory.layers[-1]:
        say.print(FIRST_ORDER)
    for i, row in enumerate(rows):
        say.print(f"\n[bold]row {row}:[/]{_prediction(spot.prediction, i, question.classes)}")
        if question.asked is not None:
            say.print(looks(question.asked, [i], [""], [None], say.color_system is not None))
        _show_training(question, answer.hits[i], say)
        say.print(hits_table(answer.hits[i]))
        say.print(groups_table(answer.groups[by], i, question.k))
        if question.score == "contribution":
            say.print(sum_check(answer.groups[by], i))
        if masked is not None:
            said = _prediction(masked, i, question.classes)
            say.print(f"Without the visits where {question.without}{said}. {MASKED}")


def _show_training(question: RowQuestion, hits: Hits, say: Console) -> None:
    """The first of the best training examples, to look at."""
    train = question.train
    if train is None or question.index not in hits.columns.column_names:
        return
    known = [hit for hit in hits if isinstance(hit.columns[question.index], int)][:LOOKED_AT]
    known = [hit for hit in known if 0 <= hit.columns[question.index] < len(train)]
    adds = same_digits(hit.contribution for hit in known)
    several = len({hit.position for hit in hits}) > 1
    rows, places = [hit.columns[question.index] for hit in known], [hit.position if several else None for hit in known]
    say.print(looks(train, rows, adds, places, say.color_system is not None))


def _prediction(output: Any, i: int, classes: Sequence[str] | None = None) -> str:
    """What the network says about one row: its class, or its number; of a sequence what it says at the end."""
    logits = logits_at_end(output)
    if logits is None:
        return ""
    if logits.shape[1] == 1:
        return f" the network says {float(logits[i, 0]):+.4g}"
    best = int(logits[i].argmax())
    name = f"{classes[best]} (class {best})" if classes and best < len(classes) else f"class {best}"
    return f" the network says {name}, with a logit of {float(logits[i, best]):+.2f}"
