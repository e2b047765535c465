"""The process group: several processes that train one model together (``torchrun``)."""

from .process_group import TOGETHER, Ranks, find_ranks

__all__ = ["TOGETHER", "Ranks", "find_ranks"]
