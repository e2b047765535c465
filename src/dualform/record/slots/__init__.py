"""The material of slots: the calls of the model, the columns of a batch, and copied inputs and errors."""

from . import slot_buffers
from .batch_columns import RESERVED, Batch, BatchColumns
from .model_calls import CallWatcher, ModelCall, ModelCalls, Shapes
from .slot_buffers import SHARD_BYTES, CallSlots, RowRun, SlotBuffer

__all__ = [
    "RESERVED",
    "SHARD_BYTES",
    "Batch",
    "BatchColumns",
    "CallSlots",
    "CallWatcher",
    "ModelCall",
    "ModelCalls",
    "RowRun",
    "Shapes",
    "SlotBuffer",
    "slot_buffers",
]
