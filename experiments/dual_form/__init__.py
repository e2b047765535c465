"""Irie, Csordás, Schmidhuber (2022), "The Dual Form of Neural Networks Revisited", arXiv 2202.05798."""
