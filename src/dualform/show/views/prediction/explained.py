"""The number that is explained: a logit, or a difference of two, of the whole example or of one of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError
from dualform.explain import Memory, Spotlight
from dualform.explain.query import Target, logits_of

from ...text import need_logits
from ..explorer import ExamplePlace, Explorer
from .question import AskedTokens, PredictionQuestion


@dataclass(frozen=True)
class ExplainedNumber:
    """What the question is about: the spotlight on it, the logits beside it, and its name."""

    spot: Spotlight
    key: Any
    """Equal for equal targets."""
    logits: Float[Tensor, " classes"]
    """The logits at the place that is asked about."""
    explained: int
    truth: int | None
    """The right class, or the token that stands there; None if it is not known."""
    name: str


def explained_number(
    explorer: Explorer, memory: Memory, place: ExamplePlace, question: PredictionQuestion
) -> ExplainedNumber:
    """Run the network, and settle what is explained."""
    x, label = explorer.input(place), explorer.label(place)
    spot = explorer.spot(memory, x, question.target if question.token is None else None)
    if question.token is not None:
        return _of_tokens(explorer, memory, x, question, question.token, spot.prediction)
    logits = need_logits(spot.prediction)[0]
    explained = question.target if question.target is not None else int(logits.argmax())
    rival = _rival(logits, explained, label) if question.rather and len(logits) > 1 else None
    if rival is not None:
        spot = explorer.spot(memory, x, (explained, rival))
    key = (explained, rival) if rival is not None else question.target
    return ExplainedNumber(spot, key, logits, explained, label, logit_name(explorer, explained, rival))


def _of_tokens(
    explorer: Explorer, memory: Memory, x: Any, question: PredictionQuestion, tokens: AskedTokens, output: Any
) -> ExplainedNumber:
    ids = token_ids(x)
    if token_logits(output, len(ids)) is None:
        raise QueryError("this network gives one answer for the whole text, so single tokens cannot be asked for.")
    if not 1 <= tokens.begin < tokens.end <= len(ids):
        raise QueryError(
            f"token={tokens} is out of range: choose from 1 to {len(ids) - 1}; nothing stands before token 0."
        )
    logits = need_logits_of_tokens(output, len(ids))[tokens.begin - 1]
    truth = ids[tokens.begin]
    if tokens.end > tokens.begin + 1:
        spot = explorer.spot(
            memory, x, sum_of_logits(len(ids), [(i - 1, ids[i], 1.0) for i in range(tokens.begin, tokens.end)])
        )
        name = f"the logits of {tokens.end - tokens.begin} tokens together"
        return ExplainedNumber(spot, ("tokens", str(tokens)), logits, truth, truth, name)
    explained = truth if question.target is None else question.target
    if not 0 <= explained < len(logits):
        raise QueryError(f"target={explained} is not among the {len(logits):,} outputs of this network.")
    rival = _rival(logits, explained, truth) if question.rather else None
    terms = [(tokens.begin - 1, explained, 1.0)] + ([] if rival is None else [(tokens.begin - 1, rival, -1.0)])
    spot = explorer.spot(memory, x, sum_of_logits(len(ids), terms))
    name = logit_name(explorer, explained, rival) + " at this place"
    return ExplainedNumber(spot, ("tokens", str(tokens), explained, rival), logits, explained, truth, name)


def sum_of_logits(length: int, terms: Sequence[tuple[int, int, float]]) -> Target:
    """A target: the sum of some logits (position, class, sign) of one text."""

    def target(output: Any) -> Tensor:
        logits = need_logits_of_tokens(output, length)
        return torch.stack([sign * logits[position, number] for position, number, sign in terms]).sum().unsqueeze(0)

    return target


def token_ids(x: Any) -> list[int]:
    """The tokens of an input, one example."""
    tensor = (
        x["input_ids"]
        if isinstance(x, dict) and "input_ids" in x
        else next(iter(x.values()))
        if isinstance(x, dict)
        else x
    )
    tensor = tensor[0] if isinstance(tensor, tuple | list) else tensor
    return [int(token) for token in tensor.reshape(-1)]


def token_logits(output: Any, length: int) -> Float[Tensor, "tokens classes"] | None:
    """The logits at each token of one text; None if the network answers for the text as a whole."""
    try:
        logits = logits_of(output)
    except QueryError:
        return None
    if logits.ndim == 3 and logits.shape[1] == 1 and logits.shape[0] == length > 1:
        return logits[:, 0]
    return logits[0] if logits.ndim == 3 and tuple(logits.shape[:2]) == (1, length) else None


def need_logits_of_tokens(output: Any, length: int) -> Float[Tensor, "tokens classes"]:
    """The logits at each token of one text."""
    logits = token_logits(output, length)
    if logits is None:
        raise QueryError("this network gives one answer for the whole text, so single tokens cannot be asked for.")
    return logits


def logit_name(explorer: Explorer, explained: int, rival: int | None) -> str:
    """The explained number in words."""
    if explorer.outputs == 1:
        return "the output"
    names = [
        f"class {name}" if (name := explorer.class_name(number)).isdigit() else f"‘{name}’"
        for number in (explained, rival or 0)
    ]
    return f"the logit of {names[0]}" + ("" if rival is None else f" less that of {names[1]}")


def _rival(logits: Tensor, own: int, truth: int | None) -> int:
    """The class to compare with: the true class, else the most probable other class."""
    if truth is not None and truth != own:
        return truth
    return next(k for k in logits.argsort(descending=True).tolist() if k != own)
