"""The explorer in a browser: a local server that renders the views for authorised visitors only."""

from .serve import serve

__all__ = ["serve"]
