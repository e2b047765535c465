"""Training run again: what each step did, the adjoint that carries a target back through it, retraining; and one pass
over a network that is trained already."""

from .adjoint import InfluenceKind, Influences, influences
from .kept_results import KeptResults, hash_of
from .model_copy import changed_values, copied, loose_values
from .rerun import Data, DataOfStep, Losses, PassTrace, Rerun, Retrain, StepTrace, bytes_of_state
from .simplifications import Simplifications
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
    parameters_with_guessed_settings,
    rebuild_optimizers,
    step_traces,
    taught_rules,
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
    "Simplifications",
    "SlotFiles",
    "SlotOptions",
    "SlotRecording",
    "StepTrace",
    "bytes_of_state",
    "changed_values",
    "copied",
    "difference",
    "has_state",
    "hash_of",
    "influences",
    "kept_steps",
    "load_first_weights",
    "loose_values",
    "parameters_with_guessed_settings",
    "rebuild_optimizers",
    "run_tasks",
    "step_traces",
    "take_survey",
    "taught_rules",
    "untouched_generator",
]
