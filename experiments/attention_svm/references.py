"""Reference values shown next to ours, with their sources. None of them is quoted from the text of the paper.

PLOT       read off the figures stored with the authors' released code; approximate
MEASURED   an independent measurement, made with a separate NumPy re-implementation
"""

PLOT, MEASURED = "stored plot", "independent measurement"

LOCAL = {
    ("W", "frobenius"): {PLOT: "about 0.99", MEASURED: "0.994 ± 0.005 at 1,000; 0.997 at 2,000"},
    ("W", "nuclear"): {PLOT: "0.86 ± 0.045", MEASURED: "0.859 ± 0.044"},
    ("KQ", "frobenius"): {PLOT: "–", MEASURED: "0.855 ± 0.047"},
    ("KQ", "nuclear"): {PLOT: "–", MEASURED: "0.996 ± 0.007 at 1,000"},
}
"""E3: correlations when W is trained, or K and Q are. The independent measurement used a gradient that cancels."""
LOCAL_BOTH, LOCAL_BEST = "0.855 ± 0.046", {"W": 68, "KQ": 77}
"""E3: correlation of the two separating matrices, and percentage of trials that select the best tokens; measured."""
LOCAL_SATURATED = {"W": 300, "KQ": 100}
"""E3: number of steps after which the largest softmax weight is near 1; stored plot."""
LONG = {1000: (0.9940, 0.91), 2000: (0.9985, 0.96), 5000: (0.9997, 0.985), 20_000: (0.99998, 0.996)}
"""E3 with the gradient that does not cancel: correlation and margin efficiency of W by steps; measured."""

OUTCOMES = {
    2: (94, 96, 94, 95, 97, 95, 99, 97, 98, 99),
    4: (43, 66, 78, 79, 85, 91, 95, 95, 97, 98),
    6: (17, 31, 52, 62, 70, 77, 84, 95, 97, 93),
    10: (2, 5, 10, 17, 27, 51, 57, 79, 93, 92),
}
"""E4: percentage of runs in which every selected token is the best, by n, over the widths; measured."""
ALL_SUPPORT = {(2, 5): 1, (2, 10): 2, (2, 15): 10, (2, 20): 21, (2, 30): 46}
"""E4: percentage of runs in which all other tokens are support tokens; at most 1 for n = 10. Measured."""

RANKS = {
    (5, 10): (5.0, 5.0, 2.5),
    (10, 10): (10.0, 9.0, 3.7),
    (10, 20): (10.0, 9.6, 3.6),
    (15, 15): (15.0, 13.3, 4.9),
    (15, 20): (15.0, 14.9, 4.7),
}
"""E5, T = 5: mean ranks by n and d (Frobenius; nuclear, published method; nuclear, accurate); measured, 10 trials."""
RANK_PLOT = {(15, 4): "1.4", (5, 2): "1.35"}
"""E5, T = 5: points of the stored plot where many trials are infeasible."""

NONLINEAR_PLOT = {4: (0.035, 0.07, 0.16), 6: (0.017, 0.043, 0.145), 8: (0.011, 0.015, 0.135), 10: (0.006, 0.009, 0.12)}
"""E6: mean 1 − correlation of the two parts, the direction, the single token; stored plot, 500 trials."""
NONLINEAR_MEASURED = {
    4: (0.039, 0.071, 0.154), 6: (0.016, 0.065, 0.165), 8: (0.009, 0.054, 0.125), 10: (0.007, 0.023, 0.123),
}  # fmt: skip
NONLINEAR_MEDIANS = {4: 0.007, 6: 0.003, 8: 0.0023, 10: 0.0024}
"""E6: medians of the two parts; measured."""
NONLINEAR_TRIED = {4: (100, 517), 6: (100, 977), 8: (60, 1120), 10: (60, 3156)}
"""E6: numbers of accepted and of tried trials; measured."""
