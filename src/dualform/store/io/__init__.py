"""Bytes to disk: atomic files, large writes that bypass the page cache, and reused buffers."""

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
