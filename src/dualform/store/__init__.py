"""Slots to disk and back. The format is described at the top of ``manifest.py``."""

from .blocks import Block, Calls
from .cache import Kept
from .fingerprint_table import sample_of, sampled, samples_at
from .folder import INIT, SIGN, claim, refuse_foreign, remove_memory, remove_unlisted
from .format.fingerprint import Glimpse
from .format.layer_matrix import (
    INDEX,
    bytes_a_row,
    columns_of,
    gradient_from,
    matrix_of,
    of_columns,
    parts_of,
    piece_of,
    places,
)
from .format.ledger_file import LedgerEntry, LedgerState
from .format.manifest import Manifest, Shard, read_manifest
from .format.row_codec import COMPUTED, STORED, Desk, Encoded, Room, all_finite, encode, encode_into, square_of
from .format.safetensors_file import write_tensors
from .format.tables import Call, ParameterStep
from .inference_mode import normal_mode
from .io.atomic_file import FileEntry, verify
from .io.direct_io import PAGE
from .io.slot_arena import Arena
from .rank_folders import cut, load_manifest, part_of
from .shard_writer import Pending, Writer
from .step_table import Moves
from .store import Store

__all__ = [
    "COMPUTED",
    "INDEX",
    "INIT",
    "PAGE",
    "SIGN",
    "STORED",
    "Arena",
    "Block",
    "Call",
    "Calls",
    "Desk",
    "Encoded",
    "FileEntry",
    "Glimpse",
    "Kept",
    "LedgerEntry",
    "LedgerState",
    "Manifest",
    "Moves",
    "ParameterStep",
    "Pending",
    "Room",
    "Shard",
    "Store",
    "Writer",
    "all_finite",
    "bytes_a_row",
    "claim",
    "columns_of",
    "cut",
    "encode",
    "encode_into",
    "gradient_from",
    "load_manifest",
    "matrix_of",
    "normal_mode",
    "of_columns",
    "part_of",
    "parts_of",
    "piece_of",
    "places",
    "read_manifest",
    "refuse_foreign",
    "remove_memory",
    "remove_unlisted",
    "sample_of",
    "sampled",
    "samples_at",
    "square_of",
    "verify",
    "write_tensors",
]
