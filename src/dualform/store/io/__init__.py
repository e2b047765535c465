"""Bytes to disk: files that appear whole or not at all, large writes past the page cache, and reused buffers."""
