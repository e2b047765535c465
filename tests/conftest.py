"""Settings that all tests share."""

import os

import torch
from hypothesis import settings

settings.register_profile("quick", max_examples=20, deadline=None)
settings.register_profile("night", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

torch.set_num_threads(1)  # on layers this small a second thread costs more than it brings, and tests run side by side
