"""Sensitivity: without noise, no record moves the sum of a step by more than C.

The canary, whose gradient is huge, must move it by C exactly.  It is put at the beginning and at
the end of batches that are clipped in one part and in several parts (`local.batch`), since a bug
may treat one part differently from the others.
"""

from collections.abc import Iterable
from dataclasses import replace

from fedp3.privacy.audit.findings import Finding, at_most
from fedp3.privacy.audit.neighbours import Bench, flat
from fedp3.privacy.settings import Mechanism

PART = "sensitivity"
# Attempts to give the canary a large gradient.  In one of ten, a Dropout layer makes its label the
# one that the network expects, under which it has none.
DRAWS = 16
# A canary that moves the weights also moves the other records' gradients in the second step, by
# 0.4 C at most in the small networks of 4000 seeds; layers without noise pass on 2 C and more.
MOST_OVER_TWO_STEPS = 3.0
ROUNDING = 1e-4  # of a sum in 32 bits, relative to C


def sensitivity(bench: Bench, mechanism: Mechanism) -> list[Finding]:
    """A record with a huge gradient moves the sum by exactly C, wherever it is in a batch.

    Of several draws, the first one counts under which the canary reaches C, or else the one that
    comes nearest.  Every second draw has a clip ten times smaller than the one before, since no
    record reaches a large clip in a network that normalises its inputs.
    """
    low = 0.99 if uploads_all_trained(bench) else 0.0
    records = len(bench.with_canary)
    in_parts = bench.with_batch(max(1, records // 4))
    cases = {
        "a batch in one part": bench.with_batch(records),
        "the last of several parts of a batch": in_parts,
        "the first of several parts of a batch": replace(in_parts, shift=1),
    }
    findings = []
    for what, at in cases.items():
        text = f"influence of a canary in {what}, in units of C"
        draws = (
            influence(at, replace(mechanism, clip=mechanism.clip / 10 ** (t // 2)), t=t)
            for t in range(DRAWS)
        )
        largest = _largest(draws, low)
        findings.append(Finding(part=PART, what=text, measured=largest, low=low, high=1 + ROUNDING))
    return findings


def _largest(values: Iterable[float], enough: float) -> float:
    """The largest value up to the first one that is enough; NaN if there is one."""
    largest = 0.0
    for value in values:
        largest = max(largest, value) if value == value else value
        if not largest < enough:
            break
    return largest


def every_record(bench: Bench, mechanism: Mechanism) -> list[Finding]:
    """No record at all moves the sum by more than C: canaries of every size."""
    largest = 0.0
    for scale in (1e-3, 0.1, 1.0, 10.0, 1e6):
        scaled = bench.with_canary.clone()
        scaled[-1] = scale * bench.with_canary[0]
        moved = influence(replace(bench, with_canary=scaled), mechanism)
        largest = max(largest, moved) if moved == moved else moved
    what = "influence of records of other sizes, in units of C"
    return [at_most(PART, what, largest, 1 + ROUNDING)]


def drift(bench: Bench, mechanism: Mechanism) -> list[Finding]:
    """Over two steps, layers that are not uploaded must not pass a record's influence on."""
    moved = influence(bench, mechanism, steps=2)
    what = "influence of a canary over two steps, in units of C"
    return [at_most(PART, what, moved, MOST_OVER_TWO_STEPS)]


def influence(bench: Bench, mechanism: Mechanism, steps: int = 1, t: int = 0) -> float:
    """How far the canary moves an upload without noise, in units of the clip."""
    # Seeded: crops and Dropout of the other records are the same with and without the canary.
    noiseless = replace(mechanism, noise_multiplier=0.0, sample_rate=1.0, randomness="seeded")
    lr = 0.0 if steps == 1 else 1.0 / mechanism.clip
    with_canary, without = (
        flat(replace(bench, serial=[t]).update(noiseless, canary, steps, lr=lr))
        for canary in (True, False)
    )
    return float((with_canary - without).norm()) / mechanism.clip


def uploads_all_trained(bench: Bench) -> bool:
    """Whether all trained layers are uploaded; else part of a record's gradient stays hidden."""
    return all(p.upload != "none" for p in bench.plan.layers.values() if p.train)
