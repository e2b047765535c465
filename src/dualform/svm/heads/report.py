r"""Reports on attention layers: what each head separates, by which margin, and which tokens support the margin.

A head selects a token for every query. ``report`` solves for the matrix that separates the selected tokens from the
others by the largest margin, and compares the head's own matrix with it (Tarzanagh et al. 2023, arXiv 2308.16898). The
theory is about one layer with a fixed output head and saturated attention; for all others this is a diagnostic, and the
numbers that qualify it (saturation, random matrices, gaps) come with each answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dualform.attention import Padding
from dualform.errors import QueryError, SizeError, require
from dualform.progress import Progress, bar

from .attention_calls import LossOfOutput, look
from .chance import null_alignments, report_on_head
from .head_findings import HeadReport, HeadReportOptions
from .head_inputs import HeadInputs
from .report_text import COLUMNS, LEGEND, as_table, cells, heads_html


@dataclass(frozen=True)
class Report:
    """All heads of a layer."""

    layer: str
    options: HeadReportOptions
    heads: tuple[HeadReport, ...]
    without: tuple[int, ...] = ()
    """Heads that have no query to report on."""

    def __len__(self) -> int:
        return len(self.heads)

    def __iter__(self) -> Iterator[HeadReport]:
        return iter(self.heads)

    def __getitem__(self, head: int) -> HeadReport:
        """The report on one head, by its number in the layer."""
        for head_report in self.heads:
            if head_report.head == head:
                return head_report
        none = f" Heads {list(self.without)} have no query above {self.options.above}." if self.without else ""
        raise QueryError(f"this report has no head {head}; it has {[report.head for report in self.heads]}.{none}")

    def __str__(self) -> str:
        return "\n".join(
            [self.heading, as_table([COLUMNS, *(cells(head_report) for head_report in self.heads)]), LEGEND]
        )

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return heads_html(self.heading, self.heads)

    @property
    def heading(self) -> str:
        """What was looked at, in a sentence."""
        o, counts = self.options, sorted({len(head_report.selected) for head_report in self.heads})
        sample = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        sample += " queries" + (f" with a weight above {o.above}" if o.above else "")
        return (
            f"{self.layer}: {len(self)} heads at {sample}, in the {self.heads[0].sight.space}'s space (seed {o.seed})"
        )

    def to_pandas(self) -> Any:
        """One line a head."""
        pd = require("pandas", "pandas")
        return pd.DataFrame([head_report.row() for head_report in self.heads])


def report(
    layer: nn.Module, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *,
    padding: Padding = None, causal: bool = False, heads: Sequence[int] | None = None, start: nn.Module | None = None,
    items: Int[Tensor, "i t"] | None = None, progress: Progress = True, **options: Any,
) -> Report:  # fmt: skip
    """Report on the heads of a layer: what they separate on given sequences.

    The layer is one of ``dualform.attention``, ``nn.MultiheadAttention``, or any module that is called with ``x`` and
    calls torch's fused attention. ``start`` is the same layer before training, ``items`` the ids of what the tokens
    represent; ``options`` are those of ``HeadReportOptions``. ``reports`` does this for all layers of a model.
    """
    arguments = _call_arguments(layer, x, context, padding, causal)
    inputs_by_layer = look(layer, arguments)
    if len(inputs_by_layer) > 1:
        raise QueryError(
            f"this {type(layer).__name__} holds several attention layers, {list(inputs_by_layer)}: use svm.reports."
        )
    (head_groups,) = inputs_by_layer.values()
    begun = None if start is None else next(iter(look(start, arguments).values()))
    return report_on_layer(
        type(layer).__name__, head_groups, HeadReportOptions(**options), heads, begun, items, progress
    )


def reports(
    model: nn.Module,
    inputs: Any,
    *,
    layers: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    loss: LossOfOutput | None = None,
    weights: Mapping[str, Tensor] | None = None,
    start: Mapping[str, Tensor] | None = None,
    items: Int[Tensor, "i t"] | None = None,
    progress: Progress = True,
    **options: Any,
) -> dict[str, Report]:
    """A report on each attention layer of a model, by its name, from one forward pass over some inputs.

    ``weights`` replace the model's own, ``start`` are those before training. With a ``loss``, a function of the model's
    output, the reports also tell whether the selected tokens are those that lower it most.
    """
    inputs_by_layer = look(model, inputs, layers=layers, loss=loss, weights=weights)
    begun = look(model, inputs, layers=layers, weights=start) if start is not None else {}
    report_options = HeadReportOptions(**options)
    return {
        name: report_on_layer(name, head_groups, report_options, heads, begun.get(name), items, progress)
        for name, head_groups in inputs_by_layer.items()
    }


def _call_arguments(layer: nn.Module, x: Tensor, context: Tensor | None, padding: Padding, causal: bool) -> Any:
    """The arguments to call a layer with: ours and torch's by name, any other module with ``x`` alone."""
    if isinstance(layer, nn.MultiheadAttention):
        attended, mask = x if context is None else context, None
        if causal:
            mask = torch.ones(x.shape[1], attended.shape[1], dtype=torch.bool).triu(1)
        if not layer.batch_first:
            x, attended = (
                (x.transpose(0, 1), attended.transpose(0, 1)) if attended is not x else (x.transpose(0, 1),) * 2
            )
        return {"query": x, "key": attended, "value": attended, "key_padding_mask": padding, "attn_mask": mask}
    if not hasattr(layer, "expansions"):
        if context is not None or padding is not None or causal:
            raise QueryError(
                f"a {type(layer).__name__} is called with x alone: context=, padding= and causal= are for layers of "
                "dualform and nn.MultiheadAttention. Let reports(model, inputs) call it as its model does."
            )
        return (x,)
    return {"x": x, "context": context, "padding": padding, "causal": causal}


def report_on_layer(
    name: str,
    head_groups: Sequence[HeadInputs],
    options: HeadReportOptions,
    heads: Sequence[int] | None,
    begun: Sequence[HeadInputs] | None,
    items: Int[Tensor, "i t"] | None,
    progress: Progress,
) -> Report:
    """Report on the heads of a layer from their inputs in one call; all heads at the same queries."""
    inputs_of = {head: group for group in head_groups for head in group.heads}
    before = {head: head_group for head_group in begun or () for head in head_group.heads}
    wanted = sorted(inputs_of) if heads is None else list(heads)
    unknown = [head for head in wanted if head not in inputs_of]
    if unknown or not wanted:
        raise QueryError(f"'{name}' has no head {unknown[0] if unknown else 'in []'}: it has {sorted(inputs_of)}.")
    fits = {head: items is not None and tuple(items.shape) == tuple(inputs_of[head].k.shape[::2]) for head in wanted}
    if items is not None and not any(fits.values()):  # heads that pool tokens have other keys
        shapes = sorted({tuple(inputs_of[head].k.shape[::2]) for head in wanted})
        raise SizeError(f"items= are (sequences, tokens): {tuple(items.shape)} is none of {shapes}.")
    head_reports, without, chance, shared = [], [], None, torch.empty(0)
    with bar(f"heads of {name}", len(wanted), progress, worth=2) as watch:
        for head in wanted:
            head_group = inputs_of[head]
            chosen = head_group.selectable_queries(options.queries, options.seed, head, options.above)
            if not len(chosen):
                without.append(head)
                continue
            inputs = head_group.head(head, chosen, options.space)
            start = before[head].head(head, chosen, options.space) if before else None
            if options.above:
                chance = null_alignments(
                    head_group.head(head, None, options.space), options, head_group.k.shape[-1], len(chosen)
                )
            elif chance is None or inputs.space == "head" or not torch.equal(inputs.hidden, shared):
                chance = null_alignments(inputs, options, head_group.k.shape[-1])
            shared = inputs.hidden
            head_reports.append(report_on_head(inputs, options, chance, start, items if fits[head] else None))
            if watch:
                watch(1)
    if not head_reports:
        raise QueryError(
            f"no query of '{name}' has several tokens to choose from"
            + (f" and a weight above {options.above}." if options.above else ".")
        )
    return Report(name, options, tuple(head_reports), tuple(without))
