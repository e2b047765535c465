"""Which tokens of the input the examples of an answer speak to, and which of their own tokens count."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dualform.explain import ScanAnswers

if TYPE_CHECKING:
    from dualform.explain import HitPlaces
from dualform.progress import Progress

from ..explorer import ExamplePlace, Explorer
from ..work import PendingWork
from .explained import ExplainedNumber, token_ids, token_logits
from .question import PredictionQuestion

ONCE = 2.0
"""Time of this pass over the slots of a few examples, relative to a question."""


@dataclass(frozen=True)
class AnswerPlaces:
    """The places of the top examples of an answer."""

    places: "HitPlaces"
    taught: bool
    """Whether each token was taught the next one, as language models are."""

    def token_of(self, rank: int) -> int | None:
        """The token of a training example that counts most; None if no single one does."""
        if rank >= len(self.places.training) or not self.places.training.shape[1]:
            return None
        line = self.places.training[rank].abs()
        return int(line.argmax()) if float(line.max()) > 0 else None

    def speaks(self, rank: int) -> tuple[float, ...]:
        """How much of an example's contribution goes through each token of the input."""
        return tuple(self.places.query[rank].tolist()) if rank < len(self.places.query) else ()

    @property
    def in_all(self) -> Sequence[float]:
        """What goes through each token of the input, over all shown examples."""
        return self.places.query.abs().sum(0).tolist()


def answer_places(
    explorer: Explorer, number: ExplainedNumber, place: ExamplePlace, question: PredictionQuestion, answer: ScanAnswers
) -> AnswerPlaces | None:
    """The places of the shown examples of a text; None where they are not known or take long."""
    hits = answer.hits
    if hits is None or question.score != "contribution" or explorer.kind_of(place) != "text":
        return None
    shown = hits.first(question.k)
    ids = token_ids(explorer.input(place))
    key: tuple[Any, ...] = ("places", place, number.key, question.layer, question.order, question.step, question.k)
    key = (*key, question.per, question.after, explorer.own[place.row][0] if place.set == "own" else "")

    def work(progress: Progress) -> "HitPlaces":
        return number.spot.places(shown, progress=progress)

    seconds = ONCE * explorer.question_seconds(question.layer, question.score)
    places = explorer.work_queue.result(key, "the tokens that count", seconds, work)
    if isinstance(places, PendingWork):
        return None
    return AnswerPlaces(places, token_logits(number.spot.prediction, len(ids)) is not None)
