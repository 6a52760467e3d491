"""The checks of a node before it acts on a message, whatever the server asks for.

`check_message` looks at what comes with a task, `check_task` at the task itself.  Both only refuse.
`admit` then charges what the task will release, and returns what is done for it.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from fedp3.client.context import ClientContext
from fedp3.config import Config
from fedp3.core.types import Layer, LayerMap, Task
from fedp3.data.shards import Shard
from fedp3.node.account import allowed_scores, charge_update
from fedp3.node.context import NodeContext, Request
from fedp3.node.folder import NodeSettings, secret_key
from fedp3.node.permits import check_permit
from fedp3.node.policy import Policy
from fedp3.node.records import own_split
from fedp3.node.refusal import RefusalCode, Refused
from fedp3.planning.client_plans import possible_layer_plans
from fedp3.planning.dispatch import scored_layer_plan
from fedp3.privacy.mechanism import PrivateSteps
from fedp3.privacy.settings import AUTO, Mechanism, PrivacySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What the node does for a task."""

    task: Task
    context: ClientContext  # with the mechanism of the task
    shard: Shard


def shard_of(node: NodeSettings, holding: NodeContext) -> Shard:
    """The node's records, split by the node itself if its policy says so."""
    split = node.policy.split
    if not split.own:
        return holding.shard
    key = secret_key(node.folder)
    return own_split(holding.context.data, holding.shard, key, split.test_share)


def check_message(node: NodeSettings, config: Config, request: Request) -> None:
    """Refuse a message whose run, config, size or privacy settings the node does not accept."""
    digest, runs = config.digest(), node.policy.runs
    check_config(node.policy, config)
    check_permit(request.permit, runs.owners, request.run, digest, time.time())
    if runs.largest_task_mb and request.bytes > runs.largest_task_mb * 1e6:
        raise Refused(
            RefusalCode.CAPACITY,
            f"the task has {request.bytes / 1e6:.2f} MB, and the policy allows "
            f"{runs.largest_task_mb:g}",
        )
    check_mechanism(request.mechanism, config.privacy)


def check_config(policy: Policy, config: Config) -> None:
    """Refuse a config that the policy does not accept, whatever its tasks are."""
    for code, text in refused_configs(policy, config):
        raise Refused(code, text)


def refused_configs(policy: Policy, config: Config) -> Iterator[tuple[RefusalCode, str]]:
    """Every reason why a policy does not accept a config."""
    digest = config.digest()
    if policy.runs.configs and digest not in policy.runs.configs:
        yield RefusalCode.CONFIG, f"the policy does not list the config {digest[:16]}"
    privacy = config.privacy
    if policy.privacy.needs_ldp and not privacy.enabled:
        yield RefusalCode.PRIVACY, "the policy allows training under LDP only, and this has none"
    if privacy.enabled and privacy.randomness != "os":
        yield (
            RefusalCode.PRIVACY,
            "noise from a seed that the server knows protects nobody: "
            "set [privacy] randomness = 'os'",
        )
    if config.plan.head == "personal_uploaded" and not policy.layers.personal_uploaded:
        yield (
            RefusalCode.PLAN,
            "plan.head = 'personal_uploaded' uploads a layer that the server never sends, and the "
            "policy does not allow it ([layers] personal_uploaded)",
        )


def check_mechanism(mechanism: Mechanism | None, settings: PrivacySettings) -> None:
    """Refuse a mechanism that the config does not describe."""
    if (mechanism is not None) != settings.enabled:
        raise Refused(RefusalCode.PRIVACY, "the task and the config disagree about LDP")
    if mechanism is None:
        return
    for name in ("clip", "sample_rate", "randomness"):
        if getattr(mechanism, name) != getattr(settings, name):
            raise Refused(RefusalCode.PRIVACY, f"the task has another {name} than the config")
    noise = mechanism.noise_multiplier
    if settings.noise_multiplier not in (AUTO, noise):
        raise Refused(RefusalCode.PRIVACY, "the task has another noise multiplier than the config")
    enough = noise > 0 or math.isinf(settings.epsilon)
    if not (math.isfinite(noise) and noise >= 0 and enough):
        raise Refused(RefusalCode.PRIVACY, f"a noise multiplier of {noise:g} adds no noise")


def check_task(node: NodeSettings, holding: NodeContext, task: Task) -> None:
    """Refuse a task that no plan of this config asks for, or that releases what is personal."""
    if task.plan.client != node.client:
        raise Refused(
            RefusalCode.MESSAGE,
            f"a task for client {task.plan.client} reached client {node.client}",
        )
    for reason in _impossible(holding.config, holding.context.layers, task):
        raise Refused(RefusalCode.PLAN, reason)
    for layer in _withheld(node.policy, holding.context.layers):
        if task.plan.layers[layer].upload != "none" and task.kind == "train":
            raise Refused(RefusalCode.PLAN, f"{layer} never leaves this node, by its policy")
    if node.policy.layers.never_leave and holding.context.hooks.exchange is not None:
        raise Refused(
            RefusalCode.PLAN,
            "the method exchanges tensors of its own, which may be computed from layers that the "
            "policy withholds",
        )
    kept = [p.keep for p in task.plan.layers.values() if p.send == "pruned"]
    if max(kept, default=0.0) > node.capacity:
        raise Refused(
            RefusalCode.CAPACITY,
            f"the task holds {max(kept):g} of a layer, and this node's capacity is "
            f"{node.capacity:g}",
        )


def _impossible(config: Config, layers: LayerMap, task: Task) -> Iterator[str]:
    """What the plan of a task asks for that this config's plans never do."""
    for l, p in task.plan.layers.items():
        possible = possible_layer_plans(config.plan, head=l == layers.head)
        if task.kind == "evaluate":
            possible |= {replace(scored_layer_plan(q), keep=1.0) for q in possible}
        if replace(p, keep=1.0) not in possible:
            yield (
                f"the plan of {l} (send {p.send}, train {p.train}, upload {p.upload}) is none that "
                "this config makes"
            )


def _withheld(policy: Policy, layers: LayerMap) -> list[Layer]:
    patterns = policy.layers.never_leave
    return [l for l in layers.layers if any(fnmatchcase(l, pattern) for pattern in patterns)]


def admit(node: NodeSettings, holding: NodeContext, request: Request, task: Task) -> Admitted:
    """Check a task, charge what it will release, and return what is done for it.

    Raises:
        Refused: nothing is done and nothing was charged.
    """
    check_message(node, holding.config, request)
    check_task(node, holding, task)
    context, shard = holding.context, shard_of(node, holding)
    mechanism = request.mechanism
    if mechanism is not None:
        mechanism = replace(mechanism, ghost=holding.ghost)
        context = replace(context, stacked=False, steps=PrivateSteps(mechanism))
        settings = holding.config.privacy
        if settings.delta * max(len(shard.train), 1) >= 1:
            raise Refused(
                RefusalCode.PRIVACY,
                f"delta {settings.delta:g} is not below 1 / {len(shard.train)} records",
            )
        if task.kind != "evaluate":
            steps = mechanism.steps_per_task(context.local)
            charge_update(node, request.run, task, mechanism, steps, settings, context.data, shard)
    scored = allowed_scores(node, request.run, task, mechanism is not None, context.data, shard)
    if scored is None:
        return Admitted(task=replace(task, evaluate=False), context=context, shard=shard)
    return Admitted(task=task, context=context, shard=scored)
