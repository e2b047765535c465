"""Slots to disk and back. The format is described at the top of ``manifest.py``."""

from .arena import Arena
from .codec import COMPUTED, STORED, Encoded, all_finite, encode, encode_into
from .files import FileEntry, verify, write_tensors
from .manifest import Manifest, Shard, load_manifest
from .samples import sampled_bytes, sampled_entries, samples_at
from .store import BLOCK_ROWS, Block, Calls, Store
from .writer import CallRows, ParameterStep, Pending, Writer

__all__ = [
    "BLOCK_ROWS",
    "COMPUTED",
    "STORED",
    "Arena",
    "Block",
    "CallRows",
    "Calls",
    "Encoded",
    "FileEntry",
    "Manifest",
    "ParameterStep",
    "Pending",
    "Shard",
    "Store",
    "Writer",
    "all_finite",
    "encode",
    "encode_into",
    "load_manifest",
    "sampled_bytes",
    "sampled_entries",
    "samples_at",
    "verify",
    "write_tensors",
]
