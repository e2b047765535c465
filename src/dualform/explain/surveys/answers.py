"""The answer of a survey: approximate scores of every example for every query."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..notebook import influence_html
from ..runs import Influence

SHOWN = 6


@dataclass(frozen=True)
class SurveyScores(Influence):
    """Approximate scores of the surveyed examples: positive where an example speaks for the target.

    With ``kind="gradient"`` a value is the first-order change of the target by a step of plain gradient descent on the
    example's own loss, at each checkpoint with its learning rate, summed. With ``"ekfac"`` it is the influence
    function: minus it is about the change of the target without the example, if the network were at the optimum of the
    mean loss and EK-FAC were its Hessian. ``left_out`` says which parameters do not count, and why.
    """

    learning_rates: tuple[float, ...] = ()
    damping: Mapping[str, float] = field(default_factory=dict)
    """The number that was added to the eigenvalues of each layer (EK-FAC)."""
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def approximation(self) -> str:
        """What these scores are, in a sentence."""
        if self.kind == "ekfac":
            how = "an influence function with EK-FAC of the empirical Fisher matrix at the trained weights"
        elif len(self.learning_rates) == 1:
            how = "gradient similarity at the trained weights (TracIn at one checkpoint)"
        else:
            how = f"gradient similarity at {len(self.learning_rates)} checkpoints (TracIn)"
        return f"An approximation: {how}, not what would have happened without the example."

    def __str__(self) -> str:
        index, value = self.top(1)[0]
        first = f"{self.kind}: example {index} speaks most for {self.target} of query 0 ({value:+.3g})."
        return "\n".join([first, self.approximation, *self._left_out_in_words()])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return influence_html(self, [self.approximation, *self._left_out_in_words()])

    def _left_out_in_words(self) -> list[str]:
        if not self.left_out:
            return []
        names = [f"'{name}' ({reason})" for name, reason in list(self.left_out.items())[:SHOWN]]
        more = f" and {len(self.left_out) - SHOWN} more" if len(self.left_out) > SHOWN else ""
        return [f"Left out: {', '.join(names)}{more}."]
