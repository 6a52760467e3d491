"""Who trains what: layer sets L_i, pruning P_i and Q_i, participants, tasks (Alg. 1, ll. 2-6)."""

# Importing these modules registers the layer sets, schedules, selectors and local pruners.
from fedp3.planning import layer_sets, local_pruning, residual_blocks, schedules, selectors

__all__ = ["layer_sets", "local_pruning", "residual_blocks", "schedules", "selectors"]
