"""Leaving inference mode: its tensors cannot be used outside of it, so cached tensors must not be created in it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave inference mode inside the ``with`` block, if it is on; gradients stay disabled then."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield
