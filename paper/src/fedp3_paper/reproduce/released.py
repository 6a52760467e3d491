"""The last round of the released code: bodies are frozen and every client trains its head.

The released code scores each client's personal model after this round.
"""

from dataclasses import replace
from pathlib import Path

from fedp3.client.objectives import CLASSIFICATION
from fedp3.core.types import ClientPlan
from fedp3.engines.base import States
from fedp3.engines.in_process import sequential
from fedp3.experiment.assemble import assemble
from fedp3.planning.dispatch import dispatched_tasks
from fedp3.runs import existing
from fedp3.runs.checkpoint import load_checkpoint
from fedp3.server.evaluation import scores
from fedp3.server.round_plans import plans_for


def head_only(plan: ClientPlan) -> ClientPlan:
    """The same plan, in which only the head trains."""
    *body, head = plan.layers
    frozen = {l: replace(plan.layers[l], train=False) for l in body}
    return ClientPlan(plan.client, {**frozen, head: plan.layers[head]})


def score_heads(folder: Path, data_dir: Path | None) -> float | None:
    """Mean accuracy of the clients' personal models after the round of heads.

    Args:
        folder: the folder of a finished run.
        data_dir: the folder of data sets.

    Returns:
        The accuracy, or None if the folder has no checkpoint or no client could be scored.
    """
    config = existing.reopen(folder)
    experiment = assemble(config, data_dir)
    checkpoint, _ = load_checkpoint(folder, config.digest())
    if checkpoint is None:
        return None
    state, server = checkpoint.state, experiment.server
    states = States({i: dict(rounds) for i, rounds in checkpoint.clients.items()})
    engine = sequential(experiment.client, experiment.shards, states)
    tasks = dispatched_tasks(
        state.W,
        [head_only(plan) for plan in plans_for(server, state.t)],
        server.layers,
        server.spec.pruning,
        state.t,
        server.spec.seed,
        state.seen,
        probe=True,
    )
    # The tensors that a method exchanges besides the model are sent with the task.
    tasks = [replace(task, extra=state.extra) for task in tasks]
    scored = scores(engine.execute(tasks), CLASSIFICATION)
    return scored.mean if scored else None
