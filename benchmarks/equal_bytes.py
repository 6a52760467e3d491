"""Accuracy at equal bytes: methods with the same codes in both directions, on one fleet.

    python -m benchmarks.equal_bytes --data DIR [--scene NAME] [--rows NAME,...] [--seeds 5]
    python -m benchmarks.equal_bytes --table [--scene NAME]

Each finished run is one line of benchmarks/results/equal-bytes.jsonl: its settings, and its curve
of G against bytes, rounds, GFLOP and seconds of the fleet.  What is there is not trained again, so
that the command can be stopped and started, and several processes can share the work.  The
learning rate of a row is chosen on validation samples at the row's own number of rounds (seed 0),
from a grid that grows until its best value lies inside.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks.records import find, once
from fedp3 import config
from fedp3.core.types import ClientPlan, ClientUpdate, Execute, LayerPlan, Reply, Task
from fedp3.costs import device_time
from fedp3.costs.traffic import traffic
from fedp3.engines.in_process import sequential
from fedp3.experiment.assemble import Experiment, assemble
from fedp3.planning.dispatch import dispatched_tasks
from fedp3.runs.tuning import shortened, validate
from fedp3.server.evaluation import scores
from fedp3.server.publication import sent_weights
from fedp3.server.rounds import run

NAME = "equal-bytes"
COMMON = (
    "model.name=cnn",
    "model.width=0.25",
    "partition.clients=20",
    "partition.sizes=700",
    "prune.keep={'0.125' = 0.2, '0.5' = 0.5, '1.0' = 0.3}",
    "local.steps=10",
    "local.batch=48",
    "local.clip_norm=1.0",
    "run.clients_per_round=0",
    "run.eval_every=2",
)
SCENES: Mapping[str, Sequence[str]] = {
    "fashion-classes": ("data.name=fashion-mnist", "partition.kind=classes", "partition.classes=5"),
    "cifar10-classes": ("data.name=cifar10", "partition.kind=classes", "partition.classes=5"),
    "fashion-dirichlet": (
        *("data.name=fashion-mnist", "partition.kind=dirichlet", "partition.alpha=0.5"),
    ),
    "cifar10-dirichlet": (
        *("data.name=cifar10", "partition.kind=dirichlet", "partition.alpha=0.5"),
    ),
}
# Learning rates of the Dirichlet scenes are those of the same data split by classes.
TUNED_ON = {"fashion-dirichlet": "fashion-classes", "cifar10-dirichlet": "cifar10-classes"}
TERNARY = (
    *("upload.compress=ternary", "upload.entropy=true"),
    *("download.compress=ternary", "download.entropy=true"),
)
FEW_STEPS = ("plan.weak_below=0.2", "plan.weak_steps=4")  # of 10, on the weakest fifth
PACED = ("method=fedp3-paced", "plan.others=hold", "run.rounds=180")
# name -> settings; rounds are enough for 5 % of the bytes of FedAvg in 32 bits over 40 rounds
ROWS: Mapping[str, Sequence[str]] = {
    "fedavg": ("method=fedavg", "run.rounds=40"),
    "fedavg-ternary": ("method=fedavg", *TERNARY, "run.rounds=55"),
    "paced": (*PACED, *TERNARY),
    "fiarse-ternary": ("method=fiarse-threshold", *TERNARY, "run.rounds=80"),
    "heterofl-ternary": ("method=heterofl", *TERNARY, "run.rounds=110"),
    "fedpart-ternary": ("method=fedpart", "plan.others=hold", *TERNARY, "run.rounds=100"),
    "fedluar-ternary": ("method=fedluar", *TERNARY, "run.rounds=70"),
    "cocofl-ternary": ("method=cocofl", "plan.others=hold", *TERNARY, "run.rounds=70"),
    "fedlp-ternary": ("method=fedlp", *TERNARY, "run.rounds=70"),
    "fedavg-ternary-few": ("method=fedavg", *TERNARY, *FEW_STEPS, "run.rounds=55"),
    "paced-few": (*PACED, *TERNARY, *FEW_STEPS),
    "paced-fits": ("method=fedp3-paced", *TERNARY, "run.rounds=180"),
    "fedp3-opu2-ternary": ("method=fedp3-opu2", *TERNARY, "run.rounds=70"),
    # one part at a time: codes, copies, schedule, synchrony, tiers
    "paced-float": ("method=fedp3-paced", "plan.others=hold", "run.rounds=40"),
    "paced-dealt": (*PACED, *TERNARY, "plan.dealt=true"),
    "paced-depth": (*PACED, *TERNARY, "plan.weak_below=0.2", "plan.weak_depth=0.6"),
    "fedavg-int4": (
        *("method=fedavg", "upload.compress=int4", "upload.entropy=true"),
        *("download.compress=int4", "download.entropy=true", "run.rounds=40"),
    ),
    "fedavg-ternary-up": (
        *("method=fedavg", "upload.compress=ternary", "upload.entropy=true", "run.rounds=40"),
    ),
}
FIRST_GRID = (0.5, 1.0, 2.0)
TUNING_SEED = 0


def settings_of(scene: str, row: str, seed: int, lr: float) -> config.Config:
    """The config of one run."""
    overrides = [*COMMON, *SCENES[scene], *ROWS[row], f"run.seed={seed}", f"local.lr={lr}"]
    return config.parse({}, overrides)


# --------------------------------------------------------------------------- one run


@dataclass
class Meter:
    """What rounds cost each client, as tasks and replies pass by."""

    experiment: Experiment
    gflop: float = 0.0  # mean over clients
    seconds: float = 0.0  # of the fleet: every round takes as long as its slowest client
    _known: dict[int, tuple[float, int, int]] = field(default_factory=dict)

    def watch(self, execute: Execute) -> Execute:
        """The same engine, with training tasks counted."""

        def watched(tasks: Sequence[Task]) -> Iterator[Reply]:
            replies = list(execute(tasks))
            if tasks and tasks[0].kind == "train":
                self._count(tasks, {r.client: r for r in replies})
            yield from replies

        return watched

    def _count(self, tasks: Sequence[Task], replies: Mapping[int, Reply]) -> None:
        server = self.experiment.server
        slowest, total = 0.0, 0.0
        for task in tasks:
            gflop, down, up = self._of_plan(task.plan)
            reply = replies.get(task.plan.client)
            written = reply.bytes if isinstance(reply, ClientUpdate) else 0
            down = down if task.download is None else task.download.bytes
            capacity = server.keep[task.plan.client]
            takes = device_time.seconds(capacity, gflop, down / 1e6, (written or up) / 1e6)
            slowest, total = max(slowest, takes), total + gflop
        self.seconds += slowest
        self.gflop += total / len(tasks)

    def _of_plan(self, plan: ClientPlan) -> tuple[float, int, int]:
        key = hash((plan.client, tuple(plan.layers.items()), plan.steps))
        if key not in self._known:
            client, spec = self.experiment.client, self.experiment.client.spec
            samples = self.experiment.server.examples[plan.client]
            bytes_of = traffic(plan, spec.layers, spec.pruning, spec.compression, spec.download)
            gflop = device_time.round_gflop(self.experiment.profile, plan, client, samples)
            self._known[key] = gflop, bytes_of.down, bytes_of.up
        return self._known[key]


def train(settings: config.Config, data: Path | None) -> dict[str, Any]:
    """Train one run, and return its curve and its final scores."""
    experiment = assemble(settings, data)
    meter = Meter(experiment)
    execute = meter.watch(sequential(experiment.client, experiment.shards).execute)
    up = down = 0
    curve = []
    for state, record in run(experiment.server, experiment.start, execute):
        final = state
        up, down = up + record.bytes_up, down + record.bytes_down
        if record.G is not None and record.D is not None:
            means = [round(record.G.mean, 5), round(record.D.mean, 5)]
            costs = [up, down, round(meter.gflop, 3), round(meter.seconds, 2)]
            curve.append([record.t + 1, *costs, *means])
            print(f"  round {record.t + 1}: G {100 * record.G.mean:.1f} %", flush=True)
    return {"curve": curve, "P": _probe(experiment, final, execute)}


def _probe(experiment: Experiment, state: Any, execute: Execute) -> float | None:
    """P by one probe for all methods: all layers, dense, all local steps."""
    spec, server = experiment.server.spec, experiment.server
    dense = dict.fromkeys(spec.layers.layers, LayerPlan())
    plans = [ClientPlan(i, dense) for i in range(server.clients)]
    tasks = dispatched_tasks(
        sent_weights(state),
        plans,
        spec.layers,
        spec.pruning,
        state.t,
        spec.seed,
        state.seen,
        probe=True,
        extra=state.extra,
    )
    P = scores(execute(tasks), spec.objective)
    return None if P is None else round(P.mean, 5)


# --------------------------------------------------------------------------- learning rates


def learning_rate(scene: str, row: str, data: Path | None) -> float | None:
    """The best learning rate of a row, inside its grid; None if it is being looked for."""
    scene = TUNED_ON.get(scene, scene)
    grid = list(FIRST_GRID)
    found: dict[float, float] = {}
    while True:
        for lr in grid:
            if lr in found:
                continue
            settings = shortened(settings_of(scene, row, TUNING_SEED, lr))

            def score(settings: config.Config = settings) -> dict[str, Any]:
                return {"G": validate(settings, data, 1, lambda record: None)[0]}

            line = once(NAME, score, kind="validation", scene=scene, row=row, lr=lr)
            if line is None:
                return None
            found[lr] = line["G"]
        best = max(found, key=lambda lr: found[lr])
        if best == min(found):
            grid.append(round(best / 2, 4))
        elif best == max(found):
            grid.append(best * 2)
        else:
            return best


# --------------------------------------------------------------------------- the table


def at_bytes(curve: Sequence[Sequence[float]], budget: float) -> float | None:
    """The mean G of the last four evaluations within this many bytes; None if it is never used up.

    Four evaluations, every second round, are two periods of a paced schedule.
    """
    within = [point for point in curve if point[1] + point[2] <= budget]
    if len(within) == len(curve) and curve[-1][1] + curve[-1][2] < 0.97 * budget:
        return None
    return fmean(point[5] for point in within[-4:]) if len(within) >= 4 else None


def bytes_to(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """The bytes after which the mean of four evaluations first reaches a target."""
    for k in range(3, len(curve)):
        if fmean(point[5] for point in curve[k - 3 : k + 1]) >= target:
            return curve[k][1] + curve[k][2]
    return None


def interval(differences: Sequence[float]) -> str:
    """Mean of paired differences, with a 95 % interval by Student's t."""
    from scipy.stats import t

    n, mean = len(differences), fmean(differences)
    if n < 2:
        return f"{100 * mean:+.1f}"
    half = t.ppf(0.975, n - 1) * stdev(differences) / math.sqrt(n)
    return f"{100 * mean:+.1f} [{100 * (mean - half):+.1f}, {100 * (mean + half):+.1f}]"


def runs_of(scene: str, row: str) -> dict[int, dict[str, Any]]:
    """The longest runs of a row by seed, with its tuned learning rate or the first one tried."""
    tuned = find(NAME, kind="validation", scene=TUNED_ON.get(scene, scene), row=row)
    runs = find(NAME, kind="run", scene=scene, row=row)
    if not runs:
        return {}
    best = max(tuned, key=lambda line: line["G"])["lr"] if len(tuned) >= len(FIRST_GRID) else None
    lr = best if any(run["lr"] == best for run in runs) else runs[0]["lr"]
    longest = max(run["rounds"] for run in runs if run["lr"] == lr)
    return {run["seed"]: run for run in runs if (run["lr"], run["rounds"]) == (lr, longest)}


def table(scene: str) -> Iterator[str]:
    """Lines of a Markdown table."""
    runs = {row: runs_of(scene, row) for row in ROWS}
    base = {seed: sum(r["curve"][-1][1:3]) for seed, r in runs["fedavg"].items()}
    yield (
        "| row | seeds | lr | rounds | G | P | bytes | G at 2.5 % | G at 5 % "
        "| paced, ahead at 2.5 % | at 5 % | GFLOP | fleet s |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    for row, seeds in runs.items():
        common = sorted(seeds.keys() & base.keys())
        if not common:
            continue
        curves = {k: seeds[k]["curve"] for k in common}
        final = fmean(fmean(p[5] for p in c[-4:]) for c in curves.values())
        share = fmean(sum(c[-1][1:3]) / base[k] for k, c in curves.items())
        budgets = [{k: at_bytes(c, s * base[k]) for k, c in curves.items()} for s in (0.025, 0.05)]
        ahead = []
        for s, own in zip((0.025, 0.05), budgets, strict=True):
            paced = {k: at_bytes(r["curve"], s * base[k]) for k, r in runs["paced"].items()}
            pairs = [
                (mine, other)
                for k, other in own.items()
                if other is not None and (mine := paced.get(k)) is not None
            ]
            ahead.append(interval([a - b for a, b in pairs]) if pairs else "-")
        shown = [_share(list(b.values())) for b in budgets]
        last = [c[-1] for c in curves.values()]
        yield (
            f"| {row} | {len(common)} | {seeds[common[0]]['lr']:g} | {last[0][0]} "
            f"| {100 * final:.1f} | {_share([seeds[k]['P'] for k in common])} "
            f"| {100 * share:.1f} % "
            f"| {shown[0]} | {shown[1]} | {ahead[0]} | {ahead[1]} "
            f"| {fmean(p[3] for p in last):.0f} | {fmean(p[4] for p in last):.0f} |"
        )


def _share(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    return f"{100 * fmean(known):.1f}" if known else "-"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what the arguments name, or print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equal_bytes", description=__doc__)
    parser.add_argument("--data", type=Path, default=None, help="the folder of data sets")
    parser.add_argument("--scene", default="fashion-classes", help=", ".join(SCENES))
    parser.add_argument("--rows", default=",".join(ROWS), help="rows, separated by commas")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lr", type=float, help="a learning rate that is not tuned, for a look")
    parser.add_argument("--table", action="store_true", help="print a table, train nothing")
    options = parser.parse_args(arguments)
    if options.table:
        print("\n".join(table(options.scene)))
        return
    rows = options.rows.split(",")
    unknown = [name for name in rows if name not in ROWS]
    if unknown or options.scene not in SCENES:
        sys.exit(f"unknown {', '.join(unknown) or options.scene}; there are {', '.join(ROWS)}")
    torch.set_num_threads(1)
    for seed in range(options.seeds):
        for row in rows:
            lr = options.lr or learning_rate(options.scene, row, options.data)
            if lr is None:
                continue

            def result(row: str = row, seed: int = seed, lr: float = lr) -> dict[str, Any]:
                settings = settings_of(options.scene, row, seed, lr)
                return {"config": settings.digest(), **train(settings, options.data)}

            rounds = settings_of(options.scene, row, seed, lr).run.rounds
            key = {"scene": options.scene, "row": row, "seed": seed, "lr": lr, "rounds": rounds}
            once(NAME, result, kind="run", **key)


if __name__ == "__main__":
    main()
