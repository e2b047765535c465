"""Whether a training with a rule such as Adam began at its full learning rate."""

from collections.abc import Callable, Sequence

from dualform.rules import Rule

from .parameter_step import ParameterUpdate

LATER = 20
"""The step at which the learning rate is compared with that of the first step."""

RISEN = 2.0
"""By this factor a warm-up has raised the learning rate until then."""


class WarmUpReport:
    """Says once, through ``say``, that the first steps of a training are loud: there was no warm-up."""

    def __init__(self, say: Callable[[str], None] | None) -> None:
        self._say = say
        self._first: dict[str, float] = {}
        """The first learning rate by rule."""

    def take(self, rule: Rule | None, updates: Sequence[ParameterUpdate]) -> None:
        """An optimiser has taken a step."""
        if self._say is None or rule is None or not rule.reads_gradients or not updates:
            return
        settings = updates[0].settings
        step, rate = settings.get("step", 0), settings.get("lr")  # most have no state before the first step
        if step == 0 and rate is not None:
            self._first[rule.name] = rate
        elif step == LATER and rate is not None and rule.name in self._first:
            first = self._first.pop(rule.name)
            if rate <= RISEN * first:
                self._say(
                    f"{rule.name} began without a warm-up (a learning rate of {first:g} from the first step on), so "
                    "the first few steps are large whatever their examples say. Answers say how large their part is, "
                    "and a question with after=step leaves them out; the next training can raise the rate slowly."
                )
            self._say = None
