"""Runs cells one after another, each in a run folder of its own, and keeps the summaries.

Asked again, it reads what is finished, goes on with what is half done, and starts the rest.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedp3 import data, record
from fedp3.config import Config
from fedp3.errors import BusyError, InputError, RunError
from fedp3.locks import locked
from fedp3.lookup import pick
from fedp3.reproduce import summary
from fedp3.reproduce.cells import BENCHES, LR, PROTOCOLS, Bench, Cell, config_of
from fedp3.reproduce.released import score_heads
from fedp3.reproduce.targets import TARGETS, Target, queue

Train = Callable[[Config, Path, str], None]  # starts or resumes one run: config, folder, name to show
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """Which runs are wanted, and where they lie."""

    targets: Sequence[Target]
    results: Path
    runs: Path
    protocol: str = "desk"
    rounds: int = 0  # 0: the protocol's
    seeds: int = 0  # 0: as many as each cell asks for
    scans: bool = True  # also the runs that tell readings apart
    benches: Sequence[str] = ()  # empty: all
    names: Sequence[str] = ()  # patterns of cells; empty: all
    overrides: Sequence[str] = ()
    data_dir: Path | None = None
    rates: Mapping[str, float] = field(default_factory=lambda: LR)  # bench -> learning rate


@dataclass(frozen=True, slots=True)
class Job:
    """One run to do."""

    cell: Cell
    seed: int
    config: Config


def targets_named(name: str) -> list[Target]:
    """One target, or every one that trains."""
    return list(TARGETS.values()) if name == "all" else [pick(TARGETS, name, "target")]


def plan(request: Request) -> tuple[list[Job], int]:
    """The jobs that are not finished, in running order, and the number of those that are; all mistakes show here."""
    pick(PROTOCOLS, request.protocol, "protocol")
    for name in request.benches:
        pick(BENCHES, name, "bench")
    wanted = queue(request.targets, request.protocol, request.benches, request.seeds, request.scans, request.names)
    if not wanted:
        named = f" named {', '.join(request.names)} (as in 'fashion-mlp/*/lowerb*')" if request.names else ""
        raise InputError(f"nothing to run of this target on {', '.join(request.benches) or 'any bench'}{named}")
    jobs = [
        Job(cell, seed, config_of(cell, request.protocol, seed, request.rounds, _overrides(request, cell.bench)))
        for cell, seed in wanted
    ]
    todo = [job for job in jobs if not _finished(request, job)]
    for name in {job.config.data.name for job in todo}:
        data.load(name, request.data_dir)  # every data set is here before the first run begins
    return todo, len(jobs) - len(todo)


def _overrides(request: Request, bench: Bench) -> list[str]:
    """The bench's learning rate, where the protocol leaves it open, and what the user says."""
    open_ = "local.lr" not in {**PROTOCOLS[request.protocol].settings, **bench.settings}
    if not open_ or any(text.startswith("local.lr=") for text in request.overrides):
        return list(request.overrides)
    if bench.rate not in request.rates:
        raise InputError(
            f"no learning rate was chosen for {bench.rate} yet: choose it with "
            f"`fedp3 reproduce lr --bench {bench.rate}`, or give one as in local.lr=0.1"
        )
    return [f"local.lr={request.rates[bench.rate]}", *request.overrides]


def run_cells(request: Request, todo: Sequence[Job], train: Train, say: Say) -> list[str]:
    """Do these jobs; each leaves a summary.  Processes that share their folders share the work.

    Returns the runs that could not go on, with the reason; the others are done all the same.
    """
    clock = Clock([job.cell.bench.name for job in todo])
    failed = []
    for job in todo:
        name = f"{job.cell.name} seed {job.seed}"
        try:
            done = _claimed(request, job, train, f"[{clock.text()}] {name}")
            said = (
                f"{name}: G {done.score('G'):.2f} % in {done.seconds:.0f} s" if done else f"{name}: another process's"
            )
        except RunError as error:
            done, said = None, f"{name}: {error}"
            failed.append(said)
        clock.done(job.cell.bench.name) if done else clock.skip()
        say(said)
    return failed


def _claimed(request: Request, job: Job, train: Train, name: str) -> summary.Summary | None:
    """One run, unless another process is at it or has done it since the list was made."""
    folder = request.runs / request.protocol / job.cell.name / f"seed-{job.seed}"
    try:
        with locked(folder, ".claim"):
            return None if _finished(request, job) else _run(request, job, folder, train, name)
    except BusyError:
        return None


def _run(request: Request, job: Job, folder: Path, train: Train, name: str) -> summary.Summary:
    """Begin one run, or go on with it, and write its summary."""
    if (folder / "run.json").exists():
        _same(record.read_json(folder / "run.json")["config"], job.config, folder)
    train(job.config, folder, name)
    done = summary.summarise(folder, job.cell, request.protocol, job.seed)
    if PROTOCOLS[request.protocol].head_round:
        done = replace(done, final={**done.final, "H": score_heads(folder, request.data_dir)})
    summary.write(request.results, done)
    return done


def _finished(request: Request, job: Job) -> bool:
    path = summary.path_of(request.results, job.cell.name, request.protocol, job.seed)
    if not path.exists():
        return False
    _same(summary.read(path).config, job.config, path)
    return True


def _same(recorded: Mapping[str, object], config: Config, where: Path) -> None:
    wrong = summary.differences(recorded, config)
    if wrong:
        raise InputError(f"{where} was made with other settings: {'; '.join(wrong)}; choose another place with --out")


class Clock:
    """Runs done and to do, and the time left by what runs of the same bench took."""

    def __init__(self, benches: Sequence[str]) -> None:
        self.benches, self.count = list(benches), 0
        self.began = time.monotonic()
        self.took: dict[str, list[float]] = {}

    def done(self, bench: str) -> None:
        """A run on this bench has ended."""
        now = time.monotonic()
        self.took.setdefault(bench, []).append(now - self.began)
        self.began, self.count = now, self.count + 1

    def skip(self) -> None:
        """A run was left out."""
        self.count += 1

    def text(self) -> str:
        """As in 3/40, 12 min left."""
        mean = {b: sum(s) / len(s) for b, s in self.took.items()}
        usual = sum(mean.values()) / len(mean) if mean else 0.0
        left = sum(mean.get(b, usual) for b in self.benches[self.count :]) / 60
        return f"{self.count + 1}/{len(self.benches)}" + (f", {left:.0f} min left" if mean else "")
