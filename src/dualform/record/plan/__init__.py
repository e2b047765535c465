"""The recording plan, made before the first step: layers, parameters, options."""

from .certificate_entries import CertificateColumns, CertificateEntries, columns_for, sizes_of
from .model_links import ModelLinks
from .options import RecordOptions, ReplayOptions
from .parameter_owners import ParameterOwners
from .recording_plan import MapUse, RecordedModule, RecordingPlan, make_plan
from .wrapped_optimizers import plain_optimizers, unwrapped

__all__ = [
    "CertificateColumns",
    "CertificateEntries",
    "MapUse",
    "ModelLinks",
    "ParameterOwners",
    "RecordOptions",
    "RecordedModule",
    "RecordingPlan",
    "ReplayOptions",
    "columns_for",
    "make_plan",
    "plain_optimizers",
    "sizes_of",
    "unwrapped",
]
