"""Several processes that train one model together (``torchrun``)."""
