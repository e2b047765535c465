r"""Products :math:`\langle Q, G_i \rangle` of matrices with the gradients of examples, visit by visit."""

from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.progress import OnProgress
from dualform.store import LayerMatrix, Store, assemble_matrix
from dualform.types import LayerInfo

from .rows import ExampleRows, example_gradients, rows_of_steps


def extended_matrix(layer: LayerInfo, tensors: Mapping[str, Tensor]) -> Float[Tensor, "d_out c"]:
    """The matrix of a layer with one more column for each bias."""
    return torch.cat([assemble_matrix(layer, tensors), *(tensors[bias].unsqueeze(1) for bias in layer.biases)], 1)


def example_products(
    store: Store, layer: LayerInfo, steps: Iterable[int], queries: Float[Tensor, "n d_out c"],
    watch: OnProgress | None = None,
) -> Float[Tensor, "n V"]:  # fmt: skip
    """The product of each query with the gradient of each visit; 0 for visits of other steps."""
    out = queries.new_zeros(len(queries), store.manifest.visits)
    for rows in rows_of_steps(store, layer, steps):
        if layer.indexed or rows.examples == len(rows.visits):
            out.index_add_(1, torch.from_numpy(rows.visits), _row_products(rows, queries))
        else:
            for visits, gradients in example_gradients(rows):
                out[:, torch.from_numpy(visits)] += queries.flatten(1) @ gradients.flatten(1).mT
        if watch:
            watch(len(rows.visits))
    return out


def _row_products(rows: ExampleRows, queries: Float[Tensor, "n d_out c"]) -> Float[Tensor, "n m"]:
    width = rows.layer.width
    products = LayerMatrix(rows.layer).bilinear(queries[..., :width], rows.keys, rows.errors)
    if rows.bias_keys.shape[1]:
        products = products + ((queries[..., width:] @ rows.bias_keys.mT) * rows.errors.mT).sum(1)
    return products
