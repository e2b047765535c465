"""The learning rate of visual query tuning, epoch by epoch."""

import math


def warmup_cosine(epoch: int, epochs: int = 100, warmup: int = 10) -> float:
    r"""The factor of an epoch: it rises from 0 to 1, then falls as half a cosine.

    .. math:: e/w \text{ for } e < w,\qquad \tfrac12\big(1 + \cos\pi\tfrac{e - w}{E - w}\big) \text{ from then on}

    The first epoch has a rate of 0, as in the released code, and so has what comes after the last. For
    ``torch.optim.lr_scheduler.LambdaLR``.
    """
    if epoch < warmup:
        return epoch / warmup
    return (1 + math.cos(math.pi * min(1.0, (epoch - warmup) / max(1, epochs - warmup)))) / 2


def scaled_rate(nominal: float, batch: int) -> float:
    """A learning rate that was named for batches of 256."""
    return nominal * batch / 256
