"""Every reason to refuse a run under LDP, in one table: `REFUSALS`.

A rule is a function that yields a text for each reason it finds, and nothing where all is well.
The table groups rules by what they look at, which is also the order in which they are checked:

1. settings: the config, before anything is built;
2. deployment: the config, before a run on real nodes;
3. assembled: the types of layers, the samples and the method of an assembled run;
4. trial: how the network behaves on made-up records;
5. budget: the budget that the accountant has computed.

To add a refusal, write a rule and add it to one row of the table.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedp3.client.context import ClientContext
from fedp3.client.hooks import Pass
from fedp3.core.errors import InputError
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.data.shards import Shard
from fedp3.planning.client_plans import PlanSettings
from fedp3.privacy.clipping import func_pieces, ghost_agrees
from fedp3.privacy.settings import Budget, PrivacySettings

Reasons = Iterator[str]

TRIAL_RECORDS = 3  # made-up records on which a network is tried out
TRIAL_DRAWS = 32  # times that a network which draws at random is tried out
DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


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
        yield "only the gradient of the cross-entropy is clipped by record (hooks.loss)"
    if hooks.transform_outputs is not None:
        yield "scores would depend on the labels of a client's training records (hooks.loss)"
    if hooks.step is not None:
        yield "the second gradient of a distilled step carries no noise (hooks.distil)"
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


# --------------------------------------------------------------------------- rules: trial


def _mixed_records(context: ClientContext) -> Reasons:
    """Records that influence each other have no gradients of their own, so no clip bounds them.

    Each record in turn is replaced by another one, which must not change the outputs of the others.
    A network that draws at random is tried out under many draws.
    """
    net = context.net.train()
    x = _made_up_records(context)

    def outputs(records: Tensor, draw: int) -> Tensor:
        with torch.no_grad(), layers_draw_from(stream(context.seed, Stream.LAYER, draw)):
            logits: Tensor = net(records)
        return logits

    for draw in range(TRIAL_DRAWS if _draws(net, x) else 1):
        before = outputs(x, draw)
        if draw == 0 and not _close(outputs(x, draw), before):
            yield (
                "the network draws random numbers from elsewhere than torch's generator, so its "
                "treatment of single records cannot be checked"
            )
            return
        for j in range(len(x)):
            changed = x.clone()
            changed[j] *= -3  # changes both sign and size
            unchanged = torch.arange(len(x)) != j
            if not _close(outputs(changed, draw)[unchanged], before[unchanged]):
                yield (
                    "the network's output for one record depends on the others in its batch, so "
                    "clipping cannot bound the influence of a record"
                )
                return


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
    trial: tuple[Callable[[ClientContext], Reasons], ...]  # tried only if no rule before applies
    budget: tuple[Callable[[Budget, int | None], Reasons], ...]


REFUSALS = Refusals(
    settings=(_noise_without_ldp, _training_without_noise, _no_noise),
    deployment=(_seeded_noise, _ledger_over_runs),
    assembled=(
        _batch_statistics,
        _uploaded_buffers,
        _repeated_records,
        _large_delta,
        _method_hooks,
    ),
    trial=(_mixed_records,),  # `uses_ghost` refuses networks without per-example gradients
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
    _raise_if_any(reason for rule in REFUSALS.trial for reason in rule(context))


def check_budget(budget: Budget, planned_steps: int | None) -> None:
    """Raise an error if nobody can train within this budget.

    Args:
        budget: what each client may spend.
        planned_steps: steps of the client that takes part most often, where the noise was computed
            from them; None where the config sets the noise.
    """
    _raise_if_any(reason for rule in REFUSALS.budget for reason in rule(budget, planned_steps))


def uses_ghost(context: ClientContext) -> bool:
    """Whether ghost clipping covers every way in which this network uses its tensors in training.

    Ghost clipping runs the network on batches, `torch.func` runs it on single records.  So a
    network that draws at random must not use ghost clipping, since a draw could mix records once
    in a while.  The exception are the Dropout layers of torch, which draw for each record.
    """
    net = context.net
    x = _made_up_records(context)
    y = torch.zeros(len(x), dtype=torch.int64, device=context.device)
    W = dict(net.named_parameters())
    required_grad = {n: p.requires_grad for n, p in W.items()}
    net.train().requires_grad_(True)
    try:
        with layers_draw_from(stream(context.seed, Stream.LAYER)):
            with _without_dropout(net):
                if not _draws(net, x) and ghost_agrees(net, x, y, W):
                    return True
            func_pieces(net, x, y, W, {})
    except Exception as error:  # torch.func raises many kinds
        reason = f"torch.func cannot compute per-example gradients of this network: {error}"
        raise InputError(f"LDP refused: {reason}") from None
    finally:
        for n, p in W.items():
            p.requires_grad_(required_grad[n])
    return False


def _raise_if_any(reasons: Iterable[str]) -> None:
    lines = [f"LDP refused: {reason}" for reason in reasons]
    if lines:
        raise InputError("\n".join(lines))


# --------------------------------------------------------------------------- trying out a network


def _made_up_records(context: ClientContext) -> Tensor:
    shape = (TRIAL_RECORDS, *context.data.x.shape[1:])
    return torch.randn(shape, generator=stream(context.seed, Stream.INIT)).to(context.device)


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def _draws(net: nn.Module, x: Tensor) -> bool:
    """Whether the network, in its current mode, takes anything from torch's generator."""
    with torch.no_grad(), layers_draw_from(stream(0, Stream.LAYER)):
        before = torch.random.get_rng_state()
        net(x)
        return not torch.equal(before, torch.random.get_rng_state())


@contextmanager
def _without_dropout(net: nn.Module) -> Iterator[None]:
    """Inside, the Dropout layers of a network in training mode do nothing."""
    layers = [m for m in net.modules() if type(m) in DROPOUTS]
    for m in layers:
        m.eval()
    try:
        yield
    finally:
        for m in layers:
            m.train()
