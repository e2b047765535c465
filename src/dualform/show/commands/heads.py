"""``dualform heads``: what the attention heads of a network separate, in the terminal and as a page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console
from torch import Tensor, nn

from dualform import svm
from dualform.errors import QueryError, SizeError
from dualform.explain import Memory
from dualform.svm.heads import as_table, seen_layers, sentences

from ..examples import Vocabulary
from ..views import HeadsView, HeadTrajectory, render, reports_with, style, through_of, view_of, visible


@dataclass(frozen=True)
class HeadsInputs:
    """A network at some inputs: with the weights of a checkpoint, or of a memory, which also knows earlier ones."""

    model: nn.Module
    inputs: Any
    tokens: Tensor | None
    """What the inputs stand for, where they are tokens."""
    weights: Mapping[str, Tensor] | None = None
    memory: Memory | None = None
    vocabulary: Vocabulary | None = None

    def word(self, number: int) -> str:
        """What a token is called."""
        return str(number) if self.vocabulary is None else visible(self.vocabulary.decode([number])[0])

    def name(self, sequence: int, token: int) -> str:
        """What stands at a place, if that is known."""
        if self.tokens is None or token >= self.tokens.shape[1]:
            return f"token {token}"
        return f"{token} ‘{self.word(int(self.tokens[sequence, token]))}’"


def tell_heads(
    asked: HeadsInputs, layers: Sequence[str], moments: int, options: Mapping[str, Any], console: Console
) -> tuple[dict[str, svm.Report], svm.Trajectory | None, list[str]]:
    """Print a report on each layer; those that are no softmax of one matrix are refused by name, in a sentence."""
    found, notes = {}, []
    for name in layers or _layers(asked):
        try:
            made = reports_with(
                asked.tokens, asked.model, asked.inputs, layers=[name], weights=asked.weights, **options
            )
        except (QueryError, SizeError) as error:
            if layers:
                raise
            notes.append(f"{name}: {error}")
            console.print(notes[-1], style="yellow", markup=False, soft_wrap=True)
            continue
        found |= made
        console.print(str(made[name]), markup=False, soft_wrap=True)
        for head in made[name]:
            console.print(f"\nHead {head.head}. " + " ".join(sentences(head)), markup=False)
        console.print()
    if not found:
        raise QueryError("no head of this network can be reported on." + (f" {notes[0]}" if notes else ""))
    path = None
    if moments and asked.memory is not None:
        path = svm.trajectory(
            asked.model, asked.inputs, asked.memory, steps=moments, layers=list(found),
            **{**options, "nuclear": False, "above": 0.0},
        )  # fmt: skip
        for name in found:
            for head in found[name]:
                console.print(f"{name}, head {head.head}, through training", markup=False)
                console.print(_curves(through_of(path, name, head.head)), markup=False)
    return found, path, notes


def _layers(asked: HeadsInputs) -> list[str]:
    """All attention layers; by the way it is seen whether the network can take the inputs."""
    try:
        found = seen_layers(asked.model, asked.inputs)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise QueryError(
            f"this {type(asked.model).__name__} cannot take these inputs: {str(error).strip().splitlines()[0]}"
        ) from error
    if not found:
        raise QueryError(f"no attention layer was seen in this {type(asked.model).__name__}.")
    return found


def _curves(through: HeadTrajectory) -> str:
    rows = [["after step", *(f"{step:,}" for step in through.steps)]]
    rows += [
        [each.name, *("–" if value != value else f"{value:.3g}" for value in each.values)] for each in through.curves
    ]
    return as_table(rows)


def write_page(
    file: Path, asked: HeadsInputs, found: Mapping[str, svm.Report], path: svm.Trajectory | None, notes: Sequence[str],
    facts: Mapping[str, str],
) -> Path:  # fmt: skip
    """All of it as one page that needs nothing else."""
    item: Callable[[int], str] | None = asked.word if asked.tokens is not None else None
    layers: list[HeadsView] = []
    for report in found.values():
        named = asked if report.heads[0].items is not None else replace(asked, tokens=None)
        layers.append(view_of(report, [head.head for head in report], named.name, item))
    through = {
        name: [through_of(path, name, head.head) for head in report] if path is not None else []
        for name, report in found.items()
    }
    page = render(
        "heads.html", title="What do the heads separate?", facts=facts, layers=layers, through=through, notes=notes,
        style=Markup(style()),
    )  # fmt: skip
    file.write_text(page, encoding="utf-8")
    return file
