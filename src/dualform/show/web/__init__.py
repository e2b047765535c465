"""The explorer in a browser: a local server that renders the views, and lets nobody else in."""

from .serve import serve

__all__ = ["serve"]
