"""Bugs that a reviewer plants in the code that runs under LDP, each as a patch of real code.

`BUGS` are the nineteen of the first review, under the numbers that they had there.  `MORE_BUGS` are
similar ones: noise that is shared in other ways, coins that are reused, noise in another format,
and other ways in which records leave a client.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedp3.client import passes, scoring
from fedp3.client import update as updates
from fedp3.client.batching import LocalSettings
from fedp3.client.objectives import RecordLoss
from fedp3.client.step_source import Gradient
from fedp3.core.randomness import Stream, stream
from fedp3.core.types import Params
from fedp3.messages import compression
from fedp3.privacy import accountant, ledger, mechanism
from fedp3.privacy.mechanism import PrivateSteps
from fedp3.privacy.settings import Mechanism
from fedp3.runs import session

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug.

    Args:
        plant: puts it into the code.
        parts: the parts of the audit that must catch it; others may catch it too.
        before: it must be planted before the run is assembled, because it changes the budget.
        settings: settings of the run without which it does nothing.
    """

    plant: Patch
    parts: tuple[str, ...]
    before: bool = False
    settings: tuple[str, ...] = ()


fill, add, generator = (
    mechanism.fill_with_noise,
    mechanism.add_clipped,
    mechanism.secret_generator,
)
gradient_of, batches_of, poisson = (
    mechanism.private_gradient,
    mechanism.private_batches,
    mechanism.poisson,
)


def patched(name: str, value: object) -> Patch:
    """A bug that replaces a function of the mechanism."""
    return lambda m: m.setattr(mechanism, name, value)


def private_gradient_with(
    noise: Callable[[dict[str, Tensor], Mechanism, torch.Generator, int, tuple[int, ...]], None],
    clip_part: Callable[[Mechanism, int], Mechanism] = lambda m, part: m,
) -> Callable[..., Gradient]:
    """`private_gradient` with other noise on a step's sums, or another clip for a part of S."""

    def private_gradient(
        m: Mechanism, local: LocalSettings, samples: int, seed: int, *address: int, loss: RecordLoss
    ) -> Gradient:
        rng = mechanism.secret_generator(m, Stream.NOISE, seed, *address)
        step = 0

        def gradient(
            net: nn.Module, x: Tensor, y: Tensor, W: Params, masks: Params
        ) -> tuple[float, list[Tensor]]:
            nonlocal step
            sums = {n: torch.zeros(w.shape) for n, w in W.items()}
            noise(sums, m, rng, step, address)
            step += 1
            for part, begin in enumerate(range(0, len(x), local.batch)):
                rows = slice(begin, begin + local.batch)
                add(sums, net, x[rows], y[rows], W, masks, clip_part(m, part), loss)
            return math.nan, [g / (m.sample_rate * samples) for g in sums.values()]

        return gradient

    return private_gradient


def fill_all(sums: dict[str, Tensor], m: Mechanism, rng: torch.Generator, *rest: object) -> None:
    """The noise as it should be."""
    for w in sums.values():
        fill(w, m, rng)


def filled_with(change: Callable[[Tensor], object]) -> Patch:
    """A bug that changes the noise of each tensor after it was drawn."""

    def fill_with_noise(out: Tensor, m: Mechanism, rng: torch.Generator) -> None:
        fill(out, m, rng)
        change(out)

    return patched("fill_with_noise", fill_with_noise)


def scaled_noise(factor: float) -> Patch:
    """Noise times a factor."""
    return filled_with(lambda out: out.mul_(factor))


# --------------------------------------------------------------------------- clipping


def _tensors_are_clipped(
    out: Params,
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    W: Params,
    masks: Params,
    m: Mechanism,
    loss: RecordLoss,
) -> None:
    for n in W:
        of_tensor = {k: mask for k, mask in masks.items() if k == n}
        add({n: out[n]}, net, x, y, {n: W[n]}, of_tensor, replace(m, ghost=False), loss)


def _batch_is_clipped(
    out: Params,
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    W: Params,
    masks: Params,
    m: Mechanism,
    loss: RecordLoss,
) -> None:
    total = {n: torch.zeros_like(w) for n, w in out.items()}
    add(total, net, x, y, W, masks, replace(m, clip=math.inf), loss)
    norm = torch.cat([w.flatten() for w in total.values()]).norm() / max(1, len(x))
    for n, w in total.items():
        out[n].add_(w, alpha=min(1.0, m.clip / max(float(norm), 1e-12)))


def _louder(*arguments: Any) -> None:
    *others, m, loss = arguments
    add(*others, replace(m, clip=1.1 * m.clip), loss)


def clip_only(parts: Callable[[int], bool]) -> Patch:
    """A bug: of a batch that is clipped in several parts, only some parts are."""
    gradient = private_gradient_with(
        fill_all, lambda m, part: m if parts(part) else replace(m, clip=math.inf)
    )
    return patched("private_gradient", gradient)


# --------------------------------------------------------------------------- noise


def _reset_state(
    sums: dict[str, Tensor], m: Mechanism, rng: torch.Generator, *rest: object
) -> None:
    state = rng.get_state()
    for w in sums.values():
        rng.set_state(state)
        fill(w, m, rng)


def _one_vector(sums: dict[str, Tensor], m: Mechanism, rng: torch.Generator, *rest: object) -> None:
    vector = torch.empty(max(w.numel() for w in sums.values()))
    fill(vector, m, rng)
    for w in sums.values():
        w.copy_(vector[: w.numel()].view(w.shape))


def _shuffled_copy(
    sums: dict[str, Tensor], m: Mechanism, rng: torch.Generator, *rest: object
) -> None:
    """Half of each tensor has the noise of its other half, in an order that looks random."""
    for w in sums.values():
        fill(w, m, rng)
        half = w.numel() // 2
        order = torch.randperm(half, generator=torch.Generator().manual_seed(3))
        w.view(-1)[:half] = -w.view(-1)[half : 2 * half][order]


def _partly_shared(
    sums: dict[str, Tensor], m: Mechanism, rng: torch.Generator, *rest: object
) -> None:
    """Every coordinate has a tenth of its variance from one number that all share."""
    common = torch.empty(1)
    fill(common, m, rng)
    for w in sums.values():
        fill(w, m, rng)
        w.mul_(math.sqrt(0.9)).add_(common * math.sqrt(0.1))


def _once_per_task(repeat: bool) -> Callable[..., Gradient]:
    def private_gradient(*arguments: Any, loss: RecordLoss) -> Gradient:
        kept: dict[str, Tensor] = {}

        def noise(sums: dict[str, Tensor], m: Mechanism, rng: torch.Generator, *r: object) -> None:
            if not kept:
                fill_all(sums, m, rng)
                kept.update({n: w.clone() for n, w in sums.items()})
            elif repeat:
                for n, w in sums.items():
                    w.copy_(kept[n])

        return private_gradient_with(noise)(*arguments, loss=loss)

    return private_gradient


def noise_where(condition: Callable[[int, tuple[int, ...]], bool]) -> Patch:
    """A bug: only some steps have noise; takes the step's number and its (round, client)."""

    def noise(
        sums: dict[str, Tensor], m: Mechanism, rng: torch.Generator, step: int, address: Any
    ) -> None:
        if condition(step, address):
            fill_all(sums, m, rng)

    return patched("private_gradient", private_gradient_with(noise))


def _none_if_empty(
    m: Mechanism, local: LocalSettings, samples: int, seed: int, *address: int, loss: RecordLoss
) -> Gradient:
    private = gradient_of(m, local, samples, seed, *address, loss=loss)

    def gradient(
        net: nn.Module, x: Tensor, y: Tensor, W: Params, masks: Params
    ) -> tuple[float, list[Tensor]]:
        if not len(x):
            return math.nan, [torch.zeros_like(w) for w in W.values()]
        return private(net, x, y, W, masks)

    return gradient


def _quiet_others(
    m: Mechanism, local: LocalSettings, samples: int, seed: int, *address: int, loss: RecordLoss
) -> Gradient:
    """The first layer, which is outside L_i, trains on the plain gradient of all finite records."""
    private = gradient_of(m, local, samples, seed, *address, loss=loss)

    def gradient(
        net: nn.Module, x: Tensor, y: Tensor, W: Params, masks: Params
    ) -> tuple[float, list[Tensor]]:
        first = next(iter(dict(net.named_parameters()))).rpartition(".")[0]
        loud = {n: w for n, w in W.items() if not n.startswith(f"{first}.")}
        finite = x.flatten(1).isfinite().all(1)
        plain = {n: torch.zeros_like(w) for n, w in W.items()}
        if bool(finite.any()):
            mean = nn.functional.cross_entropy(net(x[finite]), y[finite])
            plain = dict(zip(W, torch.autograd.grad(mean, list(W.values())), strict=True))
        of_loud = {n: mask for n, mask in masks.items() if n in loud}
        noisy = dict(zip(loud, private(net, x, y, loud, of_loud)[1], strict=True))
        return math.nan, [noisy.get(n, plain[n]) for n in W]

    return gradient


def _no_bias_noise(
    sums: dict[str, Tensor], m: Mechanism, rng: torch.Generator, *rest: object
) -> None:
    for n, w in sums.items():
        if not n.endswith("bias"):
            fill(w, m, rng)


def _repeat_rows(out: Tensor) -> None:
    if out.dim() > 1:
        pairs = len(out) // 2
        out[1 : 2 * pairs : 2] = out[0 : 2 * pairs : 2].clone()


def _skip_dead_rows(out: Tensor) -> None:
    if out.dim() == 2:
        out[0] = 0.0


def generator_of(use: Stream, make: Callable[..., torch.Generator]) -> Patch:
    """A bug: one use of randomness has another generator; `make` takes (seed, round, client)."""

    def secret_generator(m: Mechanism, asked: Stream, seed: int, *address: int) -> torch.Generator:
        return make(seed, *address) if asked is use else generator(m, asked, seed, *address)

    return patched("secret_generator", secret_generator)


# --------------------------------------------------------------------------- sampling


def _shuffled_epochs(
    samples: int, rate: float, steps: int, rng: torch.Generator
) -> Iterator[Tensor]:
    size = max(1, round(rate * samples))
    for k in range(steps):
        if k * size % samples < size:
            order = torch.randperm(samples, generator=rng)
        yield order[k * size % samples :][:size]


def _everybody(samples: int, rate: float, steps: int, rng: torch.Generator) -> Iterator[Tensor]:
    return (torch.arange(samples) for _ in range(steps))


def _same_coins(samples: int, rate: float, steps: int, rng: torch.Generator) -> Iterator[Tensor]:
    (rows,) = poisson(samples, rate, 1, rng)
    return (rows for _ in range(steps))


def _fixed_size(samples: int, rate: float, steps: int, rng: torch.Generator) -> Iterator[Tensor]:
    size = max(1, round(rate * samples))
    return (torch.randperm(samples, generator=rng)[:size] for _ in range(steps))


def _coins_for_pairs(
    samples: int, rate: float, steps: int, rng: torch.Generator
) -> Iterator[Tensor]:
    for rows in poisson((samples + 1) // 2, rate, steps, rng):
        both = torch.stack([2 * rows, 2 * rows + 1], 1).flatten()
        yield both[both < samples]


def _twice_the_rate(
    m: Mechanism, local: LocalSettings, samples: int, seed: int, *address: int
) -> Iterator[Tensor]:
    more = replace(m, sample_rate=min(1.0, 2 * m.sample_rate))
    return poisson(
        samples,
        more.sample_rate,
        m.steps_per_task(local),
        mechanism.secret_generator(m, Stream.BATCHES, seed, *address),
    )


# --------------------------------------------------------------------------- ledger and accountant

charge_of = ledger.new_charge
charges_of = ledger.Ledger.charge
epsilon_of = accountant.epsilon
finish_run = session.finish


def _one_step_a_round(m: Mechanism, **fields: Any) -> ledger.Charge:
    return charge_of(m, **{**fields, "steps": 1})


def _more_noise_than_drawn(m: Mechanism, **fields: Any) -> ledger.Charge:
    return charge_of(replace(m, noise_multiplier=1.3 * m.noise_multiplier), **fields)


def _first_client_only(self: ledger.Ledger, clients: Any, t: int, released: str = "update") -> None:
    charges_of(self, list(clients)[:1], t, released)


def _charged_afterwards(m: pytest.MonkeyPatch) -> None:
    """Charges are written at the end of a round, when a crash could have lost them."""
    pending: list[tuple[ledger.Ledger, list[int], int]] = []
    epsilon_max, epsilons = ledger.Ledger.epsilon_max, ledger.Ledger.epsilons

    def write() -> None:
        while pending:
            charges_of(*pending.pop(0))

    m.setattr(
        ledger.Ledger,
        "charge",
        lambda self, c, t, released="update": pending.append((self, list(c), t)),
    )
    m.setattr(ledger.Ledger, "epsilon_max", lambda self: (write(), epsilon_max(self))[1])
    m.setattr(ledger.Ledger, "epsilons", lambda self: (write(), epsilons(self))[1])


def _final_probe_is_free(
    context: Any, state: Any, execute: Any, book: Any = None, last: Any = None
) -> Any:
    return finish_run(context, state, execute, None, last)


def _half_the_steps(spent: Mapping[Any, int], delta: float, name: str = "PLD") -> float:
    return epsilon_of({key: (k + 1) // 2 for key, k in spent.items()}, delta, name)


def _rate_squared(spent: Mapping[Any, int], delta: float, name: str = "PLD") -> float:
    """A wrong formula: the sample rate is used twice."""
    return epsilon_of({(z, q * q): k for (z, q), k in spent.items()}, delta, name)


# --------------------------------------------------------------------------- what leaves

train_pass, run_all_passes = passes.train, updates.run_passes
score_of, pack_upload = scoring.score, compression.pack


def metric(name: str, value: Callable[[Any, Any], float]) -> Patch:
    """A bug: a metric of training that is computed from the client's training records."""

    def train(context: Any, shard: Any, *others: Any) -> dict[str, float]:
        return {**train_pass(context, shard, *others), name: value(context, shard)}

    return lambda m: m.setattr(passes, "train", train)


def _loss(context: Any, shard: Any) -> float:
    x = context.data.x[shard.train].nan_to_num()
    with torch.no_grad():
        logits = context.net(x)
        return float(nn.functional.cross_entropy(logits, context.data.y[shard.train]))


def _loud_records(context: Any, shard: Any) -> float:
    """The share of records with large pixels."""
    return float((context.data.x[shard.train].flatten(1).abs().amax(1) > 100).double().mean())


def outcome_with(change: Callable[[Any, Any, Any], Any]) -> Patch:
    """A bug: a change of the update that leaves; takes context, job and update."""
    make_outcome = updates._outcome

    def outcome(context: Any, job: Any, start: Any, result: Any) -> Any:
        update, state = make_outcome(context, job, start, result)
        return change(context, job, update), state

    return lambda m: m.setattr(updates, "_outcome", outcome)


def _examples_that_count(context: Any, job: Any, update: Any) -> Any:
    x = context.data.x[job.shard.train]
    return replace(update, examples=int((x.flatten(1).abs().amax(1) < 100).sum()))


def _examples_of_a_batch(context: Any, job: Any, update: Any) -> Any:
    rate = context.steps.mechanism.sample_rate
    return replace(update, examples=max(1, round(rate * update.examples)))


def _mean_record(context: Any, job: Any, update: Any) -> Any:
    return replace(update, extra={**update.extra, "mean": context.data.x[job.shard.train].mean(0)})


def _scores_of_training_records(context: Any, shard: Any, *, trained: bool) -> dict[str, float]:
    return score_of(context, replace(shard, test=shard.train), trained=trained)


def probe_with(change: Callable[[Mechanism], Mechanism]) -> Patch:
    """A bug: a probe trains under another mechanism."""

    def run_passes(context: Any, shard: Any, task: Any, *others: Any) -> Any:
        if task.kind == "probe":
            other = PrivateSteps(change(context.steps.mechanism))
            context = replace(context, steps=other)
        return run_all_passes(context, shard, task, *others)

    return lambda m: m.setattr(updates, "run_passes", run_passes)


def _plain_gradient_at_the_end(context: Any, shard: Any, task: Any, *others: Any) -> Any:
    """One more step after the noisy ones, clipped but without noise."""
    result = run_all_passes(context, shard, task, *others)
    if task.kind != "train":
        return result
    quiet = replace(context, steps=PrivateSteps(replace(context.steps.mechanism, sample_rate=1.0)))
    quiet = replace(
        quiet,
        steps=PrivateSteps(replace(quiet.steps.mechanism, noise_multiplier=0.0)),
        local=replace(context.local, steps=1, epochs=0),
    )
    start = others[0]
    more = run_all_passes(quiet, shard, task, *others)
    moved = {n: w + more.tensors[n] - start[n] for n, w in result.tensors.items()}
    return replace(result, tensors=moved)


def _residual_without_noise(*arguments: Any) -> Any:
    """Error feedback keeps zeros in the place of the noisy numbers that it left out."""
    packed = pack_upload(*arguments)
    return replace(packed, residual={n: torch.sign(w) * 0.1 for n, w in packed.residual.items()})


def _seeded(use: Stream) -> Patch:
    return generator_of(use, lambda seed, *address: stream(seed, use, *address))


BUGS: Mapping[str, Bug] = {
    "01 noise divided by sqrt 2": Bug(scaled_noise(2**-0.5), ("noise", "charging")),
    "02 clip per tensor": Bug(patched("add_clipped", _tensors_are_clipped), ("sensitivity",)),
    "03 generator state reset per tensor": Bug(
        patched("private_gradient", private_gradient_with(_reset_state)), ("independence",)
    ),
    "04 no noise on biases": Bug(
        patched("private_gradient", private_gradient_with(_no_bias_noise)), ("noise",)
    ),
    "05 shuffled epochs": Bug(patched("poisson", _shuffled_epochs), ("sampling",)),
    "06 constant seed": Bug(
        generator_of(Stream.NOISE, lambda *a: torch.Generator().manual_seed(5)),
        ("independence",),
    ),
    "07 clip by the batch's mean": Bug(patched("add_clipped", _batch_is_clipped), ("sensitivity",)),
    "08 ledger charges one step a round": Bug(
        lambda m: m.setattr(ledger, "new_charge", _one_step_a_round), ("charging",)
    ),
    "09 server never charges": Bug(
        lambda m: m.setattr(ledger.Ledger, "charge", lambda self, *charged, **about: None),
        ("charging",),
    ),
    "10 final probe not charged": Bug(
        lambda m: m.setattr(session, "finish", _final_probe_is_free), ("charging",)
    ),
    "12 training loss sent": Bug(metric("loss", _loss), ("releases",)),
    "13 epsilon of half the steps": Bug(
        lambda m: m.setattr(accountant, "epsilon", _half_the_steps), ("accountant",), before=True
    ),
    "15 one noise per task, in every step": Bug(
        patched("private_gradient", _once_per_task(repeat=True)), ("noise", "charging")
    ),
    "15 one noise per task, in the first step": Bug(
        patched("private_gradient", _once_per_task(repeat=False)), ("noise", "charging")
    ),
    "16 no noise on an empty batch": Bug(
        patched("private_gradient", _none_if_empty), ("noise", "charging")
    ),
    "17 probe trains without noise": Bug(
        probe_with(lambda m: replace(m, noise_multiplier=0.0)), ("noise", "charging")
    ),
    "18 only the first part of a batch clipped": Bug(
        clip_only(lambda part: part == 0), ("sensitivity",)
    ),
    "19 no noise for clients other than 0": Bug(
        noise_where(lambda step, address: address[1] == 0), ("noise", "charging")
    ),
    "22 one noise vector for all tensors": Bug(
        patched("private_gradient", private_gradient_with(_one_vector)), ("independence",)
    ),
    "23 odd rows repeat even rows": Bug(filled_with(_repeat_rows), ("independence",)),
}

MORE_BUGS: Mapping[str, Bug] = {
    "noise shared between clients": Bug(
        generator_of(Stream.NOISE, lambda seed, t, i: stream(seed, Stream.NOISE, t)),
        ("independence",),
    ),
    "noise shared between rounds": Bug(
        generator_of(Stream.NOISE, lambda seed, t, i: stream(seed, Stream.NOISE, i)),
        ("independence",),
    ),
    "noise of the operating system is seeded": Bug(_seeded(Stream.NOISE), ("independence",)),
    "noise is partly shared by all coordinates": Bug(
        patched("private_gradient", private_gradient_with(_partly_shared)), ("independence",)
    ),
    "noise of one half of a tensor repeated in another order": Bug(
        patched("private_gradient", private_gradient_with(_shuffled_copy)), ("independence",)
    ),
    "noise only in the first round": Bug(
        noise_where(lambda step, address: address[0] <= 1), ("noise", "charging")
    ),
    "noise only in even steps": Bug(
        noise_where(lambda step, address: step % 2 == 0), ("noise", "charging")
    ),
    "noise off for one client of the fleet": Bug(
        noise_where(lambda step, address: address[1] != 7), ("noise",)
    ),
    "noise truncated to whole numbers": Bug(
        filled_with(lambda out: out.round_()), ("noise", "independence")
    ),
    "noise in half precision": Bug(
        filled_with(lambda out: out.copy_(out.half())), ("independence",)
    ),
    "noise clamped to three deviations": Bug(
        filled_with(lambda out: out.clamp_(-3 * float(out.std()), 3 * float(out.std()))),
        ("noise",),
    ),
    "noise is uniform": Bug(filled_with(lambda out: out.copy_(_uniform_like(out))), ("noise",)),
    "no noise on rows of dead units": Bug(filled_with(_skip_dead_rows), ("noise",)),
    "layers outside L_i train without noise": Bug(
        patched("private_gradient", _quiet_others),
        ("sensitivity", "noise"),
        settings=("plan.others=noise",),
    ),
    "clip 10 % too large": Bug(patched("add_clipped", _louder), ("sensitivity",)),
    "only the last parts of a batch clipped": Bug(
        clip_only(lambda part: part > 0), ("sensitivity",)
    ),
    "every record in every step": Bug(patched("poisson", _everybody), ("sampling", "composition")),
    "the same coins in every step": Bug(patched("poisson", _same_coins), ("sampling",)),
    "the same coins for all clients": Bug(
        generator_of(Stream.BATCHES, lambda seed, t, i: stream(seed, Stream.BATCHES, t)),
        ("sampling",),
    ),
    "the same coins in every round": Bug(
        generator_of(Stream.BATCHES, lambda seed, t, i: stream(seed, Stream.BATCHES, i)),
        ("sampling",),
    ),
    "coins of the operating system are seeded": Bug(_seeded(Stream.BATCHES), ("sampling",)),
    "one coin for two records": Bug(patched("poisson", _coins_for_pairs), ("sampling",)),
    "batches of fixed size": Bug(patched("poisson", _fixed_size), ("sampling",)),
    "twice the sample rate": Bug(patched("private_batches", _twice_the_rate), ("sampling",)),
    "crops from the run's seed": Bug(_seeded(Stream.AUGMENT), ("independence",)),
    "Dropout from the run's seed": Bug(_seeded(Stream.LAYER), ("independence",)),
    "ledger names more noise than was drawn": Bug(
        lambda m: m.setattr(ledger, "new_charge", _more_noise_than_drawn), ("charging",)
    ),
    "only the first client of a round charged": Bug(
        lambda m: m.setattr(ledger.Ledger, "charge", _first_client_only), ("charging",)
    ),
    "charges written after the round": Bug(_charged_afterwards, ("charging",)),
    "budgets are not enforced": Bug(
        lambda m: m.setattr(ledger.Ledger, "can_pay", lambda self, client, t: True),
        ("charging",),
    ),
    "accountant squares the sample rate": Bug(
        lambda m: m.setattr(accountant, "epsilon", _rate_squared), ("accountant",)
    ),
    "probe trains without clip": Bug(
        probe_with(lambda m: replace(m, clip=1e6 * m.clip, noise_multiplier=1e-9)),
        ("noise", "charging"),
    ),
    "density depends on records": Bug(metric("density", _loud_records), ("releases",)),
    "count of records depends on records": Bug(outcome_with(_examples_that_count), ("releases",)),
    "count of records is that of a batch": Bug(outcome_with(_examples_of_a_batch), ("releases",)),
    "extra tensor without noise": Bug(outcome_with(_mean_record), ("releases",)),
    "scores of training records": Bug(
        lambda m: m.setattr(updates, "score", _scores_of_training_records), ("releases",)
    ),
    "one more step without noise": Bug(
        lambda m: m.setattr(updates, "run_passes", _plain_gradient_at_the_end),
        ("sensitivity", "releases"),
    ),
    "error feedback keeps other numbers than it left out": Bug(
        lambda m: m.setattr(updates, "pack", _residual_without_noise),
        ("releases",),
        settings=("upload.compress=topk",),
    ),
}


def _uniform_like(out: Tensor) -> Tensor:
    """Uniform numbers with the deviation of these."""
    deviation = float(out.std()) if out.numel() > 1 else float(out.abs().mean())
    return (torch.rand_like(out) - 0.5) * (math.sqrt(12) * deviation)
