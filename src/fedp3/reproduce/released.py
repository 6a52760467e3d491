"""The last round of the released code: the body frozen, every client trains its own head once more and is scored."""

from dataclasses import replace
from pathlib import Path

from fedp3 import driver
from fedp3.engines.inprocess import sequential
from fedp3.evaluate import accuracy, dispatched_tasks
from fedp3.experiment import assemble
from fedp3.server import plans_for
from fedp3.types import ClientPlan


def head_only(plan: ClientPlan) -> ClientPlan:
    """The same plan with nothing but the head training."""
    *body, head = plan.layers
    frozen = {l: replace(plan.layers[l], train=False) for l in body}
    return ClientPlan(plan.client, {**frozen, head: plan.layers[head]})


def score_heads(folder: Path, data_dir: Path | None) -> float | None:
    """Mean accuracy of the clients' own models after that round, from a finished run folder."""
    config = driver.reopen(folder)
    experiment = assemble(config, data_dir)
    checkpoint, _ = driver.pick_up(folder, config.digest())
    if checkpoint is None:
        return None
    state, problem = checkpoint.state, experiment.problem
    engine = sequential(experiment.recipe, experiment.shards, driver.states_of(checkpoint))
    plans = [head_only(p) for p in plans_for(problem, state.t)]
    tasks = dispatched_tasks(
        state.W, plans, problem.layers, problem.pruning, state.t, problem.seed, state.seen, probe=True
    )
    tasks = [replace(task, extra=state.extra) for task in tasks]  # a method's own tensors travel with the task
    scored = accuracy(engine.execute(tasks))
    return scored.mean if scored else None
