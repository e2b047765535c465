"""The input of a text network as tokens: which can be asked about, and which the shown examples speak to."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..explorer import ExamplePlace, Explorer
from .explained import ExplainedNumber, token_ids, token_logits
from .places import AnswerPlaces
from .question import PredictionQuestion

LEVELS = 10


@dataclass(frozen=True)
class InputToken:
    """One token of the input, or several that are one character together, such as bytes."""

    text: str
    place: int
    last: int
    """The last token of the character; ``place`` if it is one token."""
    level: int
    """How much the shown examples add through it, from 0 to 10."""
    can_be_asked: bool
    is_asked: bool

    @property
    def address(self) -> str:
        """The token, or the tokens, as addresses of pages name them."""
        return str(self.place) if self.last == self.place else f"{self.place}-{self.last}"


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
    tokens = []
    for begin, end in characters(shown.tokens):
        level = round(LEVELS * max(through[begin:end], default=0.0) / most)
        is_asked = asked is not None and begin < asked.end and asked.begin < end
        text = "".join(shown.tokens[begin:end])
        tokens.append(InputToken(text, begin, end - 1, level, logits is not None and begin > 0, is_asked))
    says_next = "" if logits is None else explorer.class_name(int(logits[len(shown.tokens) - 1].argmax()))
    return InputTokens(tokens, says_next, places is not None)


def characters(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Tokens that are shown as one, begin and end: a token without a text of its own belongs to the one before it."""
    begins = [i for i, text in enumerate(texts) if text or i == 0]
    return list(zip(begins, [*begins[1:], len(texts)], strict=True)) if begins else []
