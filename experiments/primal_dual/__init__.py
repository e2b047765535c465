"""Nguyen et al. (2023), "A Primal-Dual Framework for Transformers and Neural Networks", arXiv 2406.13781."""
