"""Training run again: what each step did, the adjoint that carries a target back through it, retraining; and one pass
over a network that is trained already."""

from .adjoint import Influences, influences
from .differentiable_step import ParameterInputs, differentiable_step
from .rerun import Data, Losses, PassTrace, Rerun, Retrain, StepTrace, TracedStep
from .survey import Checkpoint, take_survey
from .traces import MakeOptimizer, differing, load_first_weights, ordered_names, rebuild_optimizers, step_traces

__all__ = [
    "Checkpoint",
    "Data",
    "Influences",
    "Losses",
    "MakeOptimizer",
    "ParameterInputs",
    "PassTrace",
    "Rerun",
    "Retrain",
    "StepTrace",
    "TracedStep",
    "differentiable_step",
    "differing",
    "influences",
    "load_first_weights",
    "ordered_names",
    "rebuild_optimizers",
    "step_traces",
    "take_survey",
]
