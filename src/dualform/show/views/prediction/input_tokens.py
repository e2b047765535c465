"""The input of a text network as tokens: which can be asked about, and which the shown examples speak to."""

from dataclasses import dataclass

from ..explorer import ExamplePlace, Explorer
from .explained import ExplainedNumber, token_ids, token_logits
from .places import AnswerPlaces
from .question import PredictionQuestion

LEVELS = 10


@dataclass(frozen=True)
class InputToken:
    """One token of the input."""

    text: str
    place: int
    level: int
    """How much the shown examples add through it, from 0 to 10."""
    can_be_asked: bool
    is_asked: bool


@dataclass(frozen=True)
class InputTokens:
    """The tokens of the input; for a language model followed by the one that it says next."""

    tokens: list[InputToken]
    says_next: str
    """What a language model says after the last token; empty for other networks."""
    speaks: bool
    """Whether it is known which example speaks to which token."""


def input_tokens(
    explorer: Explorer, place: ExamplePlace, question: PredictionQuestion, number: ExplainedNumber,
    places: AnswerPlaces | None,
) -> InputTokens | None:  # fmt: skip
    """The tokens of a text; None for other inputs."""
    shown = explorer.shown(place)
    if shown.kind != "text":
        return None
    output = number.spot.prediction
    logits = token_logits(output, len(token_ids(explorer.input(place))))
    through = list(places.in_all) if places is not None else []
    most = max(through, default=0.0) or 1.0
    asked = question.token
    tokens = [
        InputToken(
            text, i, round(LEVELS * through[i] / most) if i < len(through) else 0, logits is not None and i > 0,
            asked is not None and asked.begin <= i < asked.end,
        )
        for i, text in enumerate(shown.tokens)
    ]  # fmt: skip
    says_next = "" if logits is None else explorer.class_name(int(logits[len(tokens) - 1].argmax()))
    return InputTokens(tokens, says_next, places is not None)
