"""The matrix that separates selected tokens from the others by the largest margin, and its solvers."""
