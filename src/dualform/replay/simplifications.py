"""What influence through training holds fixed, or takes one branch of. It is said beside the answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxtyping import Float, Int
from torch import Tensor

from .traced_run import TracedStep

SHOWN = 4


@dataclass
class Simplifications:
    """What steps on the way back were simplified by."""

    branches: dict[str, str] = field(default_factory=dict)
    """By the name of an optimiser, what of its steps does not have a slope everywhere."""
    buffers: set[str] = field(default_factory=set)
    """Buffers that the model itself changes while it trains."""
    factors: set[int] = field(default_factory=set)
    """Steps whose gradients were scaled by a factor that nothing explains."""
    infinite: int = 0
    """The last step whose visits have an influence that is no finite number; 0 if there is none."""

    def add(self, step: TracedStep) -> None:
        """A step was differentiated."""
        for joint in step.steps:
            if joint.rule.name not in self.branches and (words := joint.rule.not_differentiable(joint.settings)):
                self.branches[joint.rule.name] = words
        self.buffers |= step.own_buffers
        if step.scaling.clip_norm is None and step.scaling.factor != 1.0:
            self.factors.add(step.number)

    def look_at(self, steps: Int[Tensor, " visits"], values: Float[Tensor, "queries visits"]) -> None:
        """Find the visits whose influence is no finite number."""
        self.infinite = int(steps[~values.isfinite().all(0)].max()) if not bool(values.isfinite().all()) else 0

    @property
    def held(self) -> str:
        """What makes the answer another one than the slope of training, in sentences; empty if nothing does."""
        sentences = []
        if self.buffers:
            sentences.append(
                f"The model changes {_listed(sorted(self.buffers), 'buffer')} while it trains, and influence holds "
                "what it puts there fixed: it is not exactly the slope of training."
            )
        if self.factors:
            sentences.append(
                f"The gradients of {_counted(self.factors)} were scaled by a factor that is not that of clipping all "
                "of them to one norm, and influence holds it fixed."
            )
        if self.infinite:
            sentences.append(
                f"The influence of visits up to step {self.infinite} is not a finite number: on the way back through "
                "later steps it grew beyond what the weights' precision can hold. Ask about fewer steps, or train in "
                "float64."
            )
        return " ".join(sentences)

    @property
    def note(self) -> str:
        """All that is to be said beside the answer."""
        if not self.branches:
            return self.held
        steps = ", ".join(f"{name} ({words})" for name, words in self.branches.items())
        branch = f"Steps of {steps} do not have a slope everywhere: that of the branch that was taken counts."
        return f"{branch} {self.held}".strip()


def _listed(names: Sequence[str], noun: str) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
    return f"the {noun}{'' if len(names) == 1 else 's'} {shown}"


def _counted(steps: set[int]) -> str:
    return f"step {min(steps)}" if len(steps) == 1 else f"{len(steps)} steps (the first is step {min(steps)})"
