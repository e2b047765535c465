"""The papers' experiments, one folder each. Run them with ``dualform reproduce``."""
