"""What a node holds and has spent, and whether its policy would accept a config or a task."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedp3.config import Config
from fedp3.core.files import finite_or_none
from fedp3.core.types import Task
from fedp3.devices.settings import NODES
from fedp3.experiment.assemble import assemble
from fedp3.experiment.experiment import Experiment
from fedp3.messages.codec import decode_task, room_for
from fedp3.node.admission import check_task, refused_configs
from fedp3.node.context import NodeContext
from fedp3.node.folder import NodeSettings, caches
from fedp3.node.records import read_marks
from fedp3.node.refusal import Refused
from fedp3.privacy import accountant
from fedp3.privacy.budget import count_tasks
from fedp3.privacy.ledger import TEST, TRAINING, Charge, composed, new_charge, read

LAST = 5  # refusals that are shown


def status(node: NodeSettings) -> dict[str, Any]:
    """What a node holds and has spent."""
    marks = read_marks(node.folder)
    charges = read(node.folder, marks.anchor)
    training = [c for c in charges if c.account == TRAINING]
    scores = [c for c in charges if c.account == TEST]
    log = node.folder / "refusals.log"
    policy, delta = node.policy, node.policy.privacy.delta
    return {
        "client": node.client,
        "folder": str(node.folder),
        "epsilon": finite_or_none(accountant.epsilon(composed(training), delta)),
        "epsilon_allowed": finite_or_none(policy.privacy.epsilon),
        "delta": delta,
        "updates": dict(Counter(c.run for c in training)),
        "scores": len(scores),
        "scores_allowed": policy.scores.limit,
        "scores_epsilon": finite_or_none(accountant.epsilon(composed(scores), delta)),
        "trained_records": len(marks.ids),
        "last_charge": charges[-1].time if charges else "",
        "caches": [asdict(c) | {"path": str(c.path)} for c in caches(node.folder)],
        "refusals": log.read_text().splitlines()[-LAST:] if log.exists() else [],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Whether a policy accepts a config.

    Args:
        digest: of the config, for `[runs] configs`.
        reasons: why the node would refuse it; empty if it would not.
        epsilon: what the run would cost this node's records; None without LDP.
        epsilon_after: what they would then have spent over all runs.
    """

    digest: str
    reasons: tuple[str, ...]
    epsilon: float | None = None
    epsilon_after: float | None = None


def try_config(node: NodeSettings, config: Config, data_dir: Path | None = None) -> Trial:
    """Try a config against the policy of a node, without training and without any charge."""
    reasons = [f"{code}: {text}" for code, text in refused_configs(node.policy, config)]
    experiment = assemble(config, data_dir)
    clients = config.partition.clients
    if node.client >= clients:
        reasons.append(f"config: it has clients 0 to {clients - 1}, this is {node.client}")
        return Trial(digest=config.digest(), reasons=tuple(reasons))
    if config.devices.fleet != NODES or experiment.server.fleet is not None:  # else plans follow
        task = Task(t=0, plan=experiment.first_plans[node.client], weights={})
        reasons += _refused_tasks(node, experiment, task)
    budget = experiment.server.budget
    if budget is None:
        return Trial(digest=config.digest(), reasons=tuple(reasons))
    tasks = count_tasks(experiment.schedule)[node.client]
    planned = new_charge(
        budget.mechanism, client=node.client, t=0, steps=tasks * budget.steps_per_task
    )
    policy = node.policy.privacy
    alone = accountant.epsilon(composed([planned]), policy.delta)
    after = accountant.epsilon(composed([*_training(node), planned]), policy.delta)
    if after > policy.epsilon:
        reasons.append(
            f"budget: the run would cost epsilon {alone:.3f}, and {after:.3f} together with all "
            f"earlier ones at delta {policy.delta:g}; the policy allows {policy.epsilon:g}"
        )
    return Trial(digest=config.digest(), reasons=tuple(reasons), epsilon=alone, epsilon_after=after)


def try_task(
    node: NodeSettings, config: Config, frame: bytes, data_dir: Path | None = None
) -> Trial:
    """Try a stored task against the policy of a node.

    Args:
        node: the node.
        config: the config of its run.
        frame: the bytes of the task.
        data_dir: where data sets are.
    """
    experiment = assemble(config, data_dir)
    reasons = [f"{code}: {text}" for code, text in refused_configs(node.policy, config)]
    spec, room = experiment.client.spec, room_for(experiment.start.extra)
    task = decode_task(frame, spec.layers, spec.pruning, spec.seed, room)
    reasons += _refused_tasks(node, experiment, task)
    return Trial(digest=config.digest(), reasons=tuple(reasons))


def _refused_tasks(node: NodeSettings, experiment: Experiment, task: Task) -> Iterator[str]:
    holding = NodeContext(
        client=node.client,
        config=experiment.config,
        context=experiment.client,
        shard=experiment.shards[node.client],
    )
    try:
        check_task(node, holding, task)
    except Refused as refused:
        yield f"{refused.code}: {refused}"


def _training(node: NodeSettings) -> list[Charge]:
    return [c for c in read(node.folder, read_marks(node.folder).anchor) if c.account == TRAINING]
