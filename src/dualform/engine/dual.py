"""The dual form: a trained linear layer read as attention over its training."""

from jaxtyping import Float
from torch import Tensor


def dual_forward(
    x: Float[Tensor, "n d_in"], w0: Float[Tensor, "d_out d_in"], keys: Float[Tensor, "m d_in"],
    errors: Float[Tensor, "m d_out"], coefficients: Float[Tensor, " m"], rho: float,
) -> Float[Tensor, "n d_out"]:  # fmt: skip
    r"""Output of a linear layer, from its first weights and what it was trained on.

    .. math:: W_h x = \rho_h W_0 x + \sum_{i=1}^m c_i(h)\, e_i\,(k_i^\top x)

    ``keys`` are the inputs k that the layer saw, ``errors`` its backprop errors e, ``coefficients`` the factors c that
    the rule of the optimiser gives them at horizon h (plain SGD: minus the learning rate, rho = 1). The whole attention
    matrix is in memory at once: this is the formula that the faster functions are tested against. Reference: Irie,
    Csordás, Schmidhuber (2022), arXiv 2202.05798.
    """
    weights = x @ keys.mT  # n m, attention without softmax
    return rho * (x @ w0.mT) + (weights * coefficients) @ errors
