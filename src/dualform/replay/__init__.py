"""Training run again: what each step did, the adjoint that carries a target back through it, retraining; and one pass
over a network that is trained already."""

from .adjoint import InfluenceKind, Influences, influences
from .kept_results import KeptResults, hash_of
from .rerun import Data, DataOfStep, Losses, PassTrace, Rerun, Retrain, StepTrace, bytes_of_state
from .slot_files import SlotFiles
from .slot_recording import SlotOptions, SlotRecording, untouched_generator
from .survey import Checkpoint, take_survey
from .traces import (
    Difference,
    MakeOptimizer,
    difference,
    has_state,
    kept_steps,
    load_first_weights,
    rebuild_optimizers,
    step_traces,
)
from .workers import run_tasks

__all__ = [
    "Checkpoint",
    "Data",
    "DataOfStep",
    "Difference",
    "InfluenceKind",
    "Influences",
    "KeptResults",
    "Losses",
    "MakeOptimizer",
    "PassTrace",
    "Rerun",
    "Retrain",
    "SlotFiles",
    "SlotOptions",
    "SlotRecording",
    "StepTrace",
    "bytes_of_state",
    "difference",
    "has_state",
    "hash_of",
    "influences",
    "kept_steps",
    "load_first_weights",
    "rebuild_optimizers",
    "run_tasks",
    "step_traces",
    "take_survey",
    "untouched_generator",
]
