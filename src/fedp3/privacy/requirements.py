"""Every reason to refuse a run under LDP, in one table: `REFUSALS`.

A rule is a function that yields a text for each reason it finds, and nothing where all is well.
The table groups rules by what they look at, which is also the order in which they are checked:

1. settings: the config, before anything is built;
2. deployment: the config, before a run on real nodes;
3. assembled: the types of layers, the samples and the method of an assembled run;
4. trial: how the network behaves on made-up records (the rules are in `trial`);
5. budget: the budget that the accountant has computed.

To add a refusal, write a rule and add it to one row of the table.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from fedp3.client.context import ClientContext
from fedp3.client.hooks import Pass
from fedp3.core.errors import InputError, first_line
from fedp3.data.shards import Shard
from fedp3.planning.client_plans import PlanSettings
from fedp3.privacy.settings import AUTO, Budget, PrivacySettings
from fedp3.privacy.trial import kept_state, mixed_records

Reasons = Iterator[str]


# A record's factor is C / ||g_j||, and norms reach 1.8e19, whose square is the largest float32.
# From C = 2e-19 down factors lose their digits: one record was measured to move a sum by up to
# 1.29 C at 1e-38 and by 1.40 C at 1e-45, where noise of deviation C has 14 different values.
# Ghost clipping multiplies the factor with one side of a product before it meets the other, and
# needs 1e-6 for that (see LONGEST_INPUT); below, NORM_SLACK too would be longer than C.  No record
# exceeded C between 1e-6 and 1e18.  1e6 leaves room for the noise, which overflows at 1e38.
CLIPS = (1e-6, 1e6)
# A sum of 10,000 clipped records is rounded by up to 6e-4 C, which must not swallow the noise, and
# noise of 1e6 C is rounded by 0.06 C.  What "auto" finds is between 0.01 and 1e5.
NOISE_MULTIPLIERS = (1e-3, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledRun:
    """What the rules of an assembled run may look at."""

    context: ClientContext
    shards: Mapping[int, Shard]
    delta: float


# --------------------------------------------------------------------------- rules: settings


def _noise_without_ldp(plan: PlanSettings, privacy: PrivacySettings) -> Reasons:
    if plan.others == "noise" and not privacy.enabled:
        yield "[plan] others: 'noise' is for runs under LDP; set [privacy] enabled"


def _training_without_noise(plan: PlanSettings, privacy: PrivacySettings) -> Reasons:
    if plan.others == "train" and privacy.enabled:
        yield (
            "[plan] others: layers outside L_i that train without noise show in the next step's "
            "upload, which breaks the guarantee; leave others out to freeze them, or set it to "
            "'noise' to add noise to them too"
        )


def _no_noise(plan: PlanSettings, privacy: PrivacySettings) -> Reasons:
    finite = privacy.enabled and math.isfinite(privacy.epsilon)
    if finite and privacy.noise_multiplier == 0:
        yield (
            "[privacy] noise_multiplier: 0 means no noise, which only an infinite epsilon allows; "
            "set epsilon to inf, or noise_multiplier to 'auto'"
        )


def _clip_out_of_range(plan: PlanSettings, privacy: PrivacySettings) -> Reasons:
    low, high = CLIPS
    if privacy.enabled and not low <= privacy.clip <= high:
        yield (
            f"[privacy] clip: 32-bit numbers cannot hold gradients to a norm of {privacy.clip:g}; "
            f"use a clip from {low:g} to {high:g} (the noise follows it, so that epsilon stays the "
            "same), and scale local.lr instead"
        )


def _noise_out_of_range(plan: PlanSettings, privacy: PrivacySettings) -> Reasons:
    low, high = NOISE_MULTIPLIERS
    noise = privacy.noise_multiplier
    if not privacy.enabled or noise in (AUTO, 0):
        return
    if not low <= float(noise) <= high:
        yield (
            f"[privacy] noise_multiplier: beside gradients of length 1, noise of {noise:g} is lost "
            f"in 32-bit sums, or they are lost in it; use a number from {low:g} to {high:g}, or "
            "'auto'"
        )


# --------------------------------------------------------------------------- rules: deployment


def _seeded_noise(privacy: PrivacySettings) -> Reasons:
    if privacy.enabled and privacy.randomness != "os":
        yield (
            f"[privacy] randomness = {privacy.randomness!r} is for simulation: in a deployment "
            "nobody but the node may know its noise; set 'os'"
        )


def _ledger_over_runs(privacy: PrivacySettings) -> Reasons:
    if privacy.enabled and privacy.ledger:
        yield (
            "[privacy] ledger is for runs on one machine: in a deployment every node adds up all "
            "runs in its own ledger; leave it out"
        )


# --------------------------------------------------------------------------- rules: assembled run


def _batch_statistics(run: AssembledRun) -> Reasons:
    kinds = nn.modules.batchnorm._BatchNorm
    modules = run.context.net.named_modules()
    layers = [path or "the network" for path, m in modules if isinstance(m, kinds)]
    if layers:
        more = f" and {len(layers) - 1} more layers" if len(layers) > 1 else ""
        yield (
            f"{layers[0]}{more} compute statistics over a batch, which depend on single records; "
            "normalise each record by itself instead (resnet18: model.norm='group')"
        )


def _uploaded_buffers(run: AssembledRun) -> Reasons:
    """Buffers are uploaded without noise, and a network can write anything into them."""
    kinds = nn.modules.batchnorm._BatchNorm
    modules = run.context.net.named_modules()
    norms = {path for path, m in modules if isinstance(m, kinds)}
    buffers = sorted(n for n in run.context.layers.buffers if n.rpartition(".")[0] not in norms)
    if buffers:
        more = f" and {len(buffers) - 1} more" if len(buffers) > 1 else ""
        yield (
            f"the buffer {buffers[0]}{more} would be uploaded without noise; if it is a constant, "
            "register it with register_buffer(..., persistent=False)"
        )


def _repeated_records(run: AssembledRun) -> Reasons:
    for client, shard in run.shards.items():
        if len(set(shard.train.tolist())) < len(shard.train):
            yield (
                f"client {client} has a training record twice: it would be sampled twice "
                "independently, but the accountant assumes once; name every sample once in "
                "[partition] file"
            )
            return  # one example is enough


def _overlapping_records(run: AssembledRun) -> Reasons:
    if run.context.data.overlapping:
        yield (
            "the sequences of the text overlap, so that a character is in several records, and the "
            "guarantee is about one record; leave data.stride at 0"
        )


def _unknown_records(run: AssembledRun) -> Reasons:
    data = run.context.data
    if data.rows is not None and data.ids is None:
        yield (
            "samples are read lazily, so that a record cannot be recognised by its values, and "
            "budgets are per record; let the data set have `ids`, a stable text for each row, or "
            "pass fedp3.from_torch(..., ids=..., lazy=True), or leave lazy out"
        )


def _large_delta(run: AssembledRun) -> Reasons:
    records, client = max(((len(s.train), i) for i, s in run.shards.items()), default=(0, 0))
    if records and run.delta >= 1 / records:
        yield (
            f"privacy.delta={run.delta:g} is not below 1/m: client {client} has {records} training "
            "records, and a mechanism that publishes one random record would satisfy such a delta; "
            "set it to "
            f"{min(1e-5, 0.1 / records):.1g} or less"
        )


def _method_hooks(run: AssembledRun) -> Reasons:
    """Parts of a method that train on, or send, more than clipped and noised gradients."""
    hooks = run.context.hooks
    if hooks.exchange is not None:
        yield "the method's own tensors leave the client without noise (hooks.exchange)"
    if hooks.loss is not None:
        yield "only the gradient of the objective's loss is clipped by record (hooks.loss)"
    if hooks.transform_outputs is not None:
        yield "scores would depend on the labels of a client's training records (hooks.loss)"
    if hooks.step is not None:
        yield "the second gradient of a distilled step carries no noise (hooks.distil)"
    if hooks.gradient is not None:
        yield "only the gradient of the loss is clipped by record (hooks.through_threshold)"
    if hooks.after_pass is not None:
        yield "statistics over a batch depend on single records (hooks.static_norm)"
    if hooks.forward is not None:
        yield "clipping by record does not support scaled units (hooks.scale)"
    if hooks.passes != (Pass(),):
        yield "the accountant counts one plain pass per task (hooks.passes, hooks.mu)"
    if hooks.probe != (Pass(),):
        yield (
            "the update before P is measured must be one plain pass, because that is what a client "
            "is charged for (hooks.finetune_factor)"
        )


# --------------------------------------------------------------------------- rules: budget


def _unknown_participation(budget: Budget, planned_steps: int | None) -> Reasons:
    if planned_steps == 0:
        yield (
            "the number of records of each client is not known, so neither is the noise for "
            f"epsilon={budget.epsilon:g}; find it with `fedp3 privacy sigma` and set "
            "privacy.noise_multiplier"
        )


def _unaffordable_task(budget: Budget, planned_steps: int | None) -> Reasons:
    if planned_steps != 0 and budget.allowed_steps < budget.steps_per_task:
        mechanism = budget.mechanism
        yield (
            f"one task of {budget.steps_per_task} steps with noise multiplier "
            f"{mechanism.noise_multiplier:g} and sample rate {mechanism.sample_rate:g} costs more "
            f"than epsilon={budget.epsilon:g}; {budget.allowed_steps} steps would fit. Use more "
            "noise or fewer local steps, or set privacy.noise_multiplier to 'auto'"
        )


# --------------------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """Rules, by what they look at."""

    settings: tuple[Callable[[PlanSettings, PrivacySettings], Reasons], ...]
    deployment: tuple[Callable[[PrivacySettings], Reasons], ...]
    assembled: tuple[Callable[[AssembledRun], Reasons], ...]
    # each is tried if no rule before applies
    trial: tuple[Callable[[ClientContext, Mapping[int, Shard]], Reasons], ...]
    budget: tuple[Callable[[Budget, int | None], Reasons], ...]


REFUSALS = Refusals(
    settings=(
        _noise_without_ldp,
        _training_without_noise,
        _no_noise,
        _clip_out_of_range,
        _noise_out_of_range,
    ),
    deployment=(_seeded_noise, _ledger_over_runs),
    assembled=(
        _batch_statistics,
        _uploaded_buffers,
        _repeated_records,
        _overlapping_records,
        _unknown_records,
        _large_delta,
        _method_hooks,
    ),
    trial=(
        kept_state,
        mixed_records,
    ),  # `uses_ghost` refuses networks without per-example gradients
    budget=(_unknown_participation, _unaffordable_task),
)


# --------------------------------------------------------------------------- the checks


def refused_settings(plan: PlanSettings, privacy: PrivacySettings) -> list[str]:
    """Mistakes in a config that would break the guarantee, or that only make sense under LDP."""
    return [reason for rule in REFUSALS.settings for reason in rule(plan, privacy)]


def refused_deployment(privacy: PrivacySettings) -> str:
    """Why these settings must not be used outside a simulation; empty if they may."""
    return "\n".join(reason for rule in REFUSALS.deployment for reason in rule(privacy))


def check(context: ClientContext, shards: Mapping[int, Shard], delta: float) -> None:
    """Raise one error with every reason not to start this run under LDP."""
    run = AssembledRun(context=context, shards=shards, delta=delta)
    _raise_if_any(reason for rule in REFUSALS.assembled for reason in rule(run))
    for rule in REFUSALS.trial:
        try:
            reasons = list(rule(context, shards))
        except Exception as error:  # whatever a user's network raises
            reasons = [
                "the network cannot be tried out, because it fails on made-up records whose values "
                f"are within the range of the data: {type(error).__name__}: {first_line(error)}"
            ]
        _raise_if_any(reasons)


def check_budget(budget: Budget, planned_steps: int | None) -> None:
    """Raise an error if nobody can train within this budget.

    Args:
        budget: what each client may spend.
        planned_steps: steps of the client that takes part most often, where the noise was computed
            from them; None where the config sets the noise.
    """
    _raise_if_any(reason for rule in REFUSALS.budget for reason in rule(budget, planned_steps))


def _raise_if_any(reasons: Iterable[str]) -> None:
    lines = [f"LDP refused: {reason}" for reason in reasons]
    if lines:
        raise InputError("\n".join(lines))
