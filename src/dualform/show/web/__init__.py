"""The explorer in a browser: a local server that renders the views for authorised visitors only."""

from .serve import make_server, serve

__all__ = ["make_server", "serve"]
