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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedp3.client.context import ClientContext
from fedp3.client.hooks import Pass
from fedp3.client.objectives import SHIPPED
from fedp3.core.errors import InputError
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.data.inputs import Inputs, call, chunks, combine, to_device
from fedp3.data.shards import Shard
from fedp3.models.buffers import restored_buffers
from fedp3.planning.client_plans import PlanSettings
from fedp3.privacy.clipping import func_pieces, ghost_agrees
from fedp3.privacy.made_up import made_up_records
from fedp3.privacy.per_record import DROPOUTS, per_record_graph
from fedp3.privacy.settings import AUTO, Budget, PrivacySettings

Reasons = Iterator[str]

TRIAL_RECORDS = 3  # made-up records on which a proven network is tried out
TRIAL_SIZES = (2, 3, 4, 5, 8, 13)  # batches on which others are tried out; then each is 1.6 larger
TRIAL_DRAWS = 32  # times that a network which draws at random is tried out on a small batch
TRIAL_SPLITS = 3  # ways in which a batch is cut into changed and unchanged records

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


# --------------------------------------------------------------------------- rules: trial


def _kept_state(run: AssembledRun) -> Reasons:
    """What a network remembers of one batch reaches the next gradients past clip and noise."""
    net, rng = run.context.net.train(), stream(run.context.seed, Stream.LAYER)
    x = _made_up(run.context, TRIAL_RECORDS)
    with restored_buffers(net), torch.no_grad(), layers_draw_from(rng):
        before = dict(_state(net))
        call(net, x)
        after = dict(_state(net))
    names = sorted(n for n in before.keys() | after if not _same(before.get(n), after.get(n)))
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"the network changes its attribute {names[0]}{more} when it computes a batch, and so "
            "can carry records past clip and noise into later steps; let forward store nothing"
        )


def _mixed_records(run: AssembledRun) -> Reasons:
    """Records that influence each other have no gradients of their own, so no clip bounds them.

    Some records of a batch are replaced by others, which must not change the outputs of the rest.
    This is repeated for batches of many sizes, up to the largest that a step can compute at once.
    A network that draws at random is tried out under many draws, most of them on small batches.
    """
    net = run.context.net.train()
    example = _made_up(run.context, 1)
    proven = isinstance(example, Tensor) and per_record_graph(net, example) is not None
    for size in (TRIAL_RECORDS,) if proven else _trial_sizes(_largest_batch(run)):
        reason = _mixing(run.context, net, size)
        if reason:
            yield reason
            return


def _mixing(context: ClientContext, net: nn.Module, size: int) -> str:
    """Why the network does not compute batches of this size record by record; empty if it does."""
    x, others = chunks(_made_up(context, 2 * size), 2)

    def outputs(records: Inputs, draw: int) -> Tensor:
        with torch.no_grad(), layers_draw_from(stream(context.seed, Stream.LAYER, draw)):
            return _by_record(call(net, records), size)

    draws = max(1, TRIAL_DRAWS * TRIAL_SIZES[0] ** 2 // size**2) if _draws(net, x) else 1
    for draw in range(draws):
        before = outputs(x, draw)
        if not _close(outputs(x, draw), before):
            return (
                "the network computes the same records twice with different results: it draws "
                "random numbers from elsewhere than torch's generator, or remembers earlier "
                "batches, so its treatment of single records cannot be checked"
            )
        for unchanged in _splits(size):
            mixed = combine(partial(_where_rows, unchanged), x, others)
            if not _close(outputs(mixed, draw)[unchanged], before[unchanged]):
                return (
                    "the network's output for one record depends on the others in its batch (of "
                    f"{size} records), so clipping cannot bound the influence of a record"
                )
    return ""


def _where_rows(chosen: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The chosen rows of a, and the others of b."""
    return a.where(chosen.view(-1, *[1] * (a.dim() - 1)), b)


def _by_record(outputs: object, records: int) -> Tensor:
    """All numbers that a network returns, (records, numbers)."""
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    rows = [w.reshape(records, -1).float() for w in tensors if w.dim() and len(w) == records]
    if not rows:
        raise InputError("it returns no tensor with one row for each record")
    return torch.cat(rows, 1)


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
    trial: tuple[Callable[[AssembledRun], Reasons], ...]  # each is tried if no rule before applies
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
    # `uses_ghost` refuses networks without per-example gradients.
    trial=(_kept_state, _mixed_records),
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
            reasons = list(rule(run))
        except Exception as error:  # whatever a user's network raises
            text = (str(error).strip().splitlines() or [""])[0]
            reasons = [
                "the network cannot be tried out, because it fails on made-up records whose values "
                f"are within the range of the data: {type(error).__name__}: {text}"
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


def uses_ghost(context: ClientContext) -> bool:
    """Whether ghost clipping covers every way in which this network uses its tensors in training.

    Ghost clipping shows whole batches to the network, `torch.func` shows single records.  So only
    a network whose graph provably computes record by record may use ghost clipping, and only with
    losses that are known to do so too.
    """
    net = context.net
    x = _made_up(context, TRIAL_RECORDS)
    # Targets of the data: made-up ones might be padding only, or no class at all.
    data, loss = context.data, context.objective.loss
    y = data.y[torch.arange(TRIAL_RECORDS) % len(data.y)].to(context.device)
    W = dict(net.named_parameters())
    required_grad = {n: p.requires_grad for n, p in W.items()}
    net.train().requires_grad_(True)
    try:
        with layers_draw_from(stream(context.seed, Stream.LAYER)):
            with _without_dropout(net):
                if context.objective in SHIPPED and ghost_agrees(net, x, y, W, loss):
                    return True
            func_pieces(net, x, y, W, {}, loss)
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


def _largest_batch(run: AssembledRun) -> int:
    """The most records that a step of any client computes at once.

    A server that does not know its clients' records assumes that there are enough.
    """
    limit = run.context.local.batch
    most = max((len(s.train) for s in run.shards.values()), default=0)
    return min(limit, most or limit)


def _trial_sizes(largest: int) -> list[int]:
    """Batch sizes up to the largest, by Fibonacci's rule in the end; 2 and 3 at least."""
    sizes = list(TRIAL_SIZES)
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + sizes[-2])
    return sorted({2, 3, max(3, largest)} | {n for n in sizes if n <= largest})


def _splits(size: int) -> Iterator[Tensor]:
    """Masks of unchanged records; up to 8 records, each record changes without each other one."""
    positions = torch.arange(size)
    for bit in range(min(TRIAL_SPLITS, (size - 1).bit_length())):
        half = (positions >> bit) % 2 == 0
        yield half
        yield ~half


def _made_up(context: ClientContext, records: int) -> Any:
    rng = stream(context.seed, Stream.INIT)
    return to_device(made_up_records(context.data, records, rng), context.device)


def _state(value: object, path: str = "", seen: frozenset[int] = frozenset()) -> Iterator[Any]:
    """Everything that a module's attributes hold, as pairs of a path and a value.

    Tensors are copied.  Containers and modules are entered; other objects count by identity.
    """
    inner: Mapping[Any, object]
    if isinstance(value, nn.Module):
        inner = vars(value)
    elif isinstance(value, Mapping):
        inner = value
    elif isinstance(value, list | tuple | deque):
        inner = dict(enumerate(value))
    else:
        plain = value is None or isinstance(value, str | int | float)
        copied = value.detach().clone() if isinstance(value, Tensor) else value
        yield path, copied if plain or isinstance(value, Tensor) else id(value)
        return
    if id(value) not in seen:
        for name, part in inner.items():
            yield from _state(part, f"{path}.{name}" if path else str(name), seen | {id(value)})


def _same(a: object, b: object) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def _draws(net: nn.Module, x: Inputs) -> bool:
    """Whether the network, in its current mode, takes anything from torch's generator."""
    with torch.no_grad(), layers_draw_from(stream(0, Stream.LAYER)):
        before = torch.random.get_rng_state()
        call(net, x)
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
