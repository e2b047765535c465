"""Experiments after "Beyond Uniform Query Distribution: Key-Driven Grouped Query Attention" (Khan et al. 2024)."""
