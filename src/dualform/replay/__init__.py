"""Training run again: what each step did, the adjoint that carries a target back through it, and retraining."""

from .adjoint import Influences, influences
from .differentiable_step import ParameterInputs, differentiable_step
from .kept_results import KeptResults, hash_of
from .rerun import Data, Losses, PassTrace, Rerun, Retrain, StepTrace, TracedStep
from .traces import MakeOptimizer, differing, load_first_weights, ordered_names, rebuild_optimizers, step_traces
from .workers import run_tasks

__all__ = [
    "Data",
    "Influences",
    "KeptResults",
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
    "hash_of",
    "influences",
    "load_first_weights",
    "ordered_names",
    "rebuild_optimizers",
    "run_tasks",
    "step_traces",
]
