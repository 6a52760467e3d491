"""Rehearsals for a privacy audit: a whole run on made-up records, in a temporary folder."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fedp3.client.objectives import CLASSIFICATION
from fedp3.core.errors import InputError
from fedp3.core.types import Reply, Task
from fedp3.data.shards import NO_SAMPLES
from fedp3.engines.base import Engine, States
from fedp3.engines.in_process import sequential
from fedp3.experiment.experiment import Experiment
from fedp3.privacy.audit.audit import Subject
from fedp3.privacy.audit.rehearsal import Exchange, Rehearsal, Scene
from fedp3.privacy.ledger import read
from fedp3.runs.session import train


def audit_subject(experiment: Experiment, seed: int = 0) -> Subject:
    """What an audit of this experiment looks at.

    Args:
        experiment: a run under LDP.
        seed: of the audit's made-up records.
    """
    budget = experiment.server.budget
    if budget is None:
        raise InputError("this run has no LDP, so there is nothing to audit; set privacy.enabled")
    if experiment.client.objective is not CLASSIFICATION:
        raise InputError(
            "an audit attacks a run with made-up records that have labels, so that it is for "
            "classification only; the step that is audited is the same for every objective"
        )
    x = experiment.client.data.x
    if not isinstance(x, Tensor) or x.dtype == torch.int64:
        raise InputError(
            "an audit attacks a run with made-up records of real numbers, which may be huge or not "
            "finite; these data are token ids, or several tensors a record, and cannot be. The "
            "private step is the same for all inputs: audit a run on images or numbers with the "
            "same [privacy], [local], [plan] and [upload]"
        )
    return Subject(
        budget=budget,
        context=experiment.client,
        plans=experiment.first_plans,
        others=experiment.config.plan.others,
        rehearse=partial(rehearse, experiment),
        seed=seed,
    )


def rehearse(experiment: Experiment, scene: Scene) -> Rehearsal:
    """Take a run from its first task to its result, and record every message and charge."""
    server = replace(
        experiment.server,
        spec=replace(
            experiment.server.spec,
            compression=scene.context.spec.compression,
            pruning=scene.context.spec.pruning,
            rounds=scene.rounds,
        ),
        run=replace(
            experiment.server.run,
            rounds=scene.rounds,
            clients_per_round=0,
            eval_every=0,
            quorum=1,
            deadline=0.0,
            final_p=True,
        ),
        examples=dict.fromkeys(experiment.server.examples, 0)
        | {i: len(shard.train) for i, shard in scene.shards.items()},
        budget=scene.budget,
        central=None,
    )
    everyone = dict.fromkeys(experiment.shards, NO_SAMPLES) | dict(scene.shards)
    # Made-up records must not be charged to a ledger over real runs.
    private = replace(experiment.config.privacy, ledger="")
    staged = replace(
        experiment,
        config=replace(experiment.config, privacy=private),
        server=server,
        client=scene.context,
        shards=everyone,
    )
    exchanges: list[Exchange] = []

    def engine_of(staged: Experiment, states: States | None) -> Engine:
        engine = sequential(staged.client, staged.shards, states)

        def execute(tasks: Sequence[Task]) -> Iterator[Reply]:
            for task in tasks:
                client = task.plan.client
                if client not in scene.shards:
                    continue  # a client without records would only score
                charges = [c for c in read(folder) if (c.client, c.t) == (client, task.t)]
                before = engine.states.by_client.get(client, {}).get(task.state_from)
                for reply in engine.execute([task]):
                    exchange = Exchange(task=task, reply=reply, state=before, charges=charges)
                    scene.observe(exchange)
                    exchanges.append(exchange)
                    yield reply

        return replace(engine, execute=execute)

    with tempfile.TemporaryDirectory(prefix="fedp3-audit-") as temporary:
        folder = Path(temporary) / "run"
        outcome = train(staged, folder, engine_of)
        charged = read(folder)
    return Rehearsal(
        exchanges=exchanges, charges=charged, epsilons=outcome.result.get("epsilon") or {}
    )
