"""An LSTM language model, which predicts the next token."""

from jaxtyping import Float, Int
from torch import Tensor, nn

LSTMState = tuple[Tensor, Tensor]
"""The state of the LSTM: hidden and cell state, (1, batch, hidden) each."""


class LSTMLanguageModel(nn.Module):
    """Embedding, a projection if it is narrower than the LSTM, an LSTM, and a linear layer to the next token.

    With ``embedding=64, hidden=1024`` on characters and with ``hidden=200, dropout=0.5`` on words it is the network of
    Irie, Csordás, Schmidhuber (2022), arXiv 2202.05798: embeddings from U(±0.1), all else initialised as in torch.
    """

    def __init__(self, tokens: int, hidden: int, *, embedding: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedding or hidden)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.embedding_adapter = nn.Identity() if embedding is None else nn.Linear(embedding, hidden)
        self.dropout = nn.Dropout(dropout)
        self.rnn = nn.LSTM(hidden, hidden, batch_first=True)
        self.output = nn.Linear(hidden, tokens)

    def forward(
        self, tokens: Int[Tensor, "b n"], state: LSTMState | None = None
    ) -> tuple[Float[Tensor, "b n v"], LSTMState]:
        """The logits of the next token at every position, and the state at the end."""
        x = self.embedding_adapter(self.dropout(self.embedding(tokens)))
        hidden, after = self.rnn(x, state)
        return self.output(hidden), after
