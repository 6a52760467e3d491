"""The paper's tables and figures, beside ours."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedp3.cli import show
from fedp3.cli.plan import AsJson, DataDir, Overrides
from fedp3.cli.runs import Workers, go_on, start
from fedp3.errors import InputError, RunError
from fedp3.lookup import pick, suggestion

if TYPE_CHECKING:
    from fedp3.config import Config
    from fedp3.reproduce.summary import Summary
    from fedp3.reproduce.tables import Table


@dataclass(frozen=True, slots=True)
class Asked:
    """What was typed."""

    name: str
    overrides: Sequence[str]
    protocol: str
    rounds: int
    seeds: int
    scans: bool
    benches: Sequence[str]
    names: Sequence[str]
    data_dir: Path | None
    out: Path
    runs: Path
    source: Path | None
    workers: int
    json: bool

    @property
    def experiments(self) -> Path:
        """Cells and results."""
        return self.out / "experiments"

    @property
    def results(self) -> Path:
        """Summaries."""
        return self.experiments / "results"

    @property
    def rates(self) -> Path:
        """Learning rates that were tried."""
        return self.experiments / "lr.json"

    @property
    def docs(self) -> Path:
        """Pages and figures; the desk's are the ones that are shipped."""
        pages = self.out / "docs" / "reproduce"
        return pages if self.protocol == "desk" else pages / self.protocol


def reproduce(
    name: Annotated[str, typer.Argument(help="What to reproduce; without it, a list", show_default=False)] = "",
    overrides: Overrides = None,
    protocol: Annotated[str, typer.Option("--protocol", help="desk, paper, released or released-desk")] = "desk",
    rounds: Annotated[int, typer.Option("--rounds", min=0, help="Rounds of every run; 0: the protocol's")] = 0,
    seeds: Annotated[int, typer.Option("--seeds", min=0, help="Seeds of every cell; 0: as planned")] = 0,
    scans: Annotated[bool, typer.Option("--scans/--no-scans", help="Also runs that tell readings apart")] = True,
    bench: Annotated[list[str] | None, typer.Option("--bench", help="Only on this data set and net; repeat")] = None,
    cell: Annotated[
        list[str] | None, typer.Option("--cell", help="Only runs of this name, as in 'fashion-mlp/*/lowerb*'")
    ] = None,
    data_dir: DataDir = None,
    out: Annotated[Path, typer.Option("--out", help="Where experiments/ and docs/reproduce/ lie")] = Path(),
    runs: Annotated[Path | None, typer.Option("--runs", help="Run folders; else OUT/runs/reproduce")] = None,
    source: Annotated[Path | None, typer.Option("--from", help="Take finished results from another --out")] = None,
    workers: Workers = 0,
    json: AsJson = False,
) -> None:
    """Reproduce a table or figure of the paper; call it again to go on where it stopped.

    Example: fedp3 reproduce fig-parameters
    """
    folder = runs or out / "runs" / "reproduce"
    asked = Asked(
        name, overrides or [], protocol, rounds, seeds, scans, bench or [], cell or [],
        data_dir, out, folder, source, workers, json,
    )  # fmt: skip
    commands = _commands()
    if not name:
        for each, (_, about) in commands.items():
            show.tell(f"{each:<21} {about}")
        return
    if name not in commands:
        raise InputError(f"unknown name {name!r} ({suggestion(name, commands)}); `fedp3 reproduce` lists them")
    _check(asked)
    commands[name][0](asked)


def _check(asked: Asked) -> None:
    """All mistakes in options, before anything is written."""
    from fedp3.reproduce.arithmetic import ARITHMETIC
    from fedp3.reproduce.cells import BENCHES, PROTOCOLS

    pick(PROTOCOLS, asked.protocol, "protocol")
    for bench in asked.benches:
        pick(BENCHES, bench, "bench")
    if asked.overrides and asked.name in {*ARITHMETIC, "claims", "lr"}:
        why = "tries rates under each bench's own settings" if asked.name == "lr" else "trains nothing"
        raise InputError(f"{asked.name} {why}: {asked.overrides[0]!r} cannot change it")


def _commands() -> Mapping[str, tuple[Callable[[Asked], None], str]]:
    """Name -> what it does, in the order of the list."""
    from fedp3.reproduce.arithmetic import ARITHMETIC
    from fedp3.reproduce.targets import TARGETS

    return {
        **{name: (_count, f"{a.title}; needs no data") for name, a in ARITHMETIC.items()},
        **{name: (_train, f"{t.title}: {t.about}") for name, t in TARGETS.items()},
        "all": (_train, "every target that trains, what the claims need first"),
        "claims": (_claims, "every claim judged and every page written, from the results that are there"),
        "lr": (_lr, "the learning rate of each bench, by FedAvg on a validation cut"),
    }


def _tables(tables: "Sequence[Table]") -> None:
    for t in tables:
        sides = {c: "left" if j < t.words else "right" for j, c in enumerate(t.columns)}
        show.table(sides, t.rows, title=t.title)
        for note in t.notes:
            show.tell(note)


# --------------------------------------------------------------------------- counting


def _count(asked: Asked) -> None:
    """A target that needs no training."""
    from fedp3.reproduce.arithmetic import ARITHMETIC
    from fedp3.reproduce.pages import arithmetic_page

    target = ARITHMETIC[asked.name]
    numbers = target.numbers()
    if asked.json:
        show.as_json(numbers)
        return
    _tables(target.tables(numbers))
    show.tell(f"open {os.path.relpath(arithmetic_page(asked.name, numbers, asked.docs))}")


# --------------------------------------------------------------------------- training


def _train(asked: Asked) -> None:
    """Run what is not finished of a target, then write its page."""
    from fedp3.locks import locked
    from fedp3.reproduce import lr, runner

    _take_from(asked)
    request = runner.Request(
        runner.targets_named(asked.name), asked.results, asked.runs, asked.protocol, asked.rounds, asked.seeds,
        asked.scans, asked.benches, asked.names, asked.overrides, asked.data_dir, lr.chosen(asked.rates),
    )  # fmt: skip
    todo, done = runner.plan(request)
    show.say(f"{done} of {done + len(todo)} runs are finished; results go to {asked.results}")

    def train(config: "Config", folder: Path, name: str) -> None:
        if (folder / "config.toml").exists():
            from fedp3 import driver

            go_on(driver.reopen(folder), folder, asked.workers, asked.data_dir, name=name)
        else:
            start(config, folder, asked.workers, asked.data_dir, name=name)

    failed = runner.run_cells(request, todo, train, show.say)
    with locked(asked.runs, ".pages", wait=True):  # another process may end at the same time
        _show(asked)
    if failed:
        raise RunError("\n".join([f"{len(failed)} of {len(todo)} runs could not go on:", *failed]))


def _take_from(asked: Asked) -> None:
    """Copy the results of another place that are not here."""
    if asked.source is None:
        return
    theirs = asked.source / "experiments" / "results"
    if not theirs.is_dir():
        raise InputError(f"--from {asked.source}: it has no experiments/results")
    for path in sorted(theirs.rglob("*.json")):
        here = asked.results / path.relative_to(theirs)
        if not here.exists():
            here.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, here)


def _found(asked: Asked) -> "Mapping[str, Mapping[int, Summary]]":
    """All results of the protocol."""
    from fedp3.reproduce.summary import read_all

    return read_all(asked.results, asked.protocol)


def _show(asked: Asked) -> None:
    """Tables and page of what was trained."""
    from fedp3.reproduce.files import write_cells
    from fedp3.reproduce.pages import training_page
    from fedp3.reproduce.targets import TARGETS
    from fedp3.reproduce.training import brief, numbers, tables

    if asked.name == "all":
        _claims(asked)
        return
    found = _found(asked)
    page = training_page(asked.name, found, asked.protocol, asked.docs)
    write_cells(found, asked.protocol, asked.experiments, asked.name)
    if asked.json:
        show.as_json(numbers(TARGETS[asked.name], found, asked.protocol))
        return
    _tables([brief(t) for t in tables(TARGETS[asked.name], found, asked.protocol)])
    show.tell(f"open {os.path.relpath(page)}")


# --------------------------------------------------------------------------- claims


def _claims(asked: Asked) -> None:
    """Judge every claim and write every page."""
    from fedp3.reproduce import pages, verdicts
    from fedp3.reproduce.arithmetic import ARITHMETIC
    from fedp3.reproduce.cells import PROTOCOLS
    from fedp3.reproduce.claims import findings
    from fedp3.reproduce.files import write_cells
    from fedp3.reproduce.targets import TARGETS

    _take_from(asked)
    found = _found(asked)
    judged = findings(found, asked.protocol)
    if asked.json:
        show.as_json({"protocol": asked.protocol, "claims": [_plain(asdict(f)) for f in judged]})
        return
    for name, target in ARITHMETIC.items():
        pages.arithmetic_page(name, target.numbers(), asked.docs)
    for name in TARGETS:
        pages.training_page(name, found, asked.protocol, asked.docs)
    write_cells(found, asked.protocol, asked.experiments)
    page = verdicts.claims_page(found, asked.protocol, asked.docs)
    also = findings(found, asked.protocol, verdicts.other(PROTOCOLS[asked.protocol].score))
    _tables([verdicts.claim_table(judged, also, asked.protocol)])
    show.tell(f"open {os.path.relpath(page)}")


def _plain(value: Any) -> Any:
    """What JSON can hold: a limit at infinity is none."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and abs(value) == float("inf") else value


# --------------------------------------------------------------------------- learning rates


def _lr(asked: Asked) -> None:
    """Score every rate of the grid and record it."""
    from fedp3.reproduce.cells import BENCHES, PROTOCOLS
    from fedp3.reproduce.lr import cases
    from fedp3.tune import search

    named = asked.benches or list(BENCHES)
    chosen = [BENCHES[rate] for rate in dict.fromkeys(pick(BENCHES, name, "bench").rate for name in named)]
    rounds = asked.rounds or PROTOCOLS["desk"].rounds
    for bench in chosen:
        each = cases(bench, rounds)
        for lr, score in search(bench.name, each, asked.rates, asked.data_dir, asked.workers, show.rounds):
            show.say(f"{bench.name} lr {lr}: G {100 * score:.2f} % on the validation cut")
    show.tell(f"open {os.path.relpath(asked.rates)}")
