"""What the page of a prediction shows."""

from dataclasses import dataclass
from typing import Any

from dualform.explain import ScanAnswers
from dualform.progress import Progress
from dualform.types import Per, Score

from ...text import FIRST_ORDER, unit
from ..charts import Chart
from ..explorer import MANY, ClassScore, ExampleHeader, ExamplePlace, Explorer
from ..work import PendingWork
from .answer_charts import spotlight_chart, time_chart
from .explained import ExplainedNumber, explained_number
from .headline import Headline, headline_of
from .input_tokens import InputTokens, input_tokens
from .places import AnswerPlaces, answer_places
from .question import CURVE, PredictionQuestion, has_slots, scores_of, settle_question, units_of
from .sums import SumOfParts, sum_of_parts
from .table_rows import TableRows, table_rows
from .top_examples import TopExample, top_example

STRETCHES, SHOWN_CLASSES = 40, 10
"""Stretches of the timeline, and classes shown."""


@dataclass(frozen=True)
class PredictionView(ExampleHeader):
    """Everything the page shows."""

    headline: Headline
    says: list[ClassScore]
    truth: int | None
    """The right class, or the token that stands at the place asked about."""
    layers: list[str]
    columns: list[str]
    steps: int
    question: PredictionQuestion
    """With every choice made."""
    scores: list[Score]
    units: list[Per]
    unit: str
    target: str
    notes: list[str]
    tokens: InputTokens | None
    """The input as tokens that can be clicked, if it is a text."""
    examples: list[TopExample] | None
    """None while they are being computed."""
    rows: TableRows | None
    """The examples as rows of one table, if they are rows of a table."""
    sums: SumOfParts | None
    curve: Chart | None
    time: Chart | None
    pending: PendingWork | None


def predict(explorer: Explorer, place: ExamplePlace, question: PredictionQuestion) -> PredictionView | PendingWork:
    """What one prediction is made of; pending work if the weights of an earlier step must be rebuilt first."""
    explorer.need(place)
    memory = explorer.at(question.step if question.step is not None else explorer.memory.step)
    if isinstance(memory, PendingWork):
        return memory
    settled = settle_question(explorer, memory, question)
    assert settled.score and settled.by is not None and settled.per is not None
    number = explained_number(explorer, memory, place, settled)
    answer, pending, places, examples = None, None, None, []
    if settled.step:  # at step 0 nothing was learned yet
        answer, pending = _answer(explorer, number, place, settled)
        places = None if answer is None else answer_places(explorer, number, place, settled, answer)
        examples = None if answer is None else _examples(explorer, answer, settled, places)
    sums = sum_of_parts(explorer, answer.groups[settled.by], number.name) if answer else None
    truth = number.truth
    says = explorer.says(number.logits, SHOWN_CLASSES, [number.explained, *([] if truth is None else [truth])])
    return PredictionView(
        **explorer.about(place),
        headline=headline_of(explorer, says, truth, settled, answer.groups.get(explorer.index) if answer else None),
        says=says,
        truth=truth,
        layers=list(explorer.layers),
        columns=explorer.columns,
        steps=explorer.memory.step,
        question=settled,
        scores=scores_of(explorer, settled.layer),
        units=units_of(explorer, settled.layer),
        unit=unit(settled.score, number.name),
        target=number.name,
        notes=[*_notes(explorer, settled), *_remarks(answer, settled.by)],
        tokens=input_tokens(explorer, place, settled, number, places),
        examples=examples,
        rows=table_rows(explorer, place, examples or []),
        sums=sums,
        curve=spotlight_chart(explorer, answer.hits, settled) if answer and answer.hits else None,
        time=time_chart(explorer, answer.timeline, settled, number.explained) if answer and answer.timeline else None,
        pending=pending,
    )


def _answer(
    explorer: Explorer, number: ExplainedNumber, place: ExamplePlace, question: PredictionQuestion
) -> tuple[ScanAnswers | None, PendingWork | None]:
    """All answers from one pass over the slots, or the pending work if that takes long."""
    assert question.score and question.by is not None
    many = len(explorer.groups(question.by)) > MANY
    sums_only = not has_slots(explorer, question.layer)
    # for a text the paper asks about its last token
    last = (
        question.score != "contribution"
        and question.layer is not None
        and explorer.positions(question.layer) > 1
        and explorer.shown(place).kind == "text"
    )
    columns = [question.by]
    if (
        question.per == "example"
        and question.score == "contribution"
        and explorer.index != question.by
        and not sums_only
    ):
        columns.append(explorer.index)
    options: dict[str, Any] = {"top": 0 if sums_only else CURVE, "by": columns, "score": question.score}
    options |= {"order": question.order, "position": -1 if last else None, "after": question.after}
    if not sums_only:
        options |= {"timeline": STRETCHES, "timeline_by": None if many else question.by, "per": question.per}
    own = explorer.own[place.row][0] if place.set == "own" else ""
    key = ("answer", place, own, question.layer, question.score, question.order, number.key)
    key = (*key, question.step, question.by, question.per, question.after)

    def work(progress: Progress) -> ScanAnswers:
        return number.spot.ask(question.layer, progress=progress, **options)

    where = "the whole network" if question.layer is None else f"layer {question.layer}"
    seconds = explorer.question_seconds(question.layer, question.score)
    result = explorer.work_queue.result(key, f"what each example adds through {where}", seconds, work)
    return (None, result) if isinstance(result, PendingWork) else (result, None)


def _notes(explorer: Explorer, question: PredictionQuestion) -> list[str]:
    notes = []
    if question.score == "contribution" and question.layer not in (None, explorer.layers[-1]):
        notes.append(FIRST_ORDER)
    if question.step == 0:
        notes.append("These are the initial weights: nothing was learned before the first step.")
    if question.after:
        notes.append(f"The first {question.after:,} steps of training are left out.")
    return notes


def _remarks(answer: ScanAnswers | None, by: str) -> list[str]:
    """What a reader should know of the answer."""
    if answer is None:
        return []
    of_answer = answer.hits if answer.hits is not None else answer.groups[by]
    remarks = [of_answer.remark] if of_answer.remark else []
    if of_answer.left_out:
        remarks.append(f"Not part of this answer, since no slots of them were kept: {', '.join(of_answer.left_out)}.")
    return remarks


def _examples(
    explorer: Explorer, answer: ScanAnswers, question: PredictionQuestion, places: AnswerPlaces | None
) -> list[TopExample]:
    hits = answer.hits
    shown = (
        [] if hits is None else [hit for hit in hits if hit.columns.get(explorer.index, 0) is not None][: question.k]
    )
    assert hits is not None or not shown
    return [
        top_example(
            explorer, hits, hit, question.layer,
            place=None if places is None else places.token_of(hit.rank),
            taught=places is not None and places.taught,
            speaks=() if places is None else places.speaks(hit.rank),
        )
        for hit in shown
    ]  # fmt: skip
