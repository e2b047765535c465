"""Trivial scores that any method has to beat: each function gives a matrix (query, example).

Random numbers, the plain loss of an example, the norm of its gradient, the similarity of inputs, and BM25 for text.
"""

import copy
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from dualform.errors import QueryError
from dualform.replay import Data, Losses

K1, B = 1.5, 0.75
"""How soon a repeated word stops counting in BM25, and how much the length of a document does."""


def random(queries: int, examples: int, seed: int = 0) -> Float[Tensor, "queries examples"]:
    """Scores drawn from a normal distribution."""
    return torch.randn(queries, examples, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss(
    model: nn.Module, losses: Losses, data: Data, index: Int[np.ndarray, " examples"], queries: int = 1
) -> Float[Tensor, "queries examples"]:
    """The loss of each example, alone in its batch, under a trained model: the same for all queries."""
    with torch.no_grad():
        values = [float(share.sum()) for share in _alone(copy.deepcopy(model).eval(), losses, data, index)]
    return torch.tensor(values, dtype=torch.float64).expand(queries, -1).clone()


def gradient_norm(
    model: nn.Module, losses: Losses, data: Data, index: Int[np.ndarray, " examples"], queries: int = 1
) -> Float[Tensor, "queries examples"]:
    """The norm of the gradient of each example's loss under a trained model: the same for all queries."""
    copied = copy.deepcopy(model).eval()
    parameters = [parameter for parameter in copied.parameters() if parameter.requires_grad]
    norms = []
    for share in _alone(copied, losses, data, index):
        gradients = torch.autograd.grad(share.sum(), parameters, allow_unused=True)
        squares = [float(gradient.double().square().sum()) for gradient in gradients if gradient is not None]
        norms.append(math.sqrt(sum(squares)))
    return torch.tensor(norms, dtype=torch.float64).expand(queries, -1).clone()


def input_similarity(
    queries: Shaped[Tensor, "queries ..."],
    inputs: Shaped[Tensor, "examples ..."],
    same: Bool[Tensor, "queries examples"] | None = None,
) -> Float[Tensor, "queries examples"]:
    """The cosine between inputs.

    ``same`` says which examples have the label that the query's target is about: the others then count against it.
    """
    a, b = (nn.functional.normalize(part.detach().double().flatten(1), dim=1) for part in (queries, inputs))
    similarity = a @ b.mT
    return similarity if same is None else torch.where(same, similarity, -similarity)


def bm25(
    queries: Sequence[Sequence[Hashable] | Tensor], documents: Sequence[Sequence[Hashable] | Tensor]
) -> Float[Tensor, "queries examples"]:
    r"""Okapi BM25 of token sequences: how many rare tokens of a query a document has.

    .. math:: \sum_{t \in q} \ln\Big(1 + \frac{N - n_t + 0.5}{n_t + 0.5}\Big)
        \frac{f_t (k_1 + 1)}{f_t + k_1 (1 - b + b\,|d| / \overline{|d|})}

    with :math:`f_t` the count of t in the document d, :math:`n_t` the number of the N documents that have it, k₁ = 1.5
    and b = 0.75 (Robertson and Zaragoza 2009). A text is a sequence of tokens, a tensor of ids, or a string, which is
    split at blanks.
    """
    counts = [Counter(_tokens(document)) for document in documents]
    if not counts:
        raise QueryError("there is no document to compare with.")
    lengths = torch.tensor([counter.total() for counter in counts], dtype=torch.float64)
    damping = K1 * (1 - B + B * lengths / lengths.mean().clamp(min=1.0))
    holders = Counter(token for counter in counts for token in counter)
    scores = torch.zeros(len(queries), len(counts), dtype=torch.float64)
    for line, query in zip(scores, queries, strict=True):
        for token, times in Counter(_tokens(query)).items():
            rarity = math.log(1 + (len(counts) - holders[token] + 0.5) / (holders[token] + 0.5))
            frequency = torch.tensor([counter[token] for counter in counts], dtype=torch.float64)
            line += times * rarity * frequency * (K1 + 1) / (frequency + damping)
    return scores


def _tokens(text: Sequence[Hashable] | Tensor) -> Sequence[Hashable]:
    if isinstance(text, Tensor):
        return text.flatten().tolist()
    return text.lower().split() if isinstance(text, str) else text


def _alone(model: nn.Module, losses: Losses, data: Data, index: Int[np.ndarray, " examples"]) -> Iterator[Tensor]:
    """The loss of each example in a batch of its own."""
    for example in torch.as_tensor(index):
        yield losses(model, data(example[None]))
