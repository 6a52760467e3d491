"""Runs cells one after another, each in its run folder, and records their summaries.

Called again, it skips finished cells, resumes interrupted ones, and starts the others.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedp3 import data
from fedp3.config import Config
from fedp3.core import files
from fedp3.core.errors import BusyError, InputError, RunError
from fedp3.core.files import locked
from fedp3.core.registry import pick
from fedp3_paper.reproduce import summary
from fedp3_paper.reproduce.cells import BENCHES, LR, PROTOCOLS, Bench, Cell, config_of
from fedp3_paper.reproduce.released import score_heads
from fedp3_paper.reproduce.targets import TARGETS, Target, queue

Train = Callable[[Config, Path, str], None]  # (config, folder, name to show): starts or resumes
Note = Callable[[str], None]  # shows a line of progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The runs that are wanted, and their folders.

    Args:
        targets: the targets whose cells are wanted.
        results: the folder of summaries.
        runs: the folder of run folders.
        protocol: the name of the protocol.
        rounds: the length of every run; 0: as the protocol has it.
        seeds: the number of seeds per cell; 0: as the protocol or the cell has it.
        scans: whether runs that only compare readings of the paper are wanted.
        benches: the benches that are wanted; empty: all.
        names: patterns of cells; empty: all.
        overrides: settings for all runs, as on the command line.
        data_dir: the folder of data sets.
        rates: bench -> learning rate.
    """

    targets: Sequence[Target]
    results: Path
    runs: Path
    protocol: str = "desk"
    rounds: int = 0
    seeds: int = 0
    scans: bool = True
    benches: Sequence[str] = ()
    names: Sequence[str] = ()
    overrides: Sequence[str] = ()
    data_dir: Path | None = None
    rates: Mapping[str, float] = field(default_factory=lambda: LR)


@dataclass(frozen=True, slots=True)
class Job:
    """One run to do."""

    cell: Cell
    seed: int
    config: Config


def targets_named(name: str) -> list[Target]:
    """One target, or every one that trains."""
    return list(TARGETS.values()) if name == "all" else [pick(TARGETS, name, "target")]


def selected(request: Request) -> list[tuple[Cell, int]]:
    """The cells and seeds that are wanted, in running order."""
    pick(PROTOCOLS, request.protocol, "protocol")
    for name in request.benches:
        pick(BENCHES, name, "bench")
    wanted = queue(
        request.targets,
        request.protocol,
        request.benches,
        request.seeds,
        request.scans,
        request.names,
    )
    if not wanted:
        benches = ", ".join(request.benches) or "any bench"
        named = ""
        if request.names:
            named = f" named {', '.join(request.names)} (as in 'fashion-mlp/*/lowerb*')"
        raise InputError(f"this target has nothing to run on {benches}{named}")
    return wanted


def plan(request: Request) -> tuple[list[Job], int]:
    """The unfinished jobs in running order, and the number of finished ones.

    All mistakes in a request show here, before the first run begins.
    """
    jobs = []
    for cell, seed in selected(request):
        overrides = _overrides(request, cell.bench)
        config = config_of(cell, request.protocol, seed, request.rounds, overrides)
        jobs.append(Job(cell, seed, config))
    summaries = summary.read_all(request.results, request.protocol)
    todo = [job for job in jobs if not _finished(summaries, job)]
    for name in {job.config.data.name for job in todo}:
        data.load(name, request.data_dir)  # a data set that is missing is an error now
    return todo, len(jobs) - len(todo)


def _overrides(request: Request, bench: Bench) -> list[str]:
    """The user's overrides, after the bench's learning rate if nothing else sets it."""
    fixed = {**PROTOCOLS[request.protocol].settings, **bench.settings}
    if "local.lr" in fixed or any(text.startswith("local.lr=") for text in request.overrides):
        return list(request.overrides)
    if bench.rate not in request.rates:
        raise InputError(
            f"no learning rate was chosen for {bench.rate} yet: choose it with "
            f"`fedp3 reproduce lr --bench {bench.rate}`, or give one as in local.lr=0.1"
        )
    return [f"local.lr={request.rates[bench.rate]}", *request.overrides]


def run_cells(request: Request, todo: Sequence[Job], train: Train, note: Note) -> list[str]:
    """Run jobs and record a summary of each.

    Processes with the same folders share the work.  A run that fails does not stop the others.

    Args:
        request: the request that the jobs belong to.
        todo: the jobs.
        train: trains one run in its folder, or resumes it.
        note: shows a line of progress.

    Returns:
        One line for each run that failed, with the reason.
    """
    clock = Clock([job.cell.bench.name for job in todo])
    failures = []
    for job in todo:
        name = f"{job.cell.name} seed {job.seed}"
        result = None
        try:
            result = _run_if_free(request, job, train, f"[{clock.text()}] {name}")
        except RunError as error:
            line = f"{name}: {error}"
            failures.append(line)
        else:
            line = f"{name}: left to another process"
        if result is None:
            clock.skip()
        else:
            clock.done(job.cell.bench.name)
            line = f"{name}: G {result.score('G'):.2f} % in {result.seconds:.0f} s"
        note(line)
    return failures


def _run_if_free(request: Request, job: Job, train: Train, name: str) -> summary.Summary | None:
    """Run a job, unless another process runs it or has finished it since the jobs were listed."""
    folder = request.runs / request.protocol / job.cell.name / f"seed-{job.seed}"
    try:
        with locked(folder, ".claim"):
            summaries = summary.read_all(request.results, request.protocol)
            if _finished(summaries, job):
                return None
            return _run(request, job, folder, train, name)
    except BusyError:
        return None


def _run(request: Request, job: Job, folder: Path, train: Train, name: str) -> summary.Summary:
    """Start or resume one run and record its summary."""
    if (folder / "run.json").exists():
        _check_same(files.read_json(folder / "run.json")["config"], job.config, str(folder))
    train(job.config, folder, name)
    result = summary.summarise(folder, job.cell, request.protocol, job.seed)
    if PROTOCOLS[request.protocol].head_round:
        final = {**result.final, "H": score_heads(folder, request.data_dir)}
        result = replace(result, final=final)
    summary.add(request.results, request.protocol, [result])
    return result


def _finished(summaries: Mapping[str, Mapping[int, summary.Summary]], job: Job) -> bool:
    """Whether a job has a result; one that was made with other settings is refused."""
    result = summaries.get(job.cell.name, {}).get(job.seed)
    if result is None:
        return False
    _check_same(result.config, job.config, f"the result of {job.cell.name}, seed {job.seed},")
    return True


def _check_same(recorded: Mapping[str, object], config: Config, what: str) -> None:
    differences = summary.differences(recorded, config)
    if differences:
        raise InputError(
            f"{what} was made with other settings: {'; '.join(differences)}; "
            "choose another folder with --out"
        )


class Clock:
    """Counts runs and estimates the time left from earlier runs on the same bench."""

    def __init__(self, benches: Sequence[str]) -> None:
        self.benches = list(benches)
        self.count = 0
        self.began = time.monotonic()
        self.took: dict[str, list[float]] = {}

    def done(self, bench: str) -> None:
        """Count a run on this bench that has just ended."""
        now = time.monotonic()
        self.took.setdefault(bench, []).append(now - self.began)
        self.began, self.count = now, self.count + 1

    def skip(self) -> None:
        """Count a run that was left out."""
        self.count += 1

    def text(self) -> str:
        """The progress, as in 3/40, 12 min left."""
        mean = {b: sum(s) / len(s) for b, s in self.took.items()}
        usual = sum(mean.values()) / len(mean) if mean else 0.0
        left = sum(mean.get(b, usual) for b in self.benches[self.count :]) / 60
        return f"{self.count + 1}/{len(self.benches)}" + (f", {left:.0f} min left" if mean else "")
