"""The checks of a node before it acts on a message, whatever the server asks for.

`check_message` looks at what comes with a task, `check_task` at the task itself.  Both only refuse.
`admit` then charges what the task will release, and returns what is done for it.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from fedp3.client.context import ClientContext
from fedp3.config import Config
from fedp3.core.types import ClientPlan, Layer, LayerMap, LayerPlan, Task
from fedp3.data.shards import Shard
from fedp3.devices.options import EMPTY, Window, window_plans
from fedp3.node.account import allowed_scores, charge_update
from fedp3.node.context import NodeContext, Request
from fedp3.node.folder import NodeSettings, secret_key, stored_runs
from fedp3.node.permits import check_permit
from fedp3.node.policy import Policy
from fedp3.node.records import own_split
from fedp3.node.refusal import RefusalCode, Refused
from fedp3.planning.capacities import capacities
from fedp3.planning.client_plans import client_plans, outside, unscheduled
from fedp3.planning.dispatch import scored_layer_plan
from fedp3.planning.layer_sets import AUTO as AUTO_LAYERS
from fedp3.planning.prune_settings import SELECTORS
from fedp3.planning.revised_plans import STORED
from fedp3.privacy.mechanism import PrivateSteps
from fedp3.privacy.requirements import NOISE_MULTIPLIERS
from fedp3.privacy.settings import AUTO, Mechanism, PrivacySettings
from fedp3.server.recycling import recycled_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What the node does for a task."""

    task: Task
    context: ClientContext  # with the mechanism of the task
    shard: Shard


def shard_of(node: NodeSettings, holding: NodeContext) -> Shard:
    """The node's records, split by the node itself if its policy requires it."""
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
    path = Path(config.data.path)
    if path.is_absolute() or ".." in path.parts or config.data.path.startswith("~"):
        yield (
            RefusalCode.CONFIG,
            f"[data] path = {config.data.path!r} leaves this node's data folder; a text is read "
            "from there only",
        )
    privacy = config.privacy
    if policy.privacy.needs_ldp and not privacy.enabled:
        yield RefusalCode.PRIVACY, "the policy allows training under LDP only, and this has none"
    silent = math.isinf(privacy.epsilon) and privacy.noise_multiplier in (AUTO, 0)
    if policy.privacy.needs_ldp and privacy.enabled and silent:
        yield RefusalCode.PRIVACY, "the policy needs LDP, and this config only clips: no noise"
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
    if noise == 0 and math.isinf(settings.epsilon):
        return
    low, high = NOISE_MULTIPLIERS
    if not low <= noise <= high:
        raise Refused(
            RefusalCode.PRIVACY, f"a noise multiplier is from {low:g} to {high:g}, got {noise:g}"
        )


def check_task(node: NodeSettings, holding: NodeContext, task: Task) -> None:
    """Refuse a task that no plan of this config asks for, or that releases what is personal."""
    if task.plan.client != node.client:
        raise Refused(
            RefusalCode.MESSAGE,
            f"a task for client {task.plan.client} reached client {node.client}",
        )
    for reason in _impossible(holding.config, node.client, holding.context.layers, task):
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


def _impossible(config: Config, client: int, layers: LayerMap, task: Task) -> Iterator[str]:
    """What a task asks for that this config's plan of this client and round does not.

    The node computes its plan itself: it depends on the config alone.  A server may prune more
    than the plan says, because a device of less capacity needs that.  Which layers a server
    recycles, selects, or averages less often, follows from the uploads of all clients.  A node then
    accepts for each layer whatever this config may ask for in some round.
    """
    rounds = config.run.rounds
    if task.t > rounds or (task.t == rounds and task.kind == "train"):
        yield f"the task is of round {task.t + 1}, and this config has {rounds}"
        return
    plan = _expected_plan(config, client, layers, task)
    if plan is None:
        yield "the layers that it trains in full are not adjacent, as [devices] chooses them"
        return
    yield from _impossible_steps(config, plan, task)
    yield from _impossible_code(config, task)
    yield from _impossible_omissions(config, plan, layers, task)
    rest = outside(config.plan, _shares(config)[client])
    for l, p in task.plan.layers.items():
        planned = plan.layers[l]
        allowed = [planned]
        if task.kind == "evaluate":
            allowed.append(scored_layer_plan(planned))
        if _most_left_out(config, layers) and planned == LayerPlan():
            allowed.append(rest)
        if config.aggregate.interval > 1:
            allowed += [STORED, *(replace(entry, send="none") for entry in (planned, STORED))]
        if not any(_asks_no_more(p, other) for other in allowed):
            yield (
                f"the plan of {l} (send {p.send}, keep {p.keep:g}, train {p.train}, upload "
                f"{p.upload}) is not the one that this config makes"
            )


def _expected_plan(config: Config, client: int, layers: LayerMap, task: Task) -> ClientPlan | None:
    """The plan that this config makes for this client and round; None if it makes none like this.

    Where layers are chosen for devices, the server knows costs and other nodes' devices, and this
    node does not.  Then any window of adjacent layers is possible, and what may leave the node is
    for its policy to say (`layers.never_leave`).
    """
    if config.plan.layers == AUTO_LAYERS:
        trained = [j for j, l in enumerate(layers.hidden) if l in task.plan.full_layers]
        window: Window = (trained[0], trained[-1]) if trained else EMPTY
        if trained and len(trained) != trained[-1] - trained[0] + 1:
            return None
        shares = {p.keep for p in task.plan.layers.values() if p.send == "pruned"}
        return ClientPlan(
            client, window_plans(layers, config.plan, window, max(shares, default=1.0))
        )
    keep, seed = _shares(config), config.run.seed
    settings = unscheduled(config.plan) if task.kind == "probe" else config.plan
    (plan,) = client_plans(settings, layers, keep, seed, task.t, [client])
    return plan


def _shares(config: Config) -> tuple[float, ...]:
    """The largest share of a pruned layer that this config lets each client hold."""
    dealt = SELECTORS.pick(config.prune.selector).deals  # then a share depends on who takes part
    # A text means that shares are chosen for devices: a keep file was read with the config.
    share = 1.0 if dealt or isinstance(config.prune.keep, str) else config.prune.keep
    return capacities(share, config.partition.clients, config.run.seed)


def _impossible_omissions(
    config: Config, plan: ClientPlan, layers: LayerMap, task: Task
) -> Iterator[str]:
    """More layers outside L_i than the server may recycle, or than it selects.

    Which layers these are follows from the uploads of all clients, which a node does not know.  So
    any layers may be left out, but no more than the config says.
    """
    left_out = set(plan.full_layers) - set(task.plan.full_layers)
    most = _most_left_out(config, layers)
    if most and task.kind == "train" and len(left_out) > most:
        verb = "does not select" if config.aggregate.select else "recycles"
        yield f"it leaves out {', '.join(sorted(left_out))}, and this config {verb} {most} layers"


def _most_left_out(config: Config, layers: LayerMap) -> int:
    """How many layers the server may leave out of a client's L_i in a round."""
    if config.aggregate.select:
        return max(0, len(layers.layers) - config.aggregate.select)
    return recycled_count(config.aggregate, layers)


def _impossible_steps(config: Config, plan: ClientPlan, task: Task) -> Iterator[str]:
    """Steps and parts of a batch that no plan of this config has."""
    steps, split, local = task.plan.steps, task.plan.split, config.local
    if (steps != plan.steps or split > 1) and not config.devices.plans:
        yield (
            f"it has {steps or local.steps} steps in {split} parts, and this config's plan has "
            f"{plan.steps or local.steps} in 1; only plans for [devices] differ"
        )
    if steps and (local.epochs or config.privacy.enabled or steps >= local.steps):
        yield f"it has {steps} steps, and this config has {local.steps}"
    if split > max(1, local.batch):
        yield f"it computes batches of {local.batch} in {split} parts"


def _impossible_code(config: Config, task: Task) -> Iterator[str]:
    """A code of uploads that no plan of this config has."""
    code, known = task.plan.code, config.devices.codes if config.devices.plans else ()
    if code and code not in known:
        chosen = f"or {', '.join(known)}" if known else "for every device"
        usual = config.upload.compress
        yield f"it asks for uploads in {code}, and this config has {usual} {chosen}"


def _asks_no_more(p: LayerPlan, planned: LayerPlan) -> bool:
    return replace(p, keep=planned.keep) == planned and p.keep <= planned.keep


def _withheld(policy: Policy, layers: LayerMap) -> list[Layer]:
    """The layers that the policy withholds; a name that no layer has is a mistake in the policy."""
    withheld = []
    for pattern in policy.layers.never_leave:
        matching = [l for l in layers.layers if fnmatchcase(l, pattern)]
        if not matching:
            raise Refused(
                RefusalCode.PLAN,
                f"the policy withholds {pattern!r}, and no layer of this network has that name: "
                f"{', '.join(layers.layers)}",
            )
        withheld += matching
    return withheld


def check_room(node: NodeSettings, run: str) -> None:
    """Refuse a new run where the node stores states of as many runs as its policy allows."""
    stored, limit = stored_runs(node.folder), node.policy.runs.stored
    if run not in stored and len(stored) >= limit:
        raise Refused(
            RefusalCode.CAPACITY,
            f"this node stores states of {len(stored)} runs, and the policy allows {limit}; delete "
            "old ones with: fedp3 node caches --clear states",
        )


def admit(node: NodeSettings, holding: NodeContext, request: Request, task: Task) -> Admitted:
    """Check a task, charge what it will release, and return what is done for it.

    The message that carried the task has passed `check_message`.

    Raises:
        Refused: nothing is done and nothing was charged.
    """
    check_task(node, holding, task)
    if task.kind == "train":
        check_room(node, request.run)
    context, shard = holding.context, shard_of(node, holding)
    mechanism = request.mechanism
    if mechanism is not None:
        mechanism = replace(mechanism, ghost=holding.ghost)
        context = replace(context, stacked=False, steps=PrivateSteps(mechanism))
        settings = holding.config.privacy
        policy, delta = node.policy.privacy, settings.delta
        if math.isfinite(policy.epsilon):
            delta = max(delta, policy.delta)
        if delta * max(len(shard.train), 1) >= 1:
            raise Refused(
                RefusalCode.PRIVACY, f"delta {delta:g} is not below 1 / {len(shard.train)} records"
            )
        if task.kind != "evaluate":
            steps = mechanism.steps_per_task(context.local)
            charge_update(node, request.run, task, mechanism, steps, settings, context.data, shard)
    scored = allowed_scores(node, request.run, task, mechanism is not None, context.data, shard)
    if scored is None:
        return Admitted(task=replace(task, evaluate=False), context=context, shard=shard)
    return Admitted(task=task, context=context, shard=scored)
