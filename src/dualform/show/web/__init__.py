"""The explorer in a browser: a local server that renders the views for authorised visitors only."""

from .opening import opening_from_disk
from .serve import make_server, serve, token_in

__all__ = ["make_server", "opening_from_disk", "serve", "token_in"]
