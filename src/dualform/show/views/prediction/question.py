"""What is asked about one prediction: the controls of the page, and what they can be."""

from dataclasses import dataclass, replace

from dualform.errors import QueryError
from dualform.explain import Memory
from dualform.types import Order, Per, Score

from ..explorer import Explorer

CURVE = 300
"""The most hits that are asked for: those of the spotlight."""

SCORES: tuple[Score, ...] = ("contribution", "abs", "weight")
ORDERS: dict[Order, str] = {"largest": "add most", "smallest": "take most away", "magnitude": "matter most"}


@dataclass(frozen=True)
class AskedTokens:
    """The tokens of a text whose logits are explained: from ``begin`` to before ``end``."""

    begin: int
    end: int

    @classmethod
    def read(cls, text: str | None) -> "AskedTokens | None":
        """Tokens from an address: "7", or "7-9" with both ends."""
        if text is None:
            return None
        first, _, last = text.partition("-")
        last = last or first
        if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()) or len(text) > 24:
            raise QueryError(f"token={text[:20]!r} is not a token or a span of tokens; write token=7 or token=7-9.")
        return cls(min(int(first), int(last)), max(int(first), int(last)) + 1)

    def __str__(self) -> str:
        return str(self.begin) if self.end == self.begin + 1 else f"{self.begin}-{self.end - 1}"


@dataclass(frozen=True)
class PredictionQuestion:
    """The controls of the page. None leaves a choice to the explorer."""

    layer: str | None = None
    """One layer; None for the whole network."""
    score: Score | None = None
    order: Order = "largest"
    target: int | None = None
    rather: bool = False
    """Whether the target is a difference of logits: the class minus the true class, or minus the next best."""
    k: int = 12
    step: int | None = None
    by: str | None = None
    per: Per | None = None
    token: AskedTokens | None = None
    """The tokens of a text that a language model is asked about; None for the one that it says next."""
    after: int = 0
    """Steps at the beginning of training that are left out."""


def settle_question(explorer: Explorer, memory: Memory, question: PredictionQuestion) -> PredictionQuestion:
    """The question with every open choice made, as the memory allows."""
    layer = question.layer or (None if asks_network(explorer) and question.per != "slot" else explorer.layers[-1])
    if layer is not None:
        explorer.info(layer)
    scores = scores_of(explorer, layer)
    score = question.score or scores[0]
    if score not in scores:
        where = "the whole network" if layer is None else f"layer '{layer}'"
        raise QueryError(f"{where} cannot be asked for score='{score}': what was kept allows {scores}.")
    by = question.by or explorer.columns[0]
    if by not in explorer.columns:
        raise QueryError(f"the visits have no column '{by}': they have {explorer.columns}.")
    if not 1 <= question.k <= CURVE:
        raise QueryError(f"k={question.k} is out of range: choose a number from 1 to {CURVE}.")
    choices = units_of(explorer, layer)
    per = question.per or choices[0]
    if per not in choices:
        raise QueryError(f"per='{per}' cannot be asked here: choose one of {choices}.")
    if not 0 <= question.after < max(1, memory.step):
        raise QueryError(f"after={question.after} leaves no step: training had {memory.step:,}.")
    return replace(question, layer=layer, score=score, by=by, per=per, step=memory.step)


def asks_network(explorer: Explorer) -> bool:
    """Whether the whole network can be asked for contributions."""
    return any("contribution" in scores_of(explorer, layer) for layer in explorer.layers)


def units_of(explorer: Explorer, layer: str | None) -> list[Per]:
    """What a tile can be, the default first."""
    units: list[Per] = ["example"] if explorer.index in explorer.memory.store.visits.column_names else []
    units.append("visit")
    return units if layer is None or explorer.info(layer).keep != "slots" else [*units, "slot"]


def scores_of(explorer: Explorer, layer: str | None) -> list[Score]:
    """The scores that the kept slots of a layer, or of the whole network, allow."""
    if layer is None:
        return ["contribution"]
    info = explorer.info(layer)
    if info.keep == "slots" and all(explorer.memory.store.parameters[name].by_slots for name in info.weights):
        return list(SCORES)
    if info.keep == "ledger":
        return ["contribution"]
    return ["abs", "weight"]


def has_slots(explorer: Explorer, layer: str | None) -> bool:
    """Whether single training examples can be told apart through a layer, or through any."""
    layers = explorer.layers if layer is None else (layer,)
    return any(explorer.info(name).keep == "slots" for name in layers)
