"""``nn.Embedding``: a linear map of one-hot vectors, of which only the index of the 1 is stored."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .inner_map import InnerCall, InnerMapKind, owner_of_forward
from .protocol import CallAndPoints, ErrorPoint, LinearMap, MapInputs, MapRows, argument, point_of

FORWARD, EMBEDDING = nn.Embedding.forward, F.embedding


class EmbeddingCall:
    """The key is the token, the error is the gradient at its vector."""

    def __init__(self, tokens: Tensor, padding: int | None = None, by_frequency: bool = False) -> None:
        self.tokens, self.padding, self.by_frequency = tokens, padding, by_frequency

    def inputs(self) -> Sequence[MapInputs]:
        """The tokens, one per row."""
        return (MapInputs(0, self.tokens.unsqueeze(-1)),)

    def rows(self, errors: Sequence[Tensor | None]) -> Sequence[MapRows]:
        """One row per token; the error of the padding token is zero."""
        error = errors[0]
        if error is None:
            return (MapRows(0, self.inputs()[0].rows, None),)
        error = error.reshape(*self.tokens.shape, -1)
        if self.padding is not None:
            error = error.masked_fill((self.tokens == self.padding).unsqueeze(-1), 0.0)
        if self.by_frequency:
            _, inverse, counts = self.tokens.unique(return_inverse=True, return_counts=True)
            error = error / counts[inverse].unsqueeze(-1)
        return (MapRows(0, self.inputs()[0].rows, error),)

    def shape(self, output: Tensor) -> Tensor:
        """One vector per token."""
        return output.reshape(*self.tokens.shape, output.shape[-1])


class EmbeddingKind(InnerMapKind):
    """A table with one vector per token."""

    name, batch_dim = "embedding", None

    def maps(self, module: nn.Module) -> Sequence[LinearMap]:
        """An embedding has one map, with the transposed table as its matrix."""
        assert isinstance(module, nn.Embedding)
        size = module.num_embeddings
        return (LinearMap((("weight", size),), (), size, module.embedding_dim, transposed=True, indexed=True),)

    def refusal(self, module: nn.Module) -> str | None:
        """Options that change the table outside of the optimiser's step are rejected."""
        if module.max_norm is not None:
            return (
                f"is an nn.Embedding with max_norm={module.max_norm}, which shortens vectors in the forward pass, "
                "where no rule explains it."
            )
        if module.sparse:
            return "is an nn.Embedding with sparse=True; record it with sparse=False, which trains the same weights."
        return None

    def call(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> CallAndPoints | None:
        """Capture a call from its input and its output."""
        if not output.requires_grad:
            return None
        assert isinstance(module, nn.Embedding)
        tokens = argument(args, kwargs, 0, "input").detach().clone()
        return EmbeddingCall(tokens, module.padding_idx, module.scale_grad_by_freq), (point_of(output),)

    def is_plain(self, module: nn.Module) -> bool:
        """Whether a module runs ``nn.Embedding.forward``."""
        return owner_of_forward(module) is nn.Embedding and nn.Embedding.forward is FORWARD

    def inner(self, module: nn.Module, function: Callable, args: tuple, kwargs: dict, output: Any) -> InnerCall | None:
        """``F.embedding(tokens, W)``, ``W[tokens]``, ``W[begin:end]`` or ``W.index_select(0, tokens)``."""
        weight = module._parameters["weight"]
        assert weight is not None
        if function is EMBEDDING and argument(args, kwargs, 1, "weight") is weight:
            call = _functional_call(weight, args, kwargs)
        elif function in (Tensor.__getitem__, torch.index_select, Tensor.index_select) and args[0] is weight:
            is_index = function is Tensor.__getitem__
            tokens = _tokens_of_index(weight, args[1]) if is_index else _tokens_of_index_select(args, kwargs)
            call = None if tokens is None else EmbeddingCall(tokens)
        else:
            return None
        if call is None or not output.requires_grad:
            return None
        return InnerCall(call, ErrorPoint(output.grad_fn, output.output_nr), False)


def _functional_call(weight: Tensor, args: tuple, kwargs: dict) -> EmbeddingCall | None:
    """Capture a call of ``F.embedding``; None where it shortens vectors."""
    padding, max_norm = argument(args, kwargs, 2, "padding_idx"), argument(args, kwargs, 3, "max_norm")
    if max_norm is not None:
        return None
    if padding is not None and padding < 0:
        padding += len(weight)
    tokens: Tensor = argument(args, kwargs, 0, "input")
    return EmbeddingCall(tokens.detach().clone(), padding, bool(argument(args, kwargs, 5, "scale_grad_by_freq")))


def _tokens_of_index(weight: Tensor, index: Any) -> Tensor | None:
    """The rows that an index selects. A slice selects the same rows for all examples, so its axis of examples is 1."""
    if isinstance(index, tuple) and len(index) == 2 and index[1] == slice(None):
        index = index[0]
    if isinstance(index, slice):
        return torch.arange(*index.indices(len(weight)), device=weight.device).unsqueeze(0)
    if isinstance(index, Tensor) and index.ndim and index.dtype in (torch.int64, torch.int32):
        return index.detach() % len(weight)
    return None


def _tokens_of_index_select(args: tuple, kwargs: dict) -> Tensor | None:
    index = argument(args, kwargs, 2, "index")
    return index.detach().clone() if argument(args, kwargs, 1, "dim") == 0 else None
