"""What answers a query best: training examples, visits of examples, or single slots."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int
from torch import Tensor

from dualform.errors import require
from dualform.types import Score

from ..answers import query_slice
from ..notebook import Displayed, hits_html, hits_lines, seen


@dataclass(frozen=True)
class Hit:
    """One hit of a query. The noted columns are attributes too: ``hit.label``, ``hit.index``."""

    query: int
    rank: int
    weight: float
    """α, summed over the slots that the hit stands for; NaN where it was not asked for."""
    contribution: float
    """What it adds to the target; NaN where it was not asked for."""
    columns: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        columns = object.__getattribute__(self, "columns")
        if name in columns:
            return columns[name]
        own = [field.name for field in fields(self) if field.name != "columns"]
        hint = ' A hit has it with per="slot".' if name in ("slot", "position") else ""
        hint = ' A hit has it with per="visit" or per="slot".' if name == "step" else hint
        raise AttributeError(f"this {type(self).__name__} has no '{name}': it has {own} and {list(columns)}.{hint}")


@dataclass(frozen=True)
class SlotHit(Hit):
    """One slot: a row of one layer's input in one step."""

    slot: int
    step: int
    position: int


@dataclass(frozen=True)
class VisitHit(Hit):
    """One visit: an example in one step, with all its slots together."""

    visit: int
    step: int


@dataclass(frozen=True)
class ExampleHit(Hit):
    """One training example: all its visits together."""

    visits: int
    """How often it was visited."""
    first_step: int
    last_step: int


@dataclass(frozen=True)
class HitOrigin:
    """What hits were chosen from, beside the view of their memory."""

    after: int = 0
    """The last step that was left out."""
    position: int | None = None
    """The row of the query that counted; None: all of them."""
    column: str | None = None
    """The column within one of whose groups they were chosen, and that ``group``."""
    group: Any = None


@dataclass(frozen=True)
class Hits(Displayed):
    """The best hits of each query, in rows of queries. All tensors are (query, rank).

    Iterating gives the hits of all queries, those of the first query first; ``hits[i]`` are those of one query.
    """

    per: ClassVar[str] = "hit"
    row: ClassVar[type[Hit]] = Hit

    layer: str
    """The layer that was asked; empty for the whole network."""
    score: Score
    target: str
    weight: Float[Tensor, "n k"]
    """α, summed over the slots of a hit; NaN where it was not asked for."""
    contribution: Float[Tensor, "n k"]
    """What a hit adds to the target; NaN where it was not asked for."""
    columns: pa.Table
    """The noted columns, one line per hit, query by query; null where the visit is not known."""
    left_out: tuple[str, ...]
    """Layers of the network that could not be asked, as no slots of them were kept."""
    remark: str
    """What a reader should know of these hits, in a sentence; or nothing."""
    folder: str = field(default="", kw_only=True, repr=False)
    """The folder of the memory that was asked."""
    origin: HitOrigin = field(default=HitOrigin(), kw_only=True, repr=False)
    """What the hits were chosen from."""

    def __len__(self) -> int:
        return self.weight.shape[0]

    @property
    def scores(self) -> Float[Tensor, "n k"]:
        """The scores by which the hits were chosen."""
        return self.contribution if self.score == "contribution" else self.weight

    def __iter__(self) -> Iterator[Any]:
        n, k = self.weight.shape
        return (self._hit(query, rank) for query in range(n) for rank in range(k))

    def __getitem__(self, query: int) -> Self:
        """The hits of one query."""
        cut, k = query_slice(query, len(self)), self.weight.shape[1]
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value[cut] for name, value in own.items() if isinstance(value, Tensor)}
        return replace(self, **tensors, columns=self.columns.slice(cut.start * k, k))

    def first(self, k: int) -> Self:
        """The best k hits of each query."""
        n, kept = self.weight.shape
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value[:, :k] for name, value in own.items() if isinstance(value, Tensor)}
        lines = np.arange(n * kept).reshape(n, kept)[:, :k].reshape(-1)
        return replace(self, **tensors, columns=self.columns.take(lines))

    def _hit(self, query: int, rank: int) -> Hit:
        place = query * self.weight.shape[1] + rank
        line = {name: self.columns[name][place].as_py() for name in self.columns.column_names}
        numbers = {
            field.name: getattr(self, name)[query, rank].item()
            for field in fields(self.row)
            if (name := self._tensor_of(field.name)) is not None
        }
        return self.row(query=query, rank=rank, columns=line, **numbers)

    def _tensor_of(self, of_hit: str) -> str | None:
        """The tensor that holds a number of each hit."""
        names = [name for name in (of_hit, f"{of_hit}s") if isinstance(getattr(self, name, None), Tensor)]
        return names[0] if names else None

    def __str__(self) -> str:
        return "\n".join(hits_lines(self))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return hits_html(self)

    def when(self, hit: Any) -> str:
        """When training saw what a hit stands for, in words."""
        return f"rank {hit.rank + 1}"

    def to_pandas(self) -> Any:
        """One line per hit."""
        pd = require("pandas", "pandas")
        n, k = self.weight.shape
        data: dict[str, Any] = {"query": np.repeat(np.arange(n), k), "rank": np.tile(np.arange(k), n)}
        for of_hit in fields(self.row):
            name = self._tensor_of(of_hit.name)
            if name is not None:
                data[of_hit.name] = getattr(self, name).flatten().numpy()
        frame = pd.DataFrame(data)
        for name in self.columns.column_names:
            if name not in frame:
                frame[name] = self.columns[name].to_pandas().to_numpy()
        return frame


@dataclass(frozen=True)
class SlotHits(Hits):
    """The best slots of each query: ``weight`` is α, ``contribution`` what the slot adds through the weights."""

    per: ClassVar[str] = "slot"
    row: ClassVar[type[Hit]] = SlotHit

    slots: Int[Tensor, "n k"]
    steps: Int[Tensor, "n k"]
    positions: Int[Tensor, "n k"]
    visits: Int[Tensor, "n k"]

    @property
    def scores(self) -> Float[Tensor, "n k"]:
        """The scores by which the slots were chosen."""
        return self.weight.abs() if self.score == "abs" else super().scores

    def when(self, hit: SlotHit) -> str:
        return f"step {hit.step:,}, position {hit.position}"


@dataclass(frozen=True)
class VisitHits(Hits):
    """The best visits of each query: single moments of training."""

    per: ClassVar[str] = "visit"
    row: ClassVar[type[Hit]] = VisitHit

    visits: Int[Tensor, "n k"]
    steps: Int[Tensor, "n k"]

    def when(self, hit: VisitHit) -> str:
        return f"step {hit.step:,}"


@dataclass(frozen=True)
class ExampleHits(Hits):
    """The best training examples of each query, all their visits together.

    ``contribution`` is the first-order effect on the target of taking the example out of all explained weights and
    biases at once; of one ``layer``, its exact part in what that layer adds to the target.
    """

    per: ClassVar[str] = "example"
    row: ClassVar[type[Hit]] = ExampleHit

    visits: Int[Tensor, "n k"]
    """How often each example was visited."""
    first_steps: Int[Tensor, "n k"]
    last_steps: Int[Tensor, "n k"]

    def when(self, hit: ExampleHit) -> str:
        return seen(hit.visits, hit.first_step, hit.last_step)
