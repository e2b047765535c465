"""Where training takes an attention layer: gradient descent, and heads through time."""
