"""Slots to disk and back. The format is described at the top of ``manifest.py``."""

from .arena import Arena
from .calls import Block, Calls
from .codec import COMPUTED, STORED, Desk, Encoded, Room, all_finite, encode, encode_into, square_of
from .files import FileEntry, verify
from .folder import INIT, SIGN, claim, refuse_foreign, remove_memory, remove_unlisted
from .glimpse import Glimpse
from .inference import normal_mode
from .kept import Kept
from .layout import INDEX, bytes_a_row, columns_of, gradient_from, matrix_of, of_columns, parts_of, piece_of, places
from .ledgers import LedgerEntry, LedgerState
from .manifest import Manifest, Shard, read_manifest
from .out import PAGE
from .parts import cut, load_manifest, part_of
from .samples import sample_of, sampled, samples_at
from .schedule import Moves
from .store import Store
from .tables import Call, ParameterStep
from .tensors import write_tensors
from .writer import Pending, Writer

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
