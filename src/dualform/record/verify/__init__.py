"""Checks that the memory is true: marks, probes of gradients, checksums of weights, and the live certificate."""

from .gradient_audit import NO_PRODUCT, GradientFactors, OnMark, audit, not_products, probed, scale_of
from .gradient_follower import GradientFollower, OpenPass, PassGradient, ProbedSlots, follow_gradients, gradient_eps
from .gradient_probe import probe_call, probe_gradients
from .live_certificate import LiveCertificate, StepLine, UsedSlots
from .marks import Marks
from .unfinished_step import UnfinishedStep
from .weight_fingerprint import WeightFingerprints

__all__ = [
    "NO_PRODUCT",
    "GradientFactors",
    "GradientFollower",
    "LiveCertificate",
    "Marks",
    "OnMark",
    "OpenPass",
    "PassGradient",
    "ProbedSlots",
    "StepLine",
    "UnfinishedStep",
    "UsedSlots",
    "WeightFingerprints",
    "audit",
    "follow_gradients",
    "gradient_eps",
    "not_products",
    "probe_call",
    "probe_gradients",
    "probed",
    "scale_of",
]
