r"""A number that is linear in the weights of one layer, and what training put into it.

.. math:: \langle W, A\rangle = \sum_r \langle u_r, W v_r\rangle,\qquad A = \sum_r u_r v_r^\top

so its contributions are those of an output with rows v and directions u. Each pair appears a second time with the
opposite signs, which cancels the bias; a row of zeros with the direction a adds ⟨b, a⟩.
"""

from html import escape
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from dualform.errors import QueryError
from dualform.store import assemble_matrix
from dualform.types import LayerInfo, ModuleInfo

from .ask import AskedQuestions
from .attribution import Attribution
from .query import MapCalls, Question, apply

if TYPE_CHECKING:
    from .memory import Memory


class LinearFunctional(Attribution):
    """A spotlight on ⟨W, A⟩ + ⟨b, a⟩ of one layer, instead of on some inputs. It needs no model."""

    def __init__(
        self, memory: "Memory", layer: str | int, A: Float[Tensor, "o i"], a: Float[Tensor, " p"] | None = None
    ) -> None:
        info, module = memory.store.layer(layer)
        _require_fit(info, module.name, A, a)
        if a is not None and not module.biases:
            raise QueryError(
                f"layer '{module.name}' has no bias, so a{tuple(a.shape)} has nothing to multiply. Leave a out."
            )
        U, S, V = torch.linalg.svd(A.detach().cpu().double(), full_matrices=False)
        kept = S[0] * 1e-15 * max(A.shape) < S
        u, v = (U * S).mT[kept] / 2, V[kept]
        rest = torch.zeros(1, len(A), dtype=torch.float64) if a is None else a.detach().cpu().double().unsqueeze(0)
        rows, directions = torch.cat([v, -v, torch.zeros_like(V[:1])]), torch.cat([u, -u, rest])
        matrix = assemble_matrix(info, {name: memory.parameter(name) for name in info.weights})
        outputs = apply(info, matrix, rows)
        for bias in module.biases:
            outputs = outputs + memory.parameter(bias)
        self.memory, self.layer = memory, module.name
        self._calls = MapCalls([rows.unsqueeze(0)], [directions.unsqueeze(0)], [outputs.unsqueeze(0)])

    @property
    def total(self) -> float:
        """The number itself, with the memory's weights."""
        return float((self._calls.directions[0] * self._calls.outputs[0]).sum())

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f"<b>Spotlight</b> on ⟨W, A⟩ = {self.total:.4g} of {escape(self.layer)}: step {self.memory.step:,}"

    def ask(self, layer: str | int | None = None, **questions: Any) -> Any:
        """Several questions in one pass, as for any spotlight; the layer need not be named."""
        if layer is not None and self.memory.store.layer(layer)[1].name != self.layer:
            raise QueryError(f"this spotlight is on layer '{self.layer}', not on '{layer}'.")
        if questions.get("score", "contribution") != "contribution":
            raise QueryError("⟨W, A⟩ has contributions only: without an input there are no weights α.")
        return super().ask(self.layer, **questions)

    def _question(self, asked: AskedQuestions, info: LayerInfo, module: ModuleInfo) -> Question:
        if asked.target is not None:
            raise QueryError("this spotlight is on ⟨W, A⟩ already: it has no other target.")
        target = f"⟨W, A⟩ of {self.layer}"
        return Question(
            self.memory.store, asked.view, info, module, target, 1, self._calls, asked.score, asked.position
        )


def _require_fit(info: LayerInfo, layer: str, A: Tensor, a: Tensor | None) -> None:
    shape = (info.d_out, info.d_in)
    if info.indexed or info.parts != 1 or tuple(A.shape) != shape or (a is not None and tuple(a.shape) != shape[:1]):
        reason = "its weights are not one matrix" if info.indexed or info.parts != 1 else f"its weights are {shape}"
        raise QueryError(
            f"A{tuple(A.shape)}{'' if a is None else f' with a{tuple(a.shape)}'} does not fit layer '{layer}': "
            f"{reason}."
        )
    if not bool(A.isfinite().all()) or (a is not None and not bool(a.isfinite().all())):
        raise QueryError("A and a must hold no NaN or infinity.")
    if not bool(A.any()):
        raise QueryError("A is zero, so there is nothing to explain.")
