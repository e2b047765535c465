r"""A solver of the dual problem: coordinate descent, and Newton's steps within the faces that it finds.

In the scaled variables u_j = θ_j s_j/h(k_j), with c_j = h(k_j)/s_j and the unit Gram matrix K, each column minimises

.. math:: \tfrac12 u^\top K u - (c\odot y)^\top u + \varepsilon\, c^\top|u|,\qquad |c_j u_j| \le C,\quad c^\top u = 0

Each round has two steps, neither of which ever increases the objective:

- each coordinate in turn is set to its best value, by the soft threshold (with a bias, the pair that violates
  optimality most, as many times as there are coordinates, so that the sum stays 0). This finds which coordinates are 0,
  free, or at ±C;
- the free coordinates, with their present signs, solve a linear system; the step stops where one of them would leave
  its range. On the right face this is the solution, even where a bad condition number makes coordinate descent slow.

The duality gap, a sum of non-negative terms, ends the search. All columns are solved together.
"""

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from .regression import ROUNDING, Regression, Solution

BLOCK = 1 << 24
"""The most numbers in the matrices that are solved at once."""

U = Float[Tensor, "m e"]
"""Scaled dual variables, or one number for each of them."""


def solve(problem: Regression, *, tolerance: float = 1e-10, rounds: int = 200) -> Solution:
    """Solve a regression to a gap of ``tolerance`` times its optimum, then continue while the gap still halves.

    ``converged`` is False where this gap is not reached. One such case has no optimum: C is infinite and no function
    meets the targets within ε.
    """
    u = torch.zeros_like(problem.targets)
    best, last, done = _solution_at(problem, u, 0, tolerance), math.inf, 0
    for done in range(1, rounds + 1):
        (_pair_steps if problem.with_bias else _coordinate_sweep)(problem, u)
        _newton_steps(problem, u)
        solution = _solution_at(problem, u, done, tolerance)
        best = solution if solution.relative_gap <= best.relative_gap else best
        if not math.isfinite(solution.gap) or (best.converged and not solution.relative_gap < last / 2):
            break
        last = solution.relative_gap
    return replace(best, iterations=done)


def _coordinate_sweep(problem: Regression, u: U) -> None:
    """One sweep of coordinate descent, in place."""
    gradient = problem.gram @ u - problem.scale * problem.targets
    for j, (tube, limit) in enumerate(zip(problem.epsilon * problem.scale, problem.C / problem.scale, strict=True)):
        best = u[j] - gradient[j]
        best = (best - best.clamp(-tube, tube)).clamp(-limit, limit)
        gradient += problem.gram[:, j : j + 1] * (best - u[j])
        u[j] = best


def _pair_steps(problem: Regression, u: U) -> None:
    """As many steps on pairs as there are coordinates, in place: one dual variable grows by what another one loses."""
    gradient, columns = problem.gram @ u - problem.scale * problem.targets, torch.arange(u.shape[1])
    limits = problem.C / problem.scale.squeeze(1)
    for _ in range(len(u)):
        grow, shrink = _bias_bounds(problem, u, gradient)
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


def _newton_steps(problem: Regression, u: U) -> None:
    """Solve for the free coordinates, in place. A column whose step is cut short takes another one from there."""
    limit, columns = problem.C / problem.scale, torch.arange(u.shape[1])
    for _ in range(2 * len(u)):
        now, targets = u[:, columns], problem.targets[:, columns]
        free = (now != 0) & (now.abs() < limit)
        slope = problem.gram @ now + problem.scale * (problem.epsilon * now.sign() - targets)
        blocks = (columns.mT.split(max(1, BLOCK // len(u) ** 2)) for columns in (slope * free, free.to(u.dtype)))
        step = torch.cat([_face_step(problem, *block) for block in zip(*blocks, strict=True)]).mT
        goal = torch.where(now * step < 0, 0.0, limit * step.sign())
        way = torch.where(step == 0, math.inf, (goal - now) / step)
        length = way.amin(0).clamp(max=1.0)
        u[:, columns] = torch.where(way <= length, goal, now + length * step)
        columns = columns[length < 1]
        if not len(columns):
            return


def _face_step(problem: Regression, slope: Float[Tensor, "e m"], free: Float[Tensor, "e m"]) -> Float[Tensor, "e m"]:
    """Newton's step of the free coordinates. A small multiple of the identity regularises singular matrices.

    With a bias, the coordinate of the largest c follows from the others, since the sum stays 0: then the steps of the
    others contain no small differences of large numbers.
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


def _bias_bounds(problem: Regression, u: U, gradient: U) -> tuple[U, U]:
    """For each θ_j, the bias below which growing improves the objective, and the bias above which shrinking does.

    At the optimum b is below none of the first and above none of the second: these are the Karush-Kuhn-Tucker
    conditions. Without a bias b is 0.
    """
    residual, limit, tube = -gradient / problem.scale, problem.C / problem.scale, problem.epsilon
    grow = torch.where(u >= 0, residual - tube, residual + tube).masked_fill(u >= limit, -math.inf)
    shrink = torch.where(u <= 0, residual + tube, residual - tube).masked_fill(u <= -limit, math.inf)
    return grow, shrink


def _solution_at(problem: Regression, u: U, iterations: int, tolerance: float) -> Solution:
    """The bias, the values of the primal and dual problems and the gap between them, for given dual variables."""
    gradient = problem.gram @ u - problem.scale * problem.targets
    grow, shrink = _bias_bounds(problem, u, gradient)
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
