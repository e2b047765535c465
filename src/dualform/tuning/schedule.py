"""The learning rate of visual query tuning, epoch by epoch."""

import math


def warmup_cosine(epoch: int, epochs: int = 100, warmup: int = 10) -> float:
    r"""The learning rate factor of an epoch: it rises linearly from 0 to 1, then falls along half a cosine.

    .. math:: e/w \text{ for } e < w,\qquad \tfrac12\big(1 + \cos\pi\tfrac{e - w}{E - w}\big) \text{ from then on}

    The rate is 0 in the first epoch, as in the released code, and after the last one. For use with
    ``torch.optim.lr_scheduler.LambdaLR``.
    """
    if epoch < warmup:
        return epoch / warmup
    return (1 + math.cos(math.pi * min(1.0, (epoch - warmup) / max(1, epochs - warmup)))) / 2


def scaled_rate(nominal: float, batch: int) -> float:
    """Scale a learning rate that is stated for batches of 256 to another batch size."""
    return nominal * batch / 256
