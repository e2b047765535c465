"""Complete steps on their way to disk: collected into shards and handed to the writer."""

from .shard_builder import ShardBuilder, ShardLimits
from .size_report import SizeReport

__all__ = ["ShardBuilder", "ShardLimits", "SizeReport"]
