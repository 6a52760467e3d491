"""Releases: nothing that leaves a client depends on its records but through clipped sums.

Two rehearsals differ in the training records, in their labels, and in the sample rate.  The clip is
so small that neither noise nor gradients can be seen, under the run's own compression, momentum
and local pruning.  Then everything that leaves must be equal in both: tensors, buffers, extra
tensors, metrics, scores, counts.  Whatever differs got past the clip.

What leaves must also be what the steps returned: over two rounds, uploads plus what compression
left out add up to the noised gradients, and nothing else enters.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedp3.client.context import ClientContext
from fedp3.client.update import local_update
from fedp3.core.types import ClientState, ClientUpdate, Params, Task
from fedp3.data.shards import Shard
from fedp3.messages.compression import RESIDUAL, scales_of, unpack
from fedp3.messages.compressors import COMPRESSORS, Compressor
from fedp3.privacy.audit.findings import Finding, at_most, equal
from fedp3.privacy.audit.neighbours import Bench, Recorder, readable, unpruned_steps
from fedp3.privacy.audit.rehearsal import RECORDS, Exchange, Rehearse, scene, unlimited
from fedp3.privacy.mechanism import PrivateSteps
from fedp3.privacy.settings import Budget, Mechanism

PART = "releases"
ROUNDS = 2
# A clip under which the sums of all steps change a weight by less than its rounding.
INVISIBLE = 1e-12
TOLERANCE = 1e-6
ALWAYS = frozenset({"density"})  # metrics of every training task
SCORES = frozenset({"correct", "tested", "test_loss"})  # of tasks that score test records


def releases(
    context: ClientContext,
    clients: Sequence[int],
    budget: Budget,
    steps: int,
    rehearse: Rehearse,
    seed: int,
) -> list[Finding]:
    """Compare everything that leaves in two runs on different records."""
    noise = budget.mechanism.noise_multiplier or 1.0
    context = replace(context, local=replace(context.local, steps=steps, epochs=0))

    def exchanges(rate: float, canary: bool) -> Sequence[Exchange]:
        mechanism = replace(
            budget.mechanism, clip=INVISIBLE, noise_multiplier=noise, sample_rate=rate
        )
        stage = scene(
            context,
            clients,
            unlimited(budget, mechanism, steps),
            ROUNDS,
            _loud if canary else _quiet,
            seed,
            label_shift=int(canary),
        )
        run = rehearse(stage)
        if run.failures:
            failure = run.failures[0]
            raise RuntimeError(f"the task of client {failure.client} failed: {failure.reason}")
        return run.exchanges

    first, second = exchanges(1.0, True), exchanges(0.5, False)
    return compare(first, second, context)


def _quiet(x: Tensor) -> Tensor:
    return x


def _loud(x: Tensor) -> Tensor:
    """Other records, one of which has a huge gradient."""
    other = -2 * x.flip(0)
    other[-1] = 1e3
    return other


def compare(
    first: Sequence[Exchange], second: Sequence[Exchange], context: ClientContext
) -> list[Finding]:
    """Every field of every reply of two runs."""
    findings = [equal(PART, "replies of two runs on different records", len(first), len(second))]
    differences: dict[str, float] = {"count of records": 0.0}
    unknown: set[str] = set()
    for a, b in zip(first, second, strict=False):
        x, y, task = a.reply, b.reply, a.task
        assert isinstance(x, ClientUpdate)
        assert isinstance(y, ClientUpdate)
        allowed = SCORES if task.evaluate else frozenset()
        allowed = allowed | (ALWAYS if task.kind != "evaluate" else frozenset())
        scales = scales_of(task.plan, context.layers, context.spec.compression)
        uploads = {n for l in task.plan.uploaded for n in context.layers.layers[l]}
        if task.kind != "train":
            uploads, scales = set(), {}
        unknown |= {f"metric {n!r}" for n in (x.metrics.keys() | y.metrics.keys()) - allowed}
        unknown |= {
            f"extra tensor {n!r}" for n in (x.extra.keys() | y.extra.keys()) - scales.keys()
        }
        unknown |= {f"tensor {n!r}" for n in (x.tensors.keys() | y.tensors.keys()) - uploads}
        for u in (x, y):
            _note(differences, "count of records", abs(u.examples - RECORDS))
        for name in x.metrics.keys() & y.metrics.keys():
            _note(differences, f"metric {name!r}", _relative(x.metrics[name], y.metrics[name]))
        for name in x.extra.keys() & y.extra.keys():
            _note(differences, "extra tensors", _distance(x.extra[name], y.extra[name]))
        for name, (v, w) in _unpacked(a, b, context).items():
            kind = "buffers" if name in context.layers.buffers else "tensors"
            _note(differences, kind, _distance(v, w))
    findings += [
        at_most(PART, f"difference of {name}, which records must not change", value, TOLERANCE)
        for name, value in sorted(differences.items())
    ]
    names = ", ".join(sorted(unknown)[:3])
    text = "things that leave and are not declared" + (f": {names}" if names else "")
    return [*findings, equal(PART, text, len(unknown), 0)]


def _note(differences: dict[str, float], name: str, value: float) -> None:
    """Keep the largest difference; NaN stays."""
    before = differences.get(name, 0.0)
    differences[name] = max(before, value) if value == value and before == before else math.nan


def _relative(a: float, b: float) -> float:
    return 0.0 if a == b else abs(a - b) / max(1.0, abs(a), abs(b))


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def _unpacked(
    a: Exchange, b: Exchange, context: ClientContext
) -> Mapping[str, tuple[Tensor, Tensor]]:
    """The tensors of two uploads as the server reads them."""
    if a.task.kind != "train":
        return {}
    both = [_read(e.task, e.reply, context) for e in (a, b)]  # type: ignore[arg-type]
    return {n: (both[0][n], both[1][n]) for n in both[0].keys() & both[1].keys()}


def _read(task: Task, update: ClientUpdate, context: ClientContext) -> Params:
    spec = context.spec
    return unpack(
        update.tensors,
        update.extra,
        task,
        spec.layers,
        spec.pruning.unfed_columns,
        spec.compression,
    )


# --------------------------------------------------------------------------- nothing else enters


def conservation(bench: Bench, mechanism: Mechanism) -> list[Finding]:
    """Uploads of two rounds, and what compression left out, against the noised gradients.

    Pruned units are masked instead of removed, so that gradients have the shapes of uploads.
    """
    context = unpruned_steps(bench.context)
    pruning = replace(context.pruning, physical=False)
    context = replace(
        context,
        spec=replace(context.spec, pruning=pruning),
        local=readable(context.local, 0.1, 2),
    )
    noise = mechanism.noise_multiplier or 1.0
    recorder = Recorder(PrivateSteps(replace(mechanism, sample_rate=1.0, noise_multiplier=noise)))
    context = replace(context, stacked=False, steps=recorder)
    total: dict[str, Tensor] = {}
    state: ClientState | None = None
    shard = Shard(torch.arange(len(bench.without)), torch.arange(1))
    for t in range(2):
        task = Task(
            t=t,
            plan=bench.plan,
            weights=bench.weights,
            masks=bench.masks,
            state_from=t - 1 if state is not None else -1,
        )
        update, state = local_update(context, shard, task, state)
        for n, w in _read(task, update, context).items():
            change = w.cpu() - bench.weights[n]
            total[n] = total.get(n, torch.zeros_like(change)) + change
    assert state is not None
    active, worst = bench.trained(), 0.0
    for n, change in total.items():
        left_out = state.tensors.get(f"{RESIDUAL}{n}", torch.zeros_like(change))
        steps = [g[n] for g in recorder.gradients if n in g]
        expected = -0.1 * sum(steps, torch.zeros_like(change)) * active.get(n, 0)
        difference = (change + left_out - expected) * active.get(n, 1)
        worst = max(worst, float(difference.abs().max()) / max(float(expected.abs().max()), 1e-3))
        worst = worst if math.isfinite(float(difference.abs().max())) else math.nan
    limit = _rounding(COMPRESSORS.pick(context.spec.compression.compress))
    what = "what uploads hold beyond the noised gradients, relative to these"
    return [at_most(PART, what, worst, limit)]


def _rounding(compressor: Compressor | None) -> float:
    """How far the sum of two uploads may be off: a code that forgets what it loses rounds twice."""
    if compressor is None or compressor.feedback:
        return 1e-4
    steps = 0.0 if compressor.packing is None else 2.1 / compressor.packing.most
    return max(0.05, steps)
