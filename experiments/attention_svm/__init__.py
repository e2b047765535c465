"""Tarzanagh, Li, Thrampoulidis, Oymak (2023), "Transformers as Support Vector Machines", arXiv 2308.16898."""
