"""The format on disk: manifest, tables and tensors, and how rows and weights are encoded in them."""

from .fingerprint import EntrySample
from .layer_matrix import (
    INDEX,
    LayerMatrix,
    assemble_matrix,
    bytes_a_row,
    matrix_columns,
    parameter_columns,
    piece_of,
    piece_slices,
)
from .ledger_file import LedgerEntry, LedgerState, add_parts, read_ledger, write_ledger
from .manifest import FORMAT, NAME, Manifest, Shard, SurveyPass, read_manifest
from .row_codec import (
    COMPUTED,
    STORED,
    EncodedRows,
    EncodingWorkspace,
    RowTarget,
    all_finite,
    encode,
    encode_into,
    row_scale,
    square_of,
)
from .safetensors_file import map_tensors, write_tensors
from .tables import SETTING, CallRow, ParameterStep, calls_table, steps_table, visits_table

__all__ = [
    "COMPUTED",
    "FORMAT",
    "INDEX",
    "NAME",
    "SETTING",
    "STORED",
    "CallRow",
    "EncodedRows",
    "EncodingWorkspace",
    "EntrySample",
    "LayerMatrix",
    "LedgerEntry",
    "LedgerState",
    "Manifest",
    "ParameterStep",
    "RowTarget",
    "Shard",
    "SurveyPass",
    "add_parts",
    "all_finite",
    "assemble_matrix",
    "bytes_a_row",
    "calls_table",
    "encode",
    "encode_into",
    "map_tensors",
    "matrix_columns",
    "parameter_columns",
    "piece_of",
    "piece_slices",
    "read_ledger",
    "read_manifest",
    "row_scale",
    "square_of",
    "steps_table",
    "visits_table",
    "write_ledger",
    "write_tensors",
]
