"""The explorer inside a notebook."""

from .explore import NotebookExplorer, explore

__all__ = ["NotebookExplorer", "explore"]
