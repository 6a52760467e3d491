"""Charging: the ledger of a whole run has every noisy step that was drawn, and none was missed.

All records of the rehearsal count as zero, so that the energy of the noise in an upload, or in the
network after a probe, counts the steps that were drawn for it.  The expected energy is that of the
steps, the noise multiplier and the sample rate that the ledger on disk had for the task before it
began.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedp3.client.context import ClientContext
from fedp3.client.update import local_update
from fedp3.core import masks as M
from fedp3.core.types import ClientUpdate, Params, Task
from fedp3.data.shards import Shard
from fedp3.messages.compression import UNCOMPRESSED
from fedp3.privacy.audit.bounds import composed_lower
from fedp3.privacy.audit.findings import (
    Finding,
    at_most,
    energy_tail,
    equal,
    improbable,
    least_probable,
)
from fedp3.privacy.audit.neighbours import Watch, readable, unpruned_steps
from fedp3.privacy.audit.rehearsal import (
    RECORDS,
    Exchange,
    Rehearsal,
    Rehearse,
    scene,
    unlimited,
    without_gradient,
)
from fedp3.privacy.ledger import Charge
from fedp3.privacy.settings import Budget, Mechanism

PART = "charging"
ROUNDS = 2
STEP = 1e-2  # how far one step's noise moves a weight: weights of deep networks must stay finite
MOST_COORDINATES = 1 << 16  # of one task whose energy is summed


def charging(
    context: ClientContext,
    clients: Sequence[int],
    budget: Budget,
    steps: int,
    rehearse: Rehearse,
    seed: int,
) -> list[Finding]:
    """Compare a run's ledger with the noise that left its clients, and with its budget."""
    noise = budget.mechanism.noise_multiplier or 1.0
    mechanism = replace(budget.mechanism, noise_multiplier=noise)
    lr = STEP * mechanism.sample_rate * RECORDS / (noise * mechanism.clip)
    plain = unpruned_steps(context)
    plain = replace(
        plain,
        local=readable(context.local, lr, steps),
        spec=replace(plain.spec, compression=UNCOMPRESSED),
    )
    stage = scene(
        plain,
        clients,
        unlimited(budget, mechanism, steps),
        ROUNDS,
        without_gradient,
        seed,
    )
    watch, energies = Watch(), list[Energy]()

    def observe(e: Exchange) -> None:
        """Measure a task while its network is still there."""
        ends, watch.ends[:] = list(watch.ends), []
        if e.task.kind != "evaluate" and ends:
            energies.append(_energy(e, ends[-1], stage.context, lr * mechanism.clip / RECORDS))

    run = rehearse(replace(stage, context=watch.on(stage.context), observe=observe))
    if run.failures:
        failure = run.failures[0]
        raise RuntimeError(f"the task of client {failure.client} failed: {failure.reason}")
    findings = [_whole(run, len(clients), steps), *_settings(run.charges, mechanism)]
    findings += _compare(energies)
    findings += _reported(run, mechanism, budget.delta)
    if len(run.charges):
        # A client that can pay for two tasks gets two, though the run has three.
        scarce = replace(stage.budget, allowed_steps=ROUNDS * steps)
        findings += _limits(rehearse(replace(stage, budget=scarce)))
    return findings


def _whole(run: Rehearsal, clients: int, steps: int) -> Finding:
    charged = sum(c.steps for c in run.charges)
    expected = clients * (ROUNDS + 1) * steps
    what = f"steps charged for {ROUNDS} rounds and the final probe of {clients} clients"
    return equal(PART, what, charged, expected)


def _settings(charges: Sequence[Charge], mechanism: Mechanism) -> list[Finding]:
    wrong = [
        c
        for c in charges
        if (c.noise_multiplier, c.sample_rate)
        != (mechanism.noise_multiplier, mechanism.sample_rate)
    ]
    return [equal(PART, "charges with other noise or sample rate than the run's", len(wrong), 0)]


@dataclass(frozen=True, slots=True)
class Energy:
    """The noise behind one task, in units of the noise of the steps that it was charged for."""

    kind: str
    squares: float
    count: int


def _energy(e: Exchange, end: Params, context: ClientContext, step: float) -> Energy:
    """Measure the noise of one task against the charges that were on disk when it began.

    Args:
        e: the task and its reply.
        end: the weights of the client's network after the task.
        context: the clients' context.
        step: how far noise of multiplier 1 at sample rate 1 moves a weight in one step.
    """
    assert isinstance(e.reply, ClientUpdate)
    trains = e.task.kind == "train"
    change = _upload(e.task, e.reply, context) if trains else _moved(e, end, context)
    variance = sum(c.steps * (step * c.noise_multiplier / c.sample_rate) ** 2 for c in e.charges)
    squares = float(change.square().sum())
    kind = "training tasks" if trains else "probes"
    return Energy(kind, squares / variance if variance else math.inf, len(change))


def _compare(energies: Sequence[Energy]) -> list[Finding]:
    findings = []
    for kind in ("training tasks", "probes"):
        what = f"noisy steps seen in {kind}, per step charged before they began, worst case"
        alike = [
            improbable(PART, what, e.squares / max(1, e.count), energy_tail(e.squares, e.count))
            for e in energies
            if e.kind == kind
        ]
        missing = Finding(part=PART, what=what, measured=math.nan, note="no such task was seen")
        findings += least_probable(alike) or [missing]
    return findings


def _upload(task: Task, update: ClientUpdate, context: ClientContext) -> Tensor:
    """How far an upload moved the coordinates that train."""
    layers = context.layers
    parts = []
    for l in task.plan.uploaded:
        if not task.plan.layers[l].train:
            continue
        for n in set(layers.layers[l]) - layers.buffers:
            mask = M.as_bool(M.active(n, task.masks, layers), layers.shapes[n])
            parts.append((update.tensors[n].cpu() - task.weights[n])[mask])
    return _some(parts)


def _moved(e: Exchange, end: Params, context: ClientContext) -> Tensor:
    """How far a probe moved the coordinates that train, from the network that it left."""
    watch = Watch()
    evaluate = replace(e.task, kind="evaluate", evaluate=False)
    nobody = Shard(torch.arange(0), torch.arange(0))
    local_update(watch.on(context), nobody, evaluate, e.state)
    start, layers = watch.ends[0], context.layers
    parts = []
    for l, p in e.task.plan.layers.items():
        if not p.train:
            continue
        for n in set(layers.layers[l]) - layers.buffers:
            change = end[n] - start[n]
            if change.shape == layers.shapes[n]:
                change = change[M.as_bool(M.active(n, e.task.masks, layers), layers.shapes[n])]
            parts.append(change.flatten())
    return _some(parts)


def _some(parts: Sequence[Tensor]) -> Tensor:
    """Coordinates of all tensors; of large ones, some."""
    most = max(1, MOST_COORDINATES // max(1, len(parts)))
    return (
        torch.cat([w[:: max(1, len(w) // most)].double() for w in parts])
        if parts
        else torch.zeros(0)
    )


def _reported(run: Rehearsal, mechanism: Mechanism, delta: float) -> list[Finding]:
    """The epsilon of the result, against a lower bound for the tasks that really trained."""
    tasks = Counter(e.task.plan.client for e in run.exchanges if e.task.kind != "evaluate")
    steps = max((c.steps for c in run.charges), default=0)
    client, count = max(tasks.items(), key=lambda item: item[1])
    reported = run.epsilons.get(client, 0.0)
    least = composed_lower(mechanism.noise_multiplier, mechanism.sample_rate, count * steps, delta)
    return [
        Finding(
            part=PART,
            what=f"epsilon that the result reports for {count} tasks of {steps} steps; at least",
            measured=math.inf if reported is None else reported,
            low=least * (1 - 1e-6) if steps else math.inf,
            refutable=least,
        )
    ]


def _limits(run: Rehearsal) -> list[Finding]:
    tasks = Counter(e.task.plan.client for e in run.exchanges if e.task.kind != "evaluate")
    most = max(tasks.values(), default=0)
    return [at_most(PART, f"tasks of a client whose budget pays for {ROUNDS}", most, ROUNDS)]
