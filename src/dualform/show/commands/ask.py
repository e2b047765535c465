"""``dualform ask``: which training examples the predictions for some rows are made of, printed on the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from dualform.errors import DualformError, ModelMismatch, QueryError
from dualform.explain import Hits, Memory
from dualform.explain.query import Target, labelled
from dualform.types import Per, Score

from ..examples import Examples
from ..text import (
    FIRST_ORDER,
    MASKED,
    WHOLE_NETWORK,
    caption,
    examples_view,
    groups_table,
    hits_table,
    logits_at_end,
    same_digits,
    sum_check,
)
from .as_json import print_json

MOST_SHOWN = 5
"""How many training examples are shown as pictures or passages."""

TOLERANCE = 10
"""Weights may differ from the rebuilt ones by this many times the error that the certificate states."""


@dataclass(frozen=True)
class RowQuestion:
    """What to ask about each row."""

    layer: str | None
    """One layer's exact account; None: the whole network."""
    per: Per
    by: str | None
    k: int
    score: Score
    target: Target
    without: str | None
    after: int = 0
    inputs: Examples | None = None
    train: Examples | None = None
    index: str = "index"
    classes: Sequence[str] | None = None
    """The rows and the training examples in the form that is displayed, and the names of the classes, if known."""


def require_memory_weights(memory: Memory, model: nn.Module, file: Path) -> None:
    """Raise an error if a model's weights are not those of the memory."""
    if memory.is_of(model):
        return
    agreement, certificate = memory.check(model), memory.certificate
    if len(agreement) and agreement.worst <= TOLERANCE * max([certificate.worst, *certificate.floor.values()]):
        return
    difference = "it kept others"
    if len(agreement):
        difference = (
            f"they differ from the rebuilt by {agreement.worst:.1e}, the trained ones by {certificate.worst:.1e}"
        )
    raise ModelMismatch(
        f"the weights in {file} are not the memory's at step {memory.step}: {difference}. "
        "Leave out --weights to use the memory's own, or use --step to name the step that the file is from."
    )


def as_target(word: str | None, examples: Examples) -> Target:
    """What --target says: a class, or the margin or the loss of the labels of the examples."""
    if word is None or word.lstrip("-").isdigit():
        return None if word is None else int(word)
    labels = examples.labels if word in ("margin", "loss") else None
    if labels is None:
        known = "the data has no labels" if word in ("margin", "loss") else f"--target {word!r} is not understood"
        raise QueryError(f"{known}; give a class (--target 7), or 'margin' or 'loss' with labels in the data.")
    return labelled(word, [int(label) for label in labels])


def print_answers(
    memory: Memory, model: nn.Module, inputs: Any, rows: Sequence[int], question: RowQuestion, console: Console,
    *, json: bool = False,
) -> None:  # fmt: skip
    """Ask about the rows in one pass, and print the answer for each, or all as JSON."""
    by = question.by or ("label" if "label" in memory.visits.column_names else "step")
    spot = memory.attend(model, inputs, target=question.target)
    # weights α of different layers do not add up
    layer = question.layer or (None if question.score == "contribution" else memory.layers[-1])
    try:
        answer = spot.ask(layer, top=question.k, by=[by], per=question.per, score=question.score, after=question.after)
    except (RuntimeError, TypeError, IndexError) as error:
        if isinstance(error, DualformError):
            raise
        first = next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs
        shape, reason = tuple(first.shape[1:]), str(error).splitlines()[0]
        raise QueryError(f"this {type(model).__name__} cannot take rows of shape {shape}: {reason}") from error
    if question.classes:
        answer = answer.with_classes(replace(memory.class_names, names=tuple(question.classes)))
    assert answer.hits is not None
    masked = memory.without(question.without).predict(model, inputs) if question.without else None
    notes = [WHOLE_NETWORK] if layer is None else [FIRST_ORDER] if layer != memory.layers[-1] else []
    hits = answer.hits
    if hits.left_out:
        notes.append(f"Left out, as no slots of them were kept: {', '.join(hits.left_out)}.")
    if hits.remark:
        notes.append(hits.remark)
    if json:
        about = {"memory": memory.path, "step": memory.step, "per": hits.per, "rows": rows, "output": spot.prediction}
        without = {} if masked is None else {"output_without": masked}
        print_json({**about, **without, "answer": answer, "notes": notes if masked is None else [*notes, MASKED]})
        return
    place = f"layer {layer}" if layer else "the whole network"
    console.print(f"[bold]{memory.path}[/] at step {memory.step:,}, {place}; {hits.per}s {caption(hits)}.")
    for note in notes:
        console.print(note, markup=False)
    for number, row in enumerate(rows):
        console.print(f"\n[bold]row {row}:[/]{_prediction(spot.prediction, number, question.classes)}")
        if question.inputs is not None:
            console.print(examples_view(question.inputs, [number], [""], [None], console.color_system is not None))
        _show_training(question, hits[number], console)
        console.print(hits_table(hits[number]))
        console.print(groups_table(answer.groups[by], number, question.k))
        if answer.groups[by].total is not None:
            console.print(sum_check(answer.groups[by], number))
        if masked is not None:
            prediction = _prediction(masked, number, question.classes)
            console.print(f"Without the visits where {question.without}{prediction}. {MASKED}")


def _show_training(question: RowQuestion, hits: Hits, console: Console) -> None:
    """Show the first of the top training examples."""
    train = question.train
    if train is None or question.index not in hits.columns.column_names:
        return
    indexed = [hit for hit in hits if isinstance(hit.columns[question.index], int)][:MOST_SHOWN]
    shown_hits = [hit for hit in indexed if 0 <= hit.columns[question.index] < len(train)]
    adds = same_digits(hit.contribution for hit in shown_hits)
    several = hits.per == "slot" and len({hit.position for hit in hits}) > 1
    rows, places = (
        [hit.columns[question.index] for hit in shown_hits],
        [hit.position if several else None for hit in shown_hits],
    )
    console.print(examples_view(train, rows, adds, places, console.color_system is not None))


def _prediction(output: Any, number: int, classes: Sequence[str] | None = None) -> str:
    """The prediction for one row in words: the class, or the output; for a sequence, the prediction at its end."""
    logits = logits_at_end(output)
    if logits is None:
        return ""
    if logits.shape[1] == 1:
        return f" the network says {float(logits[number, 0]):+.4g}"
    best = int(logits[number].argmax())
    name = f"{classes[best]} (class {best})" if classes and best < len(classes) else f"class {best}"
    return f" the network says {name}, with a logit of {float(logits[number, best]):+.2f}"
