"""Attention as a support vector expansion: the regression behind a head, and its support vectors."""
