"""``dualform heads``: what the attention heads of a network separate, printed on the terminal and as a page."""

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
    """A network and a batch of inputs. The weights are those of the network, or those of a memory."""

    model: nn.Module
    inputs: Any
    tokens: Tensor | None
    """The token ids, if the inputs are text."""
    weights: Mapping[str, Tensor] | None = None
    memory: Memory | None = None
    vocabulary: Vocabulary | None = None

    def word(self, number: int) -> str:
        """The text of a token, or its number without a vocabulary."""
        return str(number) if self.vocabulary is None else visible(self.vocabulary.decode([number])[0])

    def name(self, sequence: int, token: int) -> str:
        """The name of a token in a sequence, with its text if that is known."""
        if self.tokens is None or token >= self.tokens.shape[1]:
            return f"token {token}"
        return f"{token} ‘{self.word(int(self.tokens[sequence, token]))}’"


def print_reports(
    inputs: HeadsInputs, layers: Sequence[str], moments: int, options: Mapping[str, Any], console: Console
) -> tuple[dict[str, svm.Report], svm.Trajectory | None, list[str]]:
    """Print a report on each layer. For a layer that is not a softmax of one matrix, print why there is no report."""
    reports, notes = {}, []
    for name in layers or _layers(inputs):
        try:
            report = reports_with(
                inputs.tokens, inputs.model, inputs.inputs, layers=[name], weights=inputs.weights, **options
            )
        except (QueryError, SizeError) as error:
            if layers:
                raise
            notes.append(f"{name}: {error}")
            console.print(notes[-1], style="yellow", markup=False, soft_wrap=True)
            continue
        reports |= report
        console.print(str(report[name]), markup=False, soft_wrap=True)
        for head in report[name]:
            console.print(f"\nHead {head.head}. " + " ".join(sentences(head)), markup=False)
        console.print()
    if not reports:
        raise QueryError("this network has no head that can be reported on." + (f" {notes[0]}" if notes else ""))
    path = None
    if moments and inputs.memory is not None:
        path = svm.trajectory(
            inputs.model, inputs.inputs, inputs.memory, steps=moments, layers=list(reports),
            **{**options, "nuclear": False, "above": 0.0},
        )  # fmt: skip
        for name in reports:
            for head in reports[name]:
                console.print(f"{name}, head {head.head}, through training", markup=False)
                console.print(_curves(through_of(path, name, head.head)), markup=False)
    return reports, path, notes


def _layers(inputs: HeadsInputs) -> list[str]:
    """The attention layers that a forward pass uses; an error if the network cannot take the inputs."""
    try:
        layers = seen_layers(inputs.model, inputs.inputs)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise QueryError(
            f"this {type(inputs.model).__name__} cannot take these inputs: {str(error).strip().splitlines()[0]}"
        ) from error
    if not layers:
        raise QueryError(f"this {type(inputs.model).__name__} used no attention layer in the forward pass.")
    return layers


def _curves(through: HeadTrajectory) -> str:
    rows = [["after step", *(f"{step:,}" for step in through.steps)]]
    rows += [
        [curve.name, *("–" if value != value else f"{value:.3g}" for value in curve.values)] for curve in through.curves
    ]
    return as_table(rows)


def write_page(
    file: Path, inputs: HeadsInputs, reports: Mapping[str, svm.Report], path: svm.Trajectory | None,
    notes: Sequence[str], facts: Mapping[str, str],
) -> Path:  # fmt: skip
    """Write all reports as one page that needs nothing else."""
    item_name: Callable[[int], str] | None = inputs.word if inputs.tokens is not None else None
    layers: list[HeadsView] = []
    for report in reports.values():
        named_inputs = inputs if report.heads[0].items is not None else replace(inputs, tokens=None)
        layers.append(view_of(report, [head.head for head in report], named_inputs.name, item_name))
    through = {
        name: [through_of(path, name, head.head) for head in report] if path is not None else []
        for name, report in reports.items()
    }
    page = render(
        "heads.html", title="What do the heads separate?", facts=facts, layers=layers, through=through, notes=notes,
        style=Markup(style()),
    )  # fmt: skip
    file.write_text(page, encoding="utf-8")
    return file
