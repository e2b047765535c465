"""Slots to disk and back. The format is described at the top of ``manifest.py``."""

from .blocks import Block, CallTable
from .cache import AnswerCache
from .fingerprint_table import entry_sample, entry_samples_at, sampled_entries
from .folder import INIT, SIGN, lock_folder, remove_memory, remove_unlisted, require_own_folder
from .format.fingerprint import EntrySample
from .format.layer_matrix import (
    INDEX,
    assemble_matrix,
    bytes_a_row,
    gradient_from,
    matrix_columns,
    parameter_columns,
    piece_of,
    piece_slices,
    split_by_parameter,
)
from .format.ledger_file import LedgerEntry, LedgerState
from .format.manifest import Manifest, Shard, read_manifest
from .format.row_codec import (
    COMPUTED,
    STORED,
    EncodedRows,
    EncodingWorkspace,
    RowTarget,
    all_finite,
    encode,
    encode_into,
    square_of,
)
from .format.safetensors_file import write_tensors
from .format.tables import CallRow, ParameterStep
from .inference_mode import outside_inference_mode
from .io.atomic_file import FileEntry, verify
from .io.direct_io import PAGE
from .io.slot_arena import SlotArena
from .rank_folders import load_manifest, rank_folder, truncate_shard
from .shard_writer import PendingShard, ShardWriter
from .step_table import ParameterSteps
from .store import Store

__all__ = [
    "COMPUTED",
    "INDEX",
    "INIT",
    "PAGE",
    "SIGN",
    "STORED",
    "AnswerCache",
    "Block",
    "CallRow",
    "CallTable",
    "EncodedRows",
    "EncodingWorkspace",
    "EntrySample",
    "FileEntry",
    "LedgerEntry",
    "LedgerState",
    "Manifest",
    "ParameterStep",
    "ParameterSteps",
    "PendingShard",
    "RowTarget",
    "Shard",
    "ShardWriter",
    "SlotArena",
    "Store",
    "all_finite",
    "assemble_matrix",
    "bytes_a_row",
    "encode",
    "encode_into",
    "entry_sample",
    "entry_samples_at",
    "gradient_from",
    "load_manifest",
    "lock_folder",
    "matrix_columns",
    "outside_inference_mode",
    "parameter_columns",
    "piece_of",
    "piece_slices",
    "rank_folder",
    "read_manifest",
    "remove_memory",
    "remove_unlisted",
    "require_own_folder",
    "sampled_entries",
    "split_by_parameter",
    "square_of",
    "truncate_shard",
    "verify",
    "write_tensors",
]
