"""Questions to the whole network, or to all that feeds one layer: examples, groups and times through all parameters."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.engine import GroupSums
from dualform.errors import QueryError
from dualform.progress import Progress, bar
from dualform.store import Store

from ..answers import Groups
from ..groups import GroupOfSlot, Stretches, group_slots
from ..hits import Summands
from ..query import Question, is_preconditioned
from ..weights import LARGEST
from .asked import AskedQuestions, ScanAnswers
from .contributions import output_parts, parts_from_ledger
from .early_steps import EarlyShare, remark_of
from .network_question import NetworkQuestion
from .one_layer import AskLayer, require_slots, rule_with_preconditioner, stretches_of, timeline_of

FEW_GROUPS = 64
"""So many parts of the weights are made for any number of queries; more only for as many queries: under Adam and its
kin each costs as much as two or three queries do in a sweep."""

SUMS_BYTES = 1 << 30
"""The most bytes of sums (queries × examples) that are in memory at a time."""


def ask_network(
    store: Store, ask: AskLayer, asked: AskedQuestions, layer: str | int | None, progress: Progress
) -> ScanAnswers:
    """Top examples, sums and a timeline of contributions through weights and biases, in one pass over all layers.

    With a ``layer`` only what that layer does with its weights counts.
    """
    question = question_to_network(store, ask, asked, layer)
    place = "" if layer is None else question.questions[0].module.name
    names = [name for name, _ in question.asked]
    groups = {column: group_slots(store, names, column) for column in asked.by}
    if groups and not (asked.top or asked.timeline) and _prefers_ledger(question, groups):
        return ScanAnswers(None, {c: _groups_from_ledger(question, g) for c, g in groups.items()}, None, {})
    summands = Summands(store, asked.view, asked.per, asked.top_by) if asked.top else None
    over = stretches_of(store, asked, names)
    sums = [g.names for g in groups.values()] + ([summands.groups.names] if summands else [])
    at_once = max(1, SUMS_BYTES // (8 * max([1, *map(len, sums)])))
    chunks = [slice(begin, min(begin + at_once, question.queries)) for begin in range(0, question.queries, at_once)]
    with bar("attending over the network", len(chunks) * question.slots, progress) as watch:
        parts = [_sums_of_chunk(question, chunk, summands, groups, over, watch) for chunk in chunks]
    remark = ""
    if question.swept:
        rule = rule_with_preconditioner(store, store.layer(question.swept[0])[0])
        remark = remark_of(EarlyShare.of_all([part.early for part in parts]), store.steps, rule, asked.after)
    initial, total = question.initial(parts[0].factors), question.total
    answers = {}
    for column, g in groups.items():
        values = torch.cat([part.groups[column] for part in parts])
        answers[column] = Groups(
            place, column, asked.score, question.target, g.names, values, None, initial, total, question.left_out,
            remark,
        )  # fmt: skip
    timeline = None
    if over:
        times = torch.cat([part.times for part in parts if part.times is not None])
        timeline = timeline_of(asked, place, question.target, over, times)
    if summands is None:
        return ScanAnswers(None, answers, timeline, {})
    of_summands = torch.cat([part.summands for part in parts if part.summands is not None])
    found = asked.hits_of(summands, of_summands, place, question.target, question.left_out, remark)
    return ScanAnswers(found.hits, answers, timeline, found.hits_by)


def question_to_network(
    store: Store, ask: AskLayer, asked: AskedQuestions, layer: str | int | None
) -> NetworkQuestion:  # fmt: skip
    """The question to all layers that can be asked, or to one."""
    if layer is not None:
        info, module = store.layer(layer)
        require_slots(store, info, layer, asked)
        return NetworkQuestion(store, asked.view, [ask(asked, info, module)])
    questions: list[Question] = []
    left_out: list[str] = []
    for info, module in [(layer, module) for layer in store.manifest.layers for module in layer.modules]:
        has_slots = all(store.parameters[name].by_slots for name in info.weights)
        if not has_slots and not (info.in_ledger and asked.by and not (asked.top or asked.timeline)):
            left_out.append(module.name)
            continue
        question = ask(asked, info, module)
        if any(rows.numel() for rows in question.calls.inputs):
            questions.append(question)
    counts = [len(question.queries) for question in questions]
    if not questions:
        raise QueryError(
            f"no layer of the memory at {store.path} can say which examples its weights come from: record with "
            "keep='slots' and an optimiser that has a rule, or ask one layer for weights α: layer=…, score='abs'."
            + (f" The ledgers answer by({store.manifest.by!r})." if store.manifest.by else "")
        )
    examples = questions[0].examples
    told_apart = [question for question, count in zip(questions, counts, strict=True) if count == examples]
    left_out += [question.module.name for question in questions if question not in told_apart]
    if not told_apart:
        raise QueryError("the rows of no layer can be told apart by example. Ask one layer: layer=…")
    return NetworkQuestion(store, asked.view, told_apart, tuple(left_out))


class SumsOfChunk(NamedTuple):
    """What one pass over the slots gives for some of the queries."""

    summands: Float[Tensor, "n G"] | None
    groups: dict[str, Float[Tensor, "n G"]]
    times: Float[Tensor, "n G"] | None
    early: EarlyShare
    factors: dict[str, Any]


def _sums_of_chunk(
    question: NetworkQuestion, chunk: slice, summands: Summands | None, groups: dict[str, GroupOfSlot],
    over: Stretches | None, watch: Any,
) -> SumsOfChunk:  # fmt: skip
    n = chunk.stop - chunk.start
    of_summands = GroupSums(len(summands.groups.names), n, "contribution", summands.groups) if summands else None
    of_groups = {column: GroupSums(len(g.names), n, "contribution", g) for column, g in groups.items()}
    of_times = GroupSums(over.count, n, "contribution", over) if over else None
    early = EarlyShare()
    sums = [sums for sums in (of_summands, *of_groups.values(), of_times) if sums is not None]
    factors = question.scan(chunk, [*sums, early] if question.swept else sums, watch)
    return SumsOfChunk(
        of_summands.total if of_summands else None,
        {column: reduction.total for column, reduction in of_groups.items()},
        of_times.total if of_times else None,
        early,
        factors,
    )


def _prefers_ledger(question: NetworkQuestion, groups: dict[str, GroupOfSlot]) -> bool:
    """Whether sums come from the parts of the weights, which are made once for all queries."""
    store = question.store
    if any(one.info.in_ledger for one in question.questions):
        return True
    weights = sum(store.parameters[name].size for one in question.questions for name in one.info.parameters)
    count = sum(len(g.names) for g in groups.values())
    fits, pays = 8 * count * weights <= LARGEST, question.queries > 1 and count <= max(FEW_GROUPS, question.queries)
    return fits and pays and any(is_preconditioned(store, one.info) for one in question.questions)


def _groups_from_ledger(question: NetworkQuestion, groups: GroupOfSlot) -> Groups:
    """The parts of all uses of layers, through the parts of their weights and biases."""
    parts = [output_parts(one, groups, parts_from_ledger(one, groups, None)) for one in question.questions]
    values = torch.stack([part.values + part.bias for part in parts if part.bias is not None]).sum(0)
    initial = torch.stack([part.initial for part in parts if part.initial is not None]).sum(0)
    place = "" if len(question.questions) > 1 else parts[0].layer
    return Groups(
        place, groups.column, "contribution", question.target, groups.names, values, None, initial, question.total,
        question.left_out,
    )  # fmt: skip
