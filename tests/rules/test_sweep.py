"""The sweep against what it stands for: a product of 2×2 matrices for every step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualform.rules import sweep

numbers = st.floats(-1.5, 1.5)
START = {"weight": np.array([1.0, 0.0]), "buffer": np.array([0.0, 1.0])}


@st.composite
def schedules(draw):
    """(steps, transitions, scale, horizon, last): some steps pass the parameter by."""
    last = draw(st.integers(0, 9))
    steps = np.array([s for s in range(1, last + 1) if draw(st.booleans())], dtype=np.int64)
    transitions = np.array([[draw(numbers) for _ in range(6)] for _ in steps]).reshape(len(steps), 6)
    scale = np.array([draw(numbers) for _ in steps], dtype=np.float64)
    return steps, transitions, scale, draw(st.integers(0, last)), last


def matrices(transition):
    ww, wm, mw, mm, wg, mg = transition
    return np.array([[ww, wm], [mw, mm]]), np.array([wg, mg])


@given(schedule=schedules(), of=st.sampled_from(["weight", "buffer"]))
def test_the_sweep_equals_the_product_of_all_later_steps(schedule, of):
    steps, transitions, scale, horizon, last = schedule
    found = sweep(steps, transitions, scale, horizon, last, of=of)
    expected = np.zeros(last + 1)
    inside = [i for i, step in enumerate(steps) if step <= horizon]
    for i in inside:
        product = np.eye(2)
        for j in inside:
            if j > i:
                product = matrices(transitions[j])[0] @ product
        expected[steps[i]] = START[of] @ product @ matrices(transitions[i])[1] * scale[i]
    beginning = np.eye(2)
    for i in inside:
        beginning = matrices(transitions[i])[0] @ beginning
    np.testing.assert_allclose(found.of_step, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose([found.rho, found.gamma], START[of] @ beginning, rtol=1e-12, atol=1e-12)


@given(schedule=schedules(), w0=numbers, m0=numbers, seed=st.integers(0, 1000))
def test_coefficients_times_gradients_are_what_the_recurrence_arrives_at(schedule, w0, m0, seed):
    steps, transitions, scale, horizon, last = schedule
    gradients = np.random.default_rng(seed).normal(size=last + 1)
    state = np.array([w0, m0])
    for step, transition, factor in zip(steps, transitions, scale, strict=True):
        if step <= horizon:
            a, b = matrices(transition)
            state = a @ state + b * factor * gradients[step]
    for i, of in enumerate(START):
        c = sweep(steps, transitions, scale, horizon, last, of=of)
        np.testing.assert_allclose(c.rho * w0 + c.gamma * m0 + c.of_step @ gradients, state[i], rtol=1e-9, atol=1e-9)


@given(schedule=schedules(), seed=st.integers(0, 1000))
def test_what_comes_after_the_horizon_does_not_count(schedule, seed):
    steps, transitions, scale, horizon, last = schedule
    later = steps > horizon
    other = np.random.default_rng(seed).normal(size=transitions.shape)
    changed = np.where(later[:, None], other, transitions)
    found, same = (sweep(steps, t, scale, horizon, last) for t in (transitions, changed))
    assert np.array_equal(found.of_step, same.of_step) and (found.rho, found.gamma) == (same.rho, same.gamma)
    assert not found.of_step[horizon + 1 :].any()


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_heavy_ball_has_its_closed_form(momentum):
    """c = −η s (1 − μ^(T−t+1)) / (1 − μ): Irie et al. with clip factors s (spec/dual-form.md §2.8)."""
    T, lr = 40, 0.1
    steps, clip = np.arange(1, T + 1), np.linspace(0.2, 1, T)
    transitions = np.tile([1, -lr * momentum, 0, momentum, -lr, 1], (T, 1)).astype(float)
    c = sweep(steps, transitions, clip, T, T)
    expected = -lr * clip * (1 - momentum ** (T - steps + 1)) / (1 - momentum)
    np.testing.assert_allclose(c.of_step[1:], expected, rtol=1e-12)
    assert c.rho == 1.0


def test_decay_leaves_its_power_of_the_first_weights():
    T, lr, decay = 30, 0.1, 0.2
    transitions = np.tile([1 - lr * decay, 0, 0, 1, -lr, 0], (T, 1)).astype(float)
    c = sweep(np.arange(1, T + 1), transitions, np.ones(T), T, T)
    np.testing.assert_allclose(c.rho, (1 - lr * decay) ** T, rtol=1e-12)
    np.testing.assert_allclose(c.of_step[1:], -lr * (1 - lr * decay) ** np.arange(T - 1, -1, -1), rtol=1e-12)
