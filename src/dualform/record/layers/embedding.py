"""``nn.Embedding``: a linear map of one-hot vectors, of which only the place of the one is kept."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .kind import AfterForward, Found, Key, Map, Pointed, argument, point_of


class EmbeddingCall:
    """The key is the token, the error the gradient at its vector."""

    def __init__(self, module: nn.Embedding, tokens: Tensor) -> None:
        self.module, self.tokens = module, tokens

    def inputs(self) -> Sequence[Key]:
        """The tokens."""
        return (Key(0, self.tokens.unsqueeze(-1)),)

    def rows(self, errors: Sequence[Tensor | None]) -> Sequence[Found]:
        """One row a token; the padding token learns nothing."""
        error = errors[0]
        if error is None:
            return (Found(0, self.inputs()[0].rows, None),)
        error = error.reshape(*self.tokens.shape, -1)
        if self.module.padding_idx is not None:
            error = error.masked_fill((self.tokens == self.module.padding_idx).unsqueeze(-1), 0.0)
        if self.module.scale_grad_by_freq:
            _, which, counts = self.tokens.unique(return_inverse=True, return_counts=True)
            error = error / counts[which].unsqueeze(-1)
        return (Found(0, self.inputs()[0].rows, error),)

    def shape(self, output: Tensor) -> Tensor:
        """One vector a token."""
        return output.reshape(*self.tokens.shape, output.shape[-1])


class Embedding(AfterForward):
    """A table of vectors, one a token."""

    name, batch_dim = "embedding", None

    def maps(self, module: nn.Module) -> Sequence[Map]:
        """Its one map."""
        assert isinstance(module, nn.Embedding)
        size = module.num_embeddings
        return (Map((("weight", size),), (), size, module.embedding_dim, turned=True, indexed=True),)

    def refusal(self, module: nn.Module) -> str | None:
        """Whatever changes the table beside the optimiser cannot be explained."""
        if module.max_norm is not None:
            return (
                f"is an nn.Embedding with max_norm={module.max_norm}, which shortens vectors in the forward pass, "
                "where no rule explains it."
            )
        if module.sparse:
            return "is an nn.Embedding with sparse=True; record it with sparse=False, which trains the same weights."
        return None

    def call(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Pointed | None:
        """Its input and its output."""
        if not output.requires_grad:
            return None
        assert isinstance(module, nn.Embedding)
        tokens = argument(args, kwargs, 0, "input").detach().clone()
        return EmbeddingCall(module, tokens), (point_of(output),)
