"""Bytes to disk: files that appear whole or not at all, large writes past the page cache, and reused buffers."""

from .atomic_file import FileEntry, is_in_use, retry_while_in_use, verify, write_bytes, write_parquet, write_whole
from .direct_io import PAGE, DirectFile
from .slot_arena import SlotArena

__all__ = [
    "PAGE",
    "DirectFile",
    "FileEntry",
    "SlotArena",
    "is_in_use",
    "retry_while_in_use",
    "verify",
    "write_bytes",
    "write_parquet",
    "write_whole",
]
