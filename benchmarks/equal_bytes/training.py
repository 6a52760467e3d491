"""One run of the comparison: its curves of G and P against bytes, rounds, GFLOP and fleet seconds.

A point of a curve is [rounds, bytes up, bytes down, GFLOP of a client, seconds of the fleet,
score].  G, of the server's weights, is measured after every second round; P four times, after K
steps on all layers that are then discarded, so that it means the same for every method.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.equal_bytes.rows import BASE_ROUNDS
from fedp3 import config
from fedp3.core.errors import RunError
from fedp3.core.types import ClientPlan, ClientUpdate, Execute, LayerPlan, Reply, Task
from fedp3.costs import device_time
from fedp3.costs.traffic import traffic
from fedp3.engines.in_process import sequential
from fedp3.experiment.assemble import assemble
from fedp3.experiment.experiment import Experiment
from fedp3.planning.dispatch import global_tasks
from fedp3.runs.tuning import validation_split
from fedp3.server.context import ServerState
from fedp3.server.evaluation import scores
from fedp3.server.rounds import run
from fedp3.server.scoring import dispatched

EVERY = 2  # rounds between two measurements of G
PROBES = 4  # measurements of P
VALIDATED = 10  # of the last measurements of G, at most half of them, choose a learning rate

Point = list[float]


@dataclass
class Meter:
    """What rounds cost each client, as tasks and replies pass by."""

    experiment: Experiment
    gflop: float = 0.0  # mean over clients
    seconds: float = 0.0  # of the fleet: every round takes as long as its slowest client
    _known: dict[int, tuple[float, int, int]] = field(default_factory=dict)

    def watch(self, execute: Execute) -> Execute:
        """The same engine, with training tasks counted, and not scored."""

        def watched(tasks: Sequence[Task]) -> Iterator[Reply]:
            training = bool(tasks) and tasks[0].kind == "train"
            if training:
                tasks = [replace(task, evaluate=False) for task in tasks]
            replies = list(execute(tasks))
            if training:
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


def base_bytes(experiment: Experiment) -> int:
    """What FedAvg in 32 bits sends in 40 rounds, up and down: 100 % of the bytes."""
    values = sum(map(math.prod, experiment.server.layers.shapes.values()))
    return 2 * 4 * values * experiment.server.participants * BASE_ROUNDS


def curves(experiment: Experiment, share: float | None, *, probes: int = PROBES) -> dict[str, Any]:
    """Train until the rounds are over or this share of the bytes is used up.

    Args:
        experiment: what is trained.
        share: of the bytes of FedAvg in 32 bits; None trains all rounds.
        probes: how often P is measured.
    """
    meter = Meter(experiment)
    execute = meter.watch(sequential(experiment.client, experiment.shards).execute)
    budget = math.inf if share is None else share * base_bytes(experiment)
    up = down = probed = 0
    G: list[Point] = []
    P: list[Point] = []
    for state, record in run(experiment.server, experiment.start, execute):
        up, down = up + record.bytes_up, down + record.bytes_down
        rounds = record.t + 1
        spent = [rounds, up, down, round(meter.gflop, 3), round(meter.seconds, 2)]
        over = up + down >= budget or rounds == experiment.server.run.rounds
        used = rounds / experiment.server.run.rounds if share is None else (up + down) / budget
        if rounds % EVERY == 0 or over:
            G.append([*spent, _score(experiment, _global(experiment, state), execute)])
            print(f"  round {rounds}: G {100 * G[-1][-1]:.1f} %", flush=True)
        if probes and (used * probes >= probed + 1 or over):
            probed = int(used * probes)
            P.append([*spent, _score(experiment, _probes(experiment, state), execute)])
        if over:
            break
    return {"curve": G, "P": P}


def _global(experiment: Experiment, state: ServerState) -> list[Task]:
    """Tasks that score the server's weights on every client's test samples."""
    layers = experiment.server.layers.layers
    plans = [ClientPlan(i, dict.fromkeys(layers, LayerPlan())) for i in experiment.shards]
    return global_tasks(state.W, plans, state.t, state.seen)


def _probes(experiment: Experiment, state: ServerState) -> list[Task]:
    """Tasks that measure P the same way for all methods: all layers, dense, all local steps."""
    dense = dict.fromkeys(experiment.server.layers.layers, LayerPlan())
    plans = [ClientPlan(i, dense) for i in experiment.shards]
    return dispatched(experiment.server, state, plans, probe=True)


def _score(experiment: Experiment, tasks: Sequence[Task], execute: Execute) -> float:
    measured = scores(execute(tasks), experiment.server.spec.objective)
    return math.nan if measured is None else round(measured.mean, 5)


def train(settings: config.Config, data: Path | None, share: float | None) -> dict[str, Any]:
    """The line of one run."""
    experiment = assemble(settings, data)
    return {
        "config": settings.digest(),
        "base": base_bytes(experiment),
        **curves(experiment, share),
    }


def validated(settings: config.Config, data: Path | None, share: float | None) -> float:
    """The mean of a run's last G on validation samples; 0 if it diverges."""
    experiment = validation_split(assemble(settings, data))
    try:
        G = [point[-1] for point in curves(experiment, share, probes=0)["curve"]]
    except RunError:
        return 0.0
    return fmean(G[-min(VALIDATED, math.ceil(len(G) / 2)) :])
