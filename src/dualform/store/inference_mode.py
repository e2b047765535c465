"""Out of inference mode: its tensors are of no use outside of it, so nothing that is kept may be made in it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave inference mode for a while, if the user is in it; gradients stay off unless they are asked for."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield
