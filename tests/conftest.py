"""How Hypothesis and torch run under test: the same examples on every run, on one thread.

HYPOTHESIS_PROFILE=explore draws new examples, and ten times as many.
"""

import os

import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fixed", derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", settings.get_profile("fixed"), derandomize=False, max_examples=400)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
torch.set_num_threads(1)
