r"""The live ledger: computed while training runs, one part of the weights for each group of examples, without slots.

The optimiser's own recurrence runs once for each group, on the group's part of the gradient, with the preconditioner
that all groups share. The parts and the remainder of the first weights add up to the weights. Size and cost do not
depend on the length of training. Where several processes train, each has a ledger of its own rows, and these add up.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, optim

from dualform.engine import Agreement, ParameterState, Rounding, agreement, apply_step, precondition
from dualform.errors import NoteError, QueryError
from dualform.rules import Rule
from dualform.store import LayerMatrix, LedgerState
from dualform.types import LayerInfo, Transition

from ..distributed import Ranks
from ..plan import RecordingPlan
from ..rows import RowCredit
from ..slots import CallSlots
from ..state import state_tensors
from ..verify import GradientFollower, OpenPass, gradient_eps, scale_of
from .clock import Clock

MOST = 1 << 12
"""The most groups that a ledger may have."""


@dataclass
class LedgerAccount:
    """The parts of one parameter: (1 + groups, *shape), the remainder of the first weights first."""

    name: str
    parameter: Tensor
    rule: Rule
    weight: Tensor
    buffer: Tensor
    first: Tensor
    moves: int = 0
    gradient_eps: float = 0.0
    """The lowest precision in which a gradient was computed."""
    gradient: dict[int, Tensor] = field(default_factory=dict)
    """The gradient of this step so far, by group."""
    opened: OpenPass | None = None

    def grow(self, groups: int) -> None:
        """Add parts of zero for new groups."""
        missing = 1 + groups - len(self.weight)
        if missing > 0:
            zeros = self.weight.new_zeros(missing, *self.weight.shape[1:])
            self.weight, self.buffer = torch.cat([self.weight, zeros]), torch.cat([self.buffer, zeros])

    def advance(self, t: Transition, p: Tensor | None, scale: float) -> None:
        """Take one step with all parts."""
        if p is not None and not t.mp and (t.pw, t.pm, t.pg) == (t.mw, t.mm, t.mg) and t.wm == t.wg == 0.0:
            self._follow_buffer(t, p, scale)
        else:
            gradient = torch.zeros_like(self.weight)
            for group, part in self.gradient.items():
                gradient[1 + group] = part * scale
            apply_step(self.rule, t, p, self.weight, self.buffer, gradient)
        self.gradient = {}
        self.moves += 1

    def _follow_buffer(self, t: Transition, p: Tensor, scale: float) -> None:
        """The same in place, where W only follows P M (Adam and most of its relatives): all parts are large."""
        self.buffer.mul_(t.mm)
        if t.mw:
            self.buffer.add_(self.weight, alpha=t.mw)
        for group, part in self.gradient.items():
            self.buffer[1 + group].add_(part, alpha=t.mg * scale)
        if t.ww != 1.0:
            self.weight.mul_(t.ww)
        if self.rule.acts == "entries":
            self.weight.addcmul_(p, self.buffer, value=t.wp)
        else:
            self.weight.add_(p @ self.buffer, alpha=t.wp)


@dataclass(frozen=True)
class LedgerStep:
    """A step that an account is about to take."""

    account: LedgerAccount
    transition: Transition
    p: Tensor | None
    scale: float


class LiveLedger:
    """The accounts of all parameters that a ledger explains. ``by`` is the column whose values are the groups."""

    def __init__(
        self, plan: RecordingPlan, by: str | None, optimizers: Sequence[optim.Optimizer], saved: LedgerState | None,
        clock: Clock, credit: RowCredit, ranks: Ranks,
    ) -> None:  # fmt: skip
        self.plan, self.by, self.clock, self.credit, self.ranks = plan, by, clock, credit, ranks
        self.groups: dict[Hashable, int] = {}
        self.visits: list[int] = []
        self.accounts: dict[str, LedgerAccount] = {}
        states = states_by_name(plan, optimizers)
        for p in plan.parameters:
            if p.kind == "ledger":
                self.accounts[p.name] = self._account(p.name, states.get(p.name, {}))
        if saved is not None:
            self._load(saved)

    def _account(self, name: str, state: Mapping[str, Tensor]) -> LedgerAccount:
        parameter, rule = self.plan.tensors[name].detach(), self.plan.rule(name)
        assert rule is not None
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        weight = parameter.to("cpu", dtype, copy=True).unsqueeze(0)
        buffer = state.get("buffer")
        buffer = (
            torch.zeros_like(weight) if buffer is None else buffer.detach().to("cpu", dtype, copy=True).unsqueeze(0)
        )
        first = weight[0].clone()
        if not self.ranks.first:  # the first weights are in the first process's ledger
            weight, buffer = torch.zeros_like(weight), torch.zeros_like(buffer)
        return LedgerAccount(name, self.plan.tensors[name], rule, weight, buffer, first)

    def _load(self, saved: LedgerState) -> None:
        self.groups, self.visits = {name: i for i, name in enumerate(saved.groups)}, list(saved.visits)
        for name, account in self.accounts.items():
            account.weight, account.buffer = saved.weights[name].clone(), saved.buffers[name].clone()
            account.first, account.moves = saved.first[name].to(account.weight.dtype), saved.moves.get(name, 0)
            account.gradient_eps = saved.gradient_eps.get(name, 0.0)

    # ------------------------------------------------------------------------------------------- gradients

    def take(
        self, slots: CallSlots, key: Tensor, error: Tensor, users: Sequence[tuple[GradientFollower, OpenPass]]
    ) -> None:
        """Add the rows of a call to the gradients of their groups."""
        layer, groups = slots.layer, self._groups_of(slots)
        for follower, opened in users:
            account = self.accounts[follower.name]
            self._open(account, follower, opened)
            for number in np.unique(groups):
                rows = torch.from_numpy(np.flatnonzero(groups == number))
                all_rows = len(rows) == len(groups)
                part = _product(layer, account, key if all_rows else key[rows], error if all_rows else error[rows])
                before = account.gradient.get(int(number))
                account.gradient[int(number)] = part if before is None else before + part

    @staticmethod
    def _open(account: LedgerAccount, follower: GradientFollower, opened: OpenPass) -> None:
        """A new pass adds to the gradient of the passes before it, unless that was zeroed."""
        if account.opened is opened:
            return
        account.opened = opened
        if not follower.passes:
            account.gradient = {}
        elif (ratio := scale_of(follower)) != 1.0:
            account.gradient = {group: part * ratio for group, part in account.gradient.items()}

    def _groups_of(self, slots: CallSlots) -> Int[np.ndarray, " m"]:
        """The group of each row of a call."""
        batch, rows = slots.batch, slots.end - slots.begin
        if self.by not in batch.columns:
            raise NoteError(
                f"the ledger is kept by the column '{self.by}', but this batch was noted with {sorted(batch.columns)}. "
                f"Note it for every batch: tape.note({self.by}=…)."
            )
        values = batch.columns[self.by]
        if not isinstance(values, np.ndarray):
            return np.full(rows, self._group(values))
        owners = self.credit.owners_or_mark(slots, self.clock.next_step)
        if owners is None:
            return np.full(rows, self._group(None))
        names, row_names = np.unique(values, return_inverse=True)
        numbers = np.array([self._group(name.item()) for name in names])
        return numbers[row_names][np.arange(rows) // owners.stride % owners.examples]

    def _group(self, name: Hashable) -> int:
        if name not in self.groups:
            if len(self.groups) >= MOST:
                raise QueryError(
                    f"the column '{self.by}' has more than {MOST:,} values, and a ledger holds the weights once for "
                    "each. Choose a coarser column."
                )
            self.groups[name] = len(self.groups)
            self.visits.append(0)
            for account in self.accounts.values():
                account.grow(len(self.groups))
        return self.groups[name]

    def count(self, columns: Mapping[str, Any], size: int) -> None:
        """A step has used a batch: count its examples as visits of their groups."""
        values = columns.get(self.by or "")
        if isinstance(values, np.ndarray):
            for name, count in zip(*np.unique(values, return_counts=True), strict=True):
                self.visits[self._group(name.item())] += int(count)
        else:
            self.visits[self._group(values)] += size

    # ------------------------------------------------------------------------------------------- steps

    def stage(
        self,
        follower: GradientFollower,
        t: Transition,
        settings: Mapping[str, float],
        state: Mapping[str, Any],
        inner: float,
    ) -> LedgerStep:
        """Compute what the step that is about to be taken does to an account."""
        account = self.accounts[follower.name]
        if not follower.passes:
            account.gradient = {}
        account.opened = None
        account.gradient_eps = max(account.gradient_eps, gradient_eps(follower.passes))
        parameter, rule = follower.parameter, account.rule
        assert parameter.grad is not None
        shared = {key: tensor.detach() for key, tensor in state_tensors(rule, state).items()}
        buffer = shared.pop("buffer", torch.zeros_like(parameter))
        now = ParameterState(parameter.detach(), buffer, shared)
        gradient = parameter.grad.detach() if inner == 1.0 else parameter.grad.detach() * inner
        p, _ = precondition(rule, settings, now, gradient, follower.eps)
        scale = scale_of(follower) * inner / self.ranks.world if follower.passes else 0.0
        return LedgerStep(account, t, p if p is None else p.cpu().to(account.weight.dtype), scale)

    def take_step(self, ledger_steps: Sequence[LedgerStep]) -> None:
        """The step is over: advance the accounts."""
        for ledger_step in ledger_steps:
            ledger_step.account.advance(ledger_step.transition, ledger_step.p, ledger_step.scale)

    # ------------------------------------------------------------------------------------------- out

    def state(self) -> LedgerState:
        """A copy of all accounts."""
        return LedgerState(
            column=self.by or "",
            groups=tuple(self.groups),
            visits=tuple(self.visits),
            moves={name: account.moves for name, account in self.accounts.items()},
            weights={name: account.weight.clone() for name, account in self.accounts.items()},
            buffers={name: account.buffer.clone() for name, account in self.accounts.items()},
            first={name: account.first for name, account in self.accounts.items()},
            gradient_eps={name: account.gradient_eps for name, account in self.accounts.items()},
        )

    def certificate(self) -> dict[str, Agreement]:
        """Compare the sum of all parts with the actual weights, in every entry."""
        agreements = {}
        for name, account in self.accounts.items():
            actual, total = account.parameter.detach().cpu(), account.weight.double().sum(0)
            self.ranks.add_up([total])
            eps = torch.finfo(actual.dtype).eps
            first, rounding = account.first.double(), Rounding(eps, account.gradient_eps)
            agreements[name] = agreement(actual, first, total, account.moves, rounding)
        return agreements


def _product(layer: LayerInfo, account: LedgerAccount, key: Tensor, error: Tensor) -> Float[Tensor, "..."]:
    """What some rows add to the gradient of a parameter."""
    dtype, shape = account.weight.dtype, account.weight.shape[1:]
    key, error = key.detach().cpu(), error.detach().to("cpu", dtype)
    matrix = LayerMatrix(layer)
    return matrix.gradient(account.name, matrix.keys_in(key, dtype), error, shape)


def states_by_name(plan: RecordingPlan, optimizers: Sequence[optim.Optimizer]) -> dict[str, dict[str, Tensor]]:
    """The optimisers' state of the parameters that a ledger explains."""
    names = {id(plan.tensors[p.name]): p.name for p in plan.parameters if p.kind == "ledger"}
    out = {}
    for optimizer, rule in zip(optimizers, plan.rules, strict=True):
        for parameter, state in optimizer.state.items():
            if rule and id(parameter) in names:
                out[names[id(parameter)]] = state_tensors(rule, state)
    return out
