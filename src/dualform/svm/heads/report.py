r"""What each head of an attention layer separates, by what margin, and which tokens hold the margin up.

A head selects a token for every query. ``report`` solves for the matrix that separates the selected tokens from the
others by the largest margin, and sets the head's own matrix beside it (Tarzanagh et al. 2023, arXiv 2308.16898). The
theory is about one layer with a fixed head whose attention is saturated; for all others this is a way to look at them,
and the numbers to read it by (saturation, random matrices, gaps) stand beside each answer.
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
from .chance import examine, null
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
    """Heads that have no query to look at."""

    def __len__(self) -> int:
        return len(self.heads)

    def __iter__(self) -> Iterator[HeadReport]:
        return iter(self.heads)

    def __getitem__(self, head: int) -> HeadReport:
        """The report on one head, by its number in the layer."""
        for each in self.heads:
            if each.head == head:
                return each
        none = f" Heads {list(self.without)} have no query above {self.options.above}." if self.without else ""
        raise QueryError(f"no head {head} is in this report: there are {[each.head for each in self.heads]}.{none}")

    def __str__(self) -> str:
        return "\n".join([self.heading, as_table([COLUMNS, *(cells(each) for each in self.heads)]), LEGEND])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return heads_html(self.heading, self.heads)

    @property
    def heading(self) -> str:
        """What was looked at, in a sentence."""
        o, counts = self.options, sorted({len(each.selected) for each in self.heads})
        some = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        some += " queries" + (f" with a weight above {o.above}" if o.above else "")
        return f"{self.layer}: {len(self)} heads at {some}, in the {self.heads[0].sight.space}'s space (seed {o.seed})"

    def to_pandas(self) -> Any:
        """One line a head."""
        pd = require("pandas", "pandas")
        return pd.DataFrame([each.row() for each in self.heads])


def report(
    layer: nn.Module, x: Float[Tensor, "b n D"], context: Float[Tensor, "b m D"] | None = None, *,
    padding: Padding = None, causal: bool = False, heads: Sequence[int] | None = None, start: nn.Module | None = None,
    items: Int[Tensor, "i t"] | None = None, progress: Progress = True, **options: Any,
) -> Report:  # fmt: skip
    """What the heads of a layer separate on some sequences.

    The layer is one of ``dualform.attention``, ``nn.MultiheadAttention``, or any module that is called with ``x`` and
    calls torch's fused attention. ``start`` is the same layer as it was before training, ``items`` what the tokens
    stand for; ``options`` are those of ``HeadReportOptions``. ``reports`` does this for all layers of a model at once.
    """
    given = _arguments(layer, x, context, padding, causal)
    seen = look(layer, given)
    if len(seen) > 1:
        raise QueryError(f"this {type(layer).__name__} holds several attention layers, {list(seen)}: use svm.reports.")
    (sights,) = seen.values()
    begun = None if start is None else next(iter(look(start, given).values()))
    return of_sights(type(layer).__name__, sights, HeadReportOptions(**options), heads, begun, items, progress)


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

    ``weights`` stand in for the model's own, ``start`` are those before training. With a ``loss``, a function of the
    model's output, it also says whether the selected tokens are those that lower it most.
    """
    sights = look(model, inputs, layers=layers, loss=loss, weights=weights)
    begun = look(model, inputs, layers=layers, weights=start) if start is not None else {}
    made = HeadReportOptions(**options)
    return {name: of_sights(name, each, made, heads, begun.get(name), items, progress) for name, each in sights.items()}


def _arguments(layer: nn.Module, x: Tensor, context: Tensor | None, padding: Padding, causal: bool) -> Any:
    """What a layer is called with: ours, torch's, or any other's first argument."""
    if isinstance(layer, nn.MultiheadAttention):
        other, mask = x if context is None else context, None
        if causal:
            mask = torch.ones(x.shape[1], other.shape[1], dtype=torch.bool).triu(1)
        if not layer.batch_first:
            x, other = (x.transpose(0, 1), other.transpose(0, 1)) if other is not x else (x.transpose(0, 1),) * 2
        return {"query": x, "key": other, "value": other, "key_padding_mask": padding, "attn_mask": mask}
    if not hasattr(layer, "expansions"):
        if context is not None or padding is not None or causal:
            raise QueryError(
                f"a {type(layer).__name__} is called with x alone: context=, padding= and causal= are for layers of "
                "dualform and nn.MultiheadAttention. Let reports(model, inputs) call it as its model does."
            )
        return (x,)
    return {"x": x, "context": context, "padding": padding, "causal": causal}


def of_sights(
    name: str,
    sights: Sequence[HeadInputs],
    options: HeadReportOptions,
    heads: Sequence[int] | None,
    begun: Sequence[HeadInputs] | None,
    items: Int[Tensor, "i t"] | None,
    progress: Progress,
) -> Report:
    """A report on what the heads of a layer saw in one call; all heads at the same queries."""
    of = {head: sight for sight in sights for head in sight.heads}
    before = {head: sight for sight in begun or () for head in sight.heads}
    wanted = sorted(of) if heads is None else list(heads)
    unknown = [head for head in wanted if head not in of]
    if unknown or not wanted:
        raise QueryError(f"'{name}' has no head {unknown[0] if unknown else 'in []'}: it has {sorted(of)}.")
    fits = {head: items is not None and tuple(items.shape) == tuple(of[head].k.shape[::2]) for head in wanted}
    if items is not None and not any(fits.values()):  # heads that pool tokens have other keys
        shapes = sorted({tuple(of[head].k.shape[::2]) for head in wanted})
        raise SizeError(f"items= are (sequences, tokens): {tuple(items.shape)} is none of {shapes}.")
    made, without, chance, shared = [], [], None, torch.empty(0)
    with bar(f"heads of {name}", len(wanted), progress, worth=2) as watch:
        for head in wanted:
            sight = of[head]
            chosen = sight.choices(options.queries, options.seed, head, options.above)
            if not len(chosen):
                without.append(head)
                continue
            seen = sight.head(head, chosen, options.space)
            start = before[head].head(head, chosen, options.space) if before else None
            if options.above:
                chance = null(sight.head(head, None, options.space), options, sight.k.shape[-1], len(chosen))
            elif chance is None or seen.space == "head" or not torch.equal(seen.hidden, shared):
                chance = null(seen, options, sight.k.shape[-1])
            shared = seen.hidden
            made.append(examine(seen, options, chance, start, items if fits[head] else None))
            if watch:
                watch(1)
    if not made:
        raise QueryError(
            f"no query of '{name}' has several tokens to choose from"
            + (f" and a weight above {options.above}." if options.above else ".")
        )
    return Report(name, options, tuple(made), tuple(without))
