"""Experiments after "Visual Query Tuning" (Tu, Mai, Chao 2023)."""
