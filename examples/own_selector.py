"""Add a selector of your own: retain the units with the smallest incoming weights.

As a file of a run:  fedp3 run my.toml prune.selector=smallest --use examples/own_selector.py
"""

import torch
from torch import Tensor

import fedp3


def smallest_norm(norms: Tensor, k: int, t: int, rng: torch.Generator | None) -> Tensor:
    """The k units with the smallest incoming weights, in ascending order of their index."""
    return norms.argsort(stable=True)[:k].sort().values


# The choice depends on the weights, which a client does not have, so that its mask must be sent.
fedp3.register.selector("smallest")(fedp3.Selector(units=smallest_norm, derivable=False))


def main() -> fedp3.Plan:
    config = fedp3.make_config("prune.selector=smallest", "prune.keep=0.5", "model.width=0.05")
    plan = fedp3.plan(config)
    print(plan)
    return plan


if __name__ == "__main__":
    main()
