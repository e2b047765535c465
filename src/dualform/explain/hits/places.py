"""Where hits speak: through which rows of the query, and from which rows of their own."""

from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float
from torch import Tensor

from dualform.errors import require

from ..notebook import Displayed, places_html, places_lines
from .answers import Hits


@dataclass(frozen=True)
class HitPlaces(Displayed):
    """The contribution of each hit of one query, split over the rows (tokens) of the query and over the hit's own.

    ``query[i]`` + ``query_elsewhere[i]`` is the contribution of hit i, and so is ``training[i]`` +
    ``training_elsewhere[i]``. Positions are those of the rows that most layers see of an example; what goes through
    layers that see another number of rows, such as a classifier's output layer after a mean, is elsewhere.
    """

    layer: str
    """The layer that was asked; empty for the whole network."""
    target: str
    query: Float[Tensor, "k n"]
    """What goes through each row of the query."""
    query_elsewhere: Float[Tensor, " k"]
    training: Float[Tensor, "k m"]
    """What the rows of the training example at each position bring, in all of its visits; 0 beyond its end."""
    training_elsewhere: Float[Tensor, " k"]
    hits: Hits = field(repr=False)

    def __len__(self) -> int:
        return len(self.query)

    @property
    def contribution(self) -> Float[Tensor, " k"]:
        """What each hit adds to the target, as a whole."""
        return self.query.sum(1) + self.query_elsewhere

    def __str__(self) -> str:
        return "\n".join(places_lines(self))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return places_html(self)

    def to_pandas(self) -> Any:
        """One line per hit, side ("query" or "training") and position; the position of what is elsewhere is -1."""
        pd = require("pandas", "pandas")
        sides = {
            "query": (self.query, self.query_elsewhere),
            "training": (self.training, self.training_elsewhere),
        }
        lines = [
            (rank, side, position, value)
            for rank in range(len(self))
            for side, (by_position, elsewhere) in sides.items()
            for position, value in [*enumerate(by_position[rank].tolist()), (-1, float(elsewhere[rank]))]
        ]
        return pd.DataFrame(lines, columns=["rank", "side", "position", "contribution"])
