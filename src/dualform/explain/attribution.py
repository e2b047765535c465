"""What training put into a number, asked in several ways: top examples, sums over groups, a timeline."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

from dualform.engine import StoreView
from dualform.errors import QueryError, warn
from dualform.progress import Progress
from dualform.types import LayerInfo, ModuleInfo, Order, Per, Score

from .answers import Groups, Timeline
from .ask import AskedQuestions, ScanAnswers, ask_layer, ask_network, require_count, sum_layer_weights
from .hits import Hits, SlotHits, VisitHits
from .query import Question, Target

if TYPE_CHECKING:
    from .memory import Memory

STRETCHES = 50


class Attribution:
    """A number that a memory explains by the training that its layers recall. Each question is one pass over slots.

    Without ``layer=`` a question is about the whole network: the first-order effect of all explained weights and biases
    together. With it, it is about one layer's exact account. Subclasses say what the number is, and which queries it
    sends to a layer.
    """

    memory: "Memory"

    @overload
    def top(
        self, k: int = 10, *, layer: str | int, per: Literal["slot"], score: Score = ..., order: Order = ...,
        after: int = ..., target: Target = ..., position: int | None = ..., progress: Progress = ...,
    ) -> SlotHits: ...  # fmt: skip
    @overload
    def top(
        self, k: int = 10, *, layer: str | int | None = ..., per: Literal["visit"], score: Score = ...,
        order: Order = ..., after: int = ..., target: Target = ..., position: int | None = ...,
        progress: Progress = ...,
    ) -> VisitHits: ...  # fmt: skip
    @overload
    def top(
        self, k: int = 10, *, layer: str | int | None = ..., per: Literal["example"] | None = ..., score: Score = ...,
        order: Order = ..., after: int = ..., target: Target = ..., position: int | None = ...,
        progress: Progress = ...,
    ) -> Hits: ...  # fmt: skip
    def top(
        self,
        k: int = 10,
        *,
        layer: str | int | None = None,
        per: Per | None = None,
        score: Score = "contribution",
        order: Order = "largest",
        after: int = 0,
        target: Target = None,
        position: int | None = None,
        progress: Progress = True,
    ) -> Hits:
        """The exact k best training examples of each query, all their visits and tokens together.

        - ``layer``: one layer's exact account. Without it, all explained layers together.
        - ``per``: "example" if nothing is said, "visit" for single moments of training, "slot" for single rows of one
          layer's input, with weight α.
        - ``score``: "weight" or "abs" rank by Σα or Σ|α| of one layer.
        - ``after``: what training did after this step alone; the first steps under Adam are large.
        - ``position``: the row of each query that counts, in one layer: a token, a place of an image.
        """
        require_count(1, "k", k)
        answer = self.ask(
            layer, top=k, per=per, score=score, order=order, after=after, target=target, position=position,
            progress=progress,
        )  # fmt: skip
        assert answer.hits is not None
        return answer.hits

    @overload
    def top_by(
        self, column: str, k: int = 10, *, layer: str | int, per: Literal["slot"], score: Score = ...,
        order: Order = ..., after: int = ..., target: Target = ..., position: int | None = ...,
        progress: Progress = ...,
    ) -> dict[Any, SlotHits]: ...  # fmt: skip
    @overload
    def top_by(
        self, column: str, k: int = 10, *, layer: str | int | None = ..., per: Literal["visit"], score: Score = ...,
        order: Order = ..., after: int = ..., target: Target = ..., position: int | None = ...,
        progress: Progress = ...,
    ) -> dict[Any, VisitHits]: ...  # fmt: skip
    @overload
    def top_by(
        self, column: str, k: int = 10, *, layer: str | int | None = ..., per: Literal["example"] | None = ...,
        score: Score = ..., order: Order = ..., after: int = ..., target: Target = ..., position: int | None = ...,
        progress: Progress = ...,
    ) -> dict[Any, Hits]: ...  # fmt: skip
    def top_by(
        self,
        column: str,
        k: int = 10,
        *,
        layer: str | int | None = None,
        per: Per | None = None,
        score: Score = "contribution",
        order: Order = "largest",
        after: int = 0,
        target: Target = None,
        position: int | None = None,
        progress: Progress = True,
    ) -> dict[Any, Any]:
        """The exact k best training examples of each query in every group of a column: group → hits."""
        require_count(1, "k", k)
        answer = self.ask(
            layer, top=k, top_by=column, per=per, score=score, order=order, after=after, target=target,
            position=position, progress=progress,
        )  # fmt: skip
        return answer.hits_by

    def by(
        self,
        column: str,
        *,
        layer: str | int | None = None,
        score: Score = "contribution",
        after: int = 0,
        target: Target = None,
        position: int | None = None,
        places: bool = False,
        progress: Progress = True,
    ) -> Groups:
        """A score summed over the groups of a column. ``score="abs"`` is the paper's: Σ|α|.

        With ``places`` every position of the examples is a group of its own: names are (value, position), as for the
        words of a text whose noted column says where each stretch of it begins. Only weights α can be summed so.
        """
        answer = self.ask(
            layer, by=(column,), score=score, after=after, target=target, position=position, places=places,
            progress=progress,
        )  # fmt: skip
        return answer.groups[column]

    def timeline(
        self, column: str | None = None, *, layer: str | int | None = None, stretches: int = STRETCHES,
        score: Score = "contribution", target: Target = None, position: int | None = None, progress: Progress = True,
    ) -> Timeline:  # fmt: skip
        """A score over training time, in equal stretches of steps; by groups of a column if one is given."""
        require_count(1, "stretches", stretches)
        answer = self.ask(
            layer,
            timeline=stretches,
            timeline_by=column,
            score=score,
            target=target,
            position=position,
            progress=progress,
        )
        assert answer.timeline is not None
        return answer.timeline

    def ask(
        self, layer: str | int | None = None, *, top: int = 0, top_by: str | None = None, by: Sequence[str] = (),
        timeline: int = 0, timeline_by: str | None = None, per: Per | None = None, score: Score = "contribution",
        order: Order = "largest", after: int = 0, target: Target = None, position: int | None = None,
        places: bool = False, progress: Progress = True,
    ) -> ScanAnswers:  # fmt: skip
        """Several questions at once: the ``top`` examples (of each group of ``top_by``), sums ``by`` columns, a
        ``timeline`` of so many stretches.
        """
        require_count(0, "after", after)
        per = _per(per, layer) if top else "example"
        columns = (by,) if isinstance(by, str) else tuple(by)
        asked = AskedQuestions(
            self._view_after(after), top, top_by, columns, timeline, timeline_by, per, score, order, target, position,
            places, after,
        )  # fmt: skip
        asked.require_sense(whole_network=layer is None)
        store = self.memory.store
        if timeline or score == "contribution":
            store.need_training()
        answers = self._ask(asked, layer, progress)
        answers = answers.without_totals() if after else answers
        return answers.with_classes(self.memory.class_names)

    def _ask(self, asked: AskedQuestions, layer: str | int | None, progress: Progress) -> ScanAnswers:
        """The answers of the whole network, or those of one layer in as many passes as they need."""
        store = self.memory.store
        if layer is None:
            return ask_network(store, self._question, asked, None, progress)
        if not asked.top or asked.per == "slot":
            return ask_layer(store, self._question, asked, layer, progress)
        of_examples = replace(asked, by=(), timeline=0)
        if asked.score == "contribution":
            answers = ask_network(store, self._question, of_examples, layer, progress)
        else:
            answers = sum_layer_weights(store, self._question, of_examples, layer, progress)
        if not (asked.by or asked.timeline):
            return answers
        others = ask_layer(store, self._question, replace(asked, top=0, top_by=None), layer, progress)
        return ScanAnswers(answers.hits, others.groups, others.timeline, answers.hits_by)

    def _question(self, asked: AskedQuestions, info: LayerInfo, module: ModuleInfo) -> Question:
        """The question to one use of a layer."""
        raise NotImplementedError

    def _view_after(self, after: int) -> StoreView:
        """The view of the memory, without the first steps."""
        store, view = self.memory.store, self.memory.view
        if not after:
            return view
        if after >= view.horizon:
            raise QueryError(f"after={after} leaves no step: the memory is read at step {view.horizon:,}.")
        later = store.visits["step"].to_numpy() > after
        return replace(view, visible=later if view.visible is None else later & view.visible)


def _per(per: Per | None, layer: str | int | None) -> Per:
    """What a hit stands for; says once what has changed for those who name a layer and nothing else."""
    if per is None and layer is not None:
        warn(
            "top(…, layer=…) gives training examples, all their visits together; in version 0.1 it gave slots. Write "
            "per='slot' for these, or per='example' if examples are meant."
        )
    return per or "example"
