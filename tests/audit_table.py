"""How often the audit catches each planted bug, and how often it raises a false alarm.

    python tests/audit_table.py                # 20 seeds, 40 configs
    python tests/audit_table.py --seeds 2      # fewer seeds
    python tests/audit_table.py --only bugs    # or: configs

The audit of a bug begins with the parts that the bug is aimed at, and ends with the first part that
fails.  The audits of configs are complete.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest

from fedp3 import config
from fedp3.core.threads import one_thread
from fedp3.experiment.assemble import assemble
from fedp3.experiment.experiment import Experiment
from fedp3.privacy.audit.audit import NAMES, PARTS, audit
from fedp3.runs.rehearsal import audit_subject
from planted_bugs import BUGS, MORE_BUGS, Bug

SEEDS = 20
MISSED = "missed"
BASE = ("privacy.enabled=true", "model.width=0.02", "run.rounds=5")
# Forty configs that are right: networks, plans, pruning, compression, optimisers, mechanisms.
CONFIGS = (
    "",
    "plan.layers=full prune.keep=1.0",
    "plan.layers=opu1",
    "plan.layers=opu3",
    "plan.layers=lowerb",
    "plan.redraw=true",
    "plan.others=noise",
    "plan.others=noise plan.upload=retained",
    "plan.others=noise plan.upload=zeros",
    "plan.head=personal",
    "prune.keep=0.3",
    "prune.selector=neuron",
    "prune.selector=neuron prune.physical=false",
    "prune.selector=ordered",
    "prune.selector=random",
    "prune.local_pruner=uniform",
    "prune.local_pruner=uniform plan.others=noise plan.upload=retained",
    "prune.local_pruner=ordered_dropout prune.selector=ordered",
    "prune.local_pruner=ordered_dropout prune.selector=neuron plan.others=noise",
    "upload.compress=fp16",
    "upload.compress=int8",
    "upload.compress=topk",
    "upload.compress=topk upload.share=0.5 plan.others=noise",
    "local.momentum=0.9",
    "local.momentum=0.9 local.weight_decay=0.1 local.schedule=cosine",
    "local.schedule=linear local.lr=1e-4",
    "local.lr=10",
    "local.batch=4",
    "local.steps=1",
    "local.steps=0 local.epochs=2",
    "privacy.sample_rate=1",
    "privacy.sample_rate=0.01",
    "privacy.sample_rate=0.7 privacy.noise_multiplier=3",
    "privacy.clip=1e-4",
    "privacy.clip=100",
    "privacy.epsilon=inf privacy.noise_multiplier=0",
    "privacy.epsilon=1 privacy.delta=1e-7",
    "privacy.randomness=seeded",
    "model.name=cnn model.width=0.05",
    "model.name=resnet18 model.norm=group model.width=0.05 privacy.clip=100",
)


@cache
def assembled(*settings: str) -> Experiment:
    """The run of a config."""
    return assemble(config.parse({}, [*BASE, *settings]))


def failed_parts(experiment: Experiment, seed: int, parts: tuple[str, ...] = NAMES) -> list[str]:
    """The parts that fail, in order."""
    with one_thread():
        findings = audit(audit_subject(experiment, seed), parts)
    return list(dict.fromkeys(f.part for f in findings if not f.passed))


def planted(bug: Bug, patch: pytest.MonkeyPatch) -> Experiment:
    """A run with this bug."""
    if bug.before:
        bug.plant(patch)
        return assemble(config.parse({}, [*BASE, *bug.settings]))
    experiment = assembled(*bug.settings)
    bug.plant(patch)
    return experiment


def catch(bug: Bug, seeds: int) -> Counter[str]:
    """In how many seeds each part was the first to fail; the parts a bug is aimed at run first."""
    order = sorted(PARTS, key=lambda names: not set(names) & set(bug.parts))
    first: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        experiment = planted(bug, patch)
        for seed in range(seeds):
            failed = (failed_parts(experiment, seed, names) for names in order)
            first.update([next((", ".join(parts) for parts in failed if parts), MISSED)])
    return first


def false_alarms() -> Iterator[tuple[str, list[str], float]]:
    """Each config that is right, the parts that fail, and the seconds of processor time."""
    for number, settings in enumerate(CONFIGS):
        experiment = assembled(*settings.split())
        began = time.process_time()
        yield settings, failed_parts(experiment, number), time.process_time() - began


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", choices=["bugs", "configs"])
    chosen = parser.parse_args()
    if chosen.only != "configs":
        print("| bug | caught | by |\n|---|---|---|")
        for name, bug in {**BUGS, **MORE_BUGS}.items():
            first = catch(bug, chosen.seeds)
            caught = chosen.seeds - first.pop(MISSED, 0)
            by = "; ".join(part for part, _ in first.most_common())
            print(f"| {name} | {caught} of {chosen.seeds} | {by} |", flush=True)
    if chosen.only != "bugs":
        alarms: Counter[bool] = Counter()
        print("\n| config | false alarms | CPU seconds |\n|---|---|---|")
        for settings, parts, seconds in false_alarms():
            alarms[bool(parts)] += 1
            shown = ", ".join(parts) or "none"
            print(f"| {settings or 'as it is'} | {shown} | {seconds:.0f} |", flush=True)
        print(f"\n{alarms[True]} of {alarms.total()} configs with a false alarm")


if __name__ == "__main__":
    sys.exit(main())
