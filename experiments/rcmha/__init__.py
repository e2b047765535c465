"""Sugiharto, Aradea, Mubarok (2023), "RCMHA: Relative Convolutional Multi-Head Attention …", arXiv 2308.03429."""
