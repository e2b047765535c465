"""Answers as text: sentences, tables, and pictures in a terminal."""

from dualform.explain.notebook import ends, plain, same_digits

from .outputs import logits_at_end, need_logits
from .tables import caption, certificate_table, columns_table, disk_table, groups_table, hits_table, layers_table
from .terminal import examples_view
from .words import FIRST_ORDER, MASKED, WHOLE_NETWORK, disk_size, parts, size, sum_check, unit

__all__ = [
    "FIRST_ORDER",
    "MASKED",
    "WHOLE_NETWORK",
    "caption",
    "certificate_table",
    "columns_table",
    "disk_size",
    "disk_table",
    "ends",
    "examples_view",
    "groups_table",
    "hits_table",
    "layers_table",
    "logits_at_end",
    "need_logits",
    "parts",
    "plain",
    "same_digits",
    "size",
    "sum_check",
    "unit",
]
