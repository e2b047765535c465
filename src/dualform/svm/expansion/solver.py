r"""The dual problem of a regression, solved: coordinate descent, and Newton's steps within the faces that it finds.

In the scaled variables u_j = θ_j s_j/h(k_j), with c_j = h(k_j)/s_j and the unit Gram matrix K, each column minimises

.. math:: \tfrac12 u^\top K u - (c\odot y)^\top u + \varepsilon\, c^\top|u|,\qquad |c_j u_j| \le C,\quad c^\top u = 0

Rounds of two steps, neither of which ever makes it worse:

- each coordinate in turn is set to its best value, by the soft threshold (with a bias: as many times the pair that
  violates optimality most, so that the sum stays 0). This finds which coordinates are 0, free, or at ±C;
- the free coordinates, with the signs they have, solve a linear system; where one would leave its range, the step ends
  there. On the right face this is the solution, however slow coordinates would be on a bad matrix.

It ends by the duality gap, a sum of terms that are none of them negative. All columns go together.
"""

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from .regression import ROUNDING, Regression, Solution

BLOCK = 1 << 24
"""Numbers in the matrices that are solved at once."""

U = Float[Tensor, "m e"]
"""Scaled dual variables, or something for each."""


def solve(problem: Regression, *, tolerance: float = 1e-10, rounds: int = 200) -> Solution:
    """Solve a regression to a gap of ``tolerance`` times its optimum, then on to where rounding begins.

    Where it is not reached, ``converged`` is False. So it is where no function meets the targets within ε and C is
    infinite: then there is no optimum.
    """
    u = torch.zeros_like(problem.targets)
    best, last, done = _measured(problem, u, 0, tolerance), math.inf, 0
    for done in range(1, rounds + 1):
        (_pairs if problem.with_bias else _coordinates)(problem, u)
        _newton(problem, u)
        found = _measured(problem, u, done, tolerance)
        best = found if found.relative_gap <= best.relative_gap else best
        if not math.isfinite(found.gap) or (best.converged and not found.relative_gap < last / 2):
            break
        last = found.relative_gap
    return replace(best, iterations=done)


def _coordinates(problem: Regression, u: U) -> None:
    """One sweep of coordinate descent, in place."""
    gradient = problem.gram @ u - problem.scale * problem.targets
    for j, (tube, limit) in enumerate(zip(problem.epsilon * problem.scale, problem.C / problem.scale, strict=True)):
        best = u[j] - gradient[j]
        best = (best - best.clamp(-tube, tube)).clamp(-limit, limit)
        gradient += problem.gram[:, j : j + 1] * (best - u[j])
        u[j] = best


def _pairs(problem: Regression, u: U) -> None:
    """As many steps on pairs as there are coordinates, in place: one dual variable grows by what another loses."""
    gradient, columns = problem.gram @ u - problem.scale * problem.targets, torch.arange(u.shape[1])
    limits = problem.C / problem.scale.squeeze(1)
    for _ in range(len(u)):
        grow, shrink = _slopes(problem, u, gradient)
        (up, i), (down, j) = grow.max(0), shrink.min(0)
        if not bool((up > down).any()):
            return
        ci, cj, ui, uj = problem.scale[i, 0], problem.scale[j, 0], u[i, columns], u[j, columns]
        to_i, to_j = torch.where(ui < 0, 0.0, limits[i]), torch.where(uj > 0, 0.0, -limits[j])
        bend = (1 / ci.square() + 1 / cj.square() - 2 * problem.gram[i, j] / (ci * cj)).clamp(min=1e-300)
        room = torch.minimum(ci * (to_i - ui), cj * (uj - to_j))
        step = torch.minimum((up - down) / bend, room).where(up > down, 0.0)
        new_i = torch.where((step > 0) & (step == ci * (to_i - ui)), to_i, ui + step / ci)
        new_j = torch.where((step > 0) & (step == cj * (uj - to_j)), to_j, uj - step / cj)
        gradient += problem.gram[:, i] * (new_i - ui) + problem.gram[:, j] * (new_j - uj)
        u[i, columns], u[j, columns] = new_i, new_j.where(i != j, new_i)


def _newton(problem: Regression, u: U) -> None:
    """Solve for the free coordinates, in place. A column whose step ends early goes on from there."""
    limit, columns = problem.C / problem.scale, torch.arange(u.shape[1])
    for _ in range(2 * len(u)):
        now, targets = u[:, columns], problem.targets[:, columns]
        free = (now != 0) & (now.abs() < limit)
        slope = problem.gram @ now + problem.scale * (problem.epsilon * now.sign() - targets)
        blocks = (each.mT.split(max(1, BLOCK // len(u) ** 2)) for each in (slope * free, free.to(u.dtype)))
        step = torch.cat([_face_step(problem, *each) for each in zip(*blocks, strict=True)]).mT
        goal = torch.where(now * step < 0, 0.0, limit * step.sign())
        way = torch.where(step == 0, math.inf, (goal - now) / step)
        length = way.amin(0).clamp(max=1.0)
        u[:, columns] = torch.where(way <= length, goal, now + length * step)
        columns = columns[length < 1]
        if not len(columns):
            return


def _face_step(problem: Regression, slope: Float[Tensor, "e m"], free: Float[Tensor, "e m"]) -> Float[Tensor, "e m"]:
    """Newton's step of the free coordinates. A little of the identity keeps singular matrices apart from zero.

    With a bias the one of the largest c follows from the others, since the sum stays 0: the steps of the others then
    hold no small differences of large numbers.
    """
    matrix, ratio, last = problem.gram, torch.zeros_like(free), free.argmax(1, keepdim=True)
    if problem.with_bias:
        weight = problem.scale.squeeze(1) * free
        last = weight.argmax(1, keepdim=True)
        ratio = (weight / weight.gather(1, last)).nan_to_num()
        across = ratio.unsqueeze(2) * problem.gram[last.squeeze(1)].unsqueeze(1)
        matrix = matrix - across - across.mT + ratio.unsqueeze(1) * ratio.unsqueeze(2)
        slope, free = slope - ratio * slope.gather(1, last), free.scatter(1, last, 0.0)
    matrix = matrix * free.unsqueeze(1) * free.unsqueeze(2) + torch.diag_embed(1 - free)
    ridge, identity = 10 * len(problem.gram) * ROUNDING, torch.eye(len(problem.gram), dtype=free.dtype)
    factor, failed = torch.linalg.cholesky_ex(matrix + ridge * identity)
    while bool(failed.any()):
        ridge *= 100
        factor, failed = torch.linalg.cholesky_ex(matrix + ridge * identity)
    step = -torch.cholesky_solve(slope.unsqueeze(2), factor).squeeze(2) * free
    return step.scatter_add(1, last, -(ratio * step).sum(1, keepdim=True))


def _slopes(problem: Regression, u: U, gradient: U) -> tuple[U, U]:
    """The bias below which each θ_j would rather grow, and that above which it would rather shrink.

    At the optimum b is below none of the first and above none of the second: these are the conditions of Karush, Kuhn
    and Tucker. Without a bias b is 0.
    """
    residual, limit, tube = -gradient / problem.scale, problem.C / problem.scale, problem.epsilon
    grow = torch.where(u >= 0, residual - tube, residual + tube).masked_fill(u >= limit, -math.inf)
    shrink = torch.where(u <= 0, residual + tube, residual - tube).masked_fill(u <= -limit, math.inf)
    return grow, shrink


def _measured(problem: Regression, u: U, iterations: int, tolerance: float) -> Solution:
    """Bias, values of both problems and the gap between them."""
    gradient = problem.gram @ u - problem.scale * problem.targets
    grow, shrink = _slopes(problem, u, gradient)
    bias = (grow.amax(0) + shrink.amin(0)) / 2 if problem.with_bias else torch.zeros_like(u[0])
    theta, residual = problem.scale * u, -gradient / problem.scale - bias
    outside = (residual.abs() - problem.epsilon).clamp(min=0)
    penalty = problem.C
    if math.isinf(penalty):
        met = bool((outside <= 8 * ROUNDING * problem.targets.abs().amax(0)).all())
        penalty = 2 * float(theta.abs().max()) or (0.0 if met else 1.0)
    primal = float((u * (problem.gram @ u)).sum()) / 2 + penalty * float(outside.sum())
    gap = float((penalty * outside + problem.epsilon * theta.abs() - theta * residual).sum().clamp(min=0))
    return Solution(problem, theta, bias, primal, primal - gap, gap, iterations, tolerance)
