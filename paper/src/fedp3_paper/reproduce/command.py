"""`fedp3 reproduce`: the paper's tables and figures beside ours."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedp3.cli import terminal
from fedp3.cli.options import AsJson, DataDir, Overrides, Workers
from fedp3.cli.training import Options
from fedp3.cli.training import train as train_run
from fedp3.core.errors import InputError, RunError
from fedp3.core.registry import pick, suggestion
from fedp3_paper import PAPER

if TYPE_CHECKING:
    from fedp3.config import Config
    from fedp3_paper.reproduce.runner import Request
    from fedp3_paper.reproduce.summary import Summary
    from fedp3_paper.reproduce.tables import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of one call of the command."""

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
    configs: Path | None
    workers: int
    json: bool

    @property
    def results(self) -> Path:
        """The folder of summaries."""
        return self.out / "results"

    @property
    def rates(self) -> Path:
        """The file of learning rates and their scores."""
        return self.results / "lr.json"

    @property
    def pages(self) -> Path:
        """The folder of pages and figures; protocols other than desk have a folder in it."""
        pages = self.out / "pages"
        return pages if self.protocol == "desk" else pages / self.protocol


def register(app: typer.Typer) -> None:
    """Add the command to the command line of fedp3."""
    app.command("reproduce")(reproduce)


def reproduce(
    name: Annotated[
        str, typer.Argument(help="What to reproduce; leave it out for a list", show_default=False)
    ] = "",
    overrides: Overrides = None,
    protocol: Annotated[
        str, typer.Option("--protocol", help="desk, paper, released or released-desk")
    ] = "desk",
    rounds: Annotated[
        int, typer.Option("--rounds", min=0, help="Rounds per run; 0: as the protocol has it")
    ] = 0,
    seeds: Annotated[int, typer.Option("--seeds", min=0, help="Seeds per cell; 0: as planned")] = 0,
    scans: Annotated[
        bool,
        typer.Option("--scans/--no-scans", help="Include runs that compare readings of the paper"),
    ] = True,
    bench: Annotated[
        list[str] | None,
        typer.Option("--bench", help="Only this data set and network; repeat for several"),
    ] = None,
    cell: Annotated[
        list[str] | None,
        typer.Option("--cell", help="Only runs of this name, as in 'fashion-mlp/*/lowerb*'"),
    ] = None,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of results/ and pages/; else paper/")
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs", help="Folder of run folders; else runs/reproduce in OUT or the current folder"
        ),
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Copy finished results from another --out")
    ] = None,
    configs: Annotated[
        Path | None,
        typer.Option("--write-configs", help="Only write the runs' config files, to this folder"),
    ] = None,
    workers: Workers = 0,
    json: AsJson = False,
) -> None:
    """Reproduce a table or figure of the paper; call it again to resume it.

    Example: fedp3 reproduce fig-parameters
    """
    arguments = Arguments(
        name=name,
        overrides=overrides or [],
        protocol=protocol,
        rounds=rounds,
        seeds=seeds,
        scans=scans,
        benches=bench or [],
        names=cell or [],
        data_dir=data_dir,
        out=out or PAPER,
        runs=runs or (out or Path()) / "runs" / "reproduce",
        source=source,
        configs=configs,
        workers=workers,
        json=json,
    )
    commands = _commands()
    if not name:
        for known, (_, about) in commands.items():
            terminal.line(f"{known:<21} {about}")
        return
    if name not in commands:
        raise InputError(
            f"unknown name {name!r} ({suggestion(name, commands)}); `fedp3 reproduce` lists them"
        )
    _check(arguments)
    execute, _ = commands[name]
    execute(arguments)


def _check(arguments: Arguments) -> None:
    """Raise on any mistake in the arguments, before anything is written."""
    from fedp3_paper.reproduce.arithmetic import ARITHMETIC
    from fedp3_paper.reproduce.cells import BENCHES, PROTOCOLS
    from fedp3_paper.reproduce.targets import TARGETS

    pick(PROTOCOLS, arguments.protocol, "protocol")
    for bench in arguments.benches:
        pick(BENCHES, bench, "bench")
    name = arguments.name
    if arguments.overrides:
        override = repr(arguments.overrides[0])
        if name == "lr":
            raise InputError(
                f"lr tries rates under the settings of each bench: {override} cannot change it"
            )
        if name in {*ARITHMETIC, "claims"}:
            raise InputError(f"{name} trains nothing: {override} cannot change it")
        if arguments.configs:
            raise InputError(
                f"--write-configs writes cells as they are; give {override} to `fedp3 run`"
            )
    if arguments.configs and name not in {*TARGETS, "all"}:
        raise InputError(f"{name} has no cells, so there are no configs to write")


def _commands() -> Mapping[str, tuple[Callable[[Arguments], None], str]]:
    """Name -> what it does and a line about it, in the order of the list."""
    from fedp3_paper.reproduce.arithmetic import ARITHMETIC
    from fedp3_paper.reproduce.targets import TARGETS

    return {
        **{name: (_count, f"{a.title}; needs no data") for name, a in ARITHMETIC.items()},
        **{name: (_train, f"{t.title}: {t.about}") for name, t in TARGETS.items()},
        "all": (_train, "every target that trains; the runs that claims need come first"),
        "claims": (_claims, "judge every claim and write every page, from finished results"),
        "lr": (_lr, "choose the learning rate of each bench by FedAvg on validation samples"),
    }


def _show_tables(tables: "Sequence[Table]") -> None:
    for t in tables:
        sides = {c: "left" if j < t.words else "right" for j, c in enumerate(t.columns)}
        terminal.table(sides, t.rows, title=t.title)
        for note in t.notes:
            terminal.line(note)


# --------------------------------------------------------------------------- counting


def _count(arguments: Arguments) -> None:
    """Compute a target that needs no training, and write its page."""
    from fedp3_paper.reproduce.arithmetic import ARITHMETIC
    from fedp3_paper.reproduce.pages import arithmetic_page

    target = ARITHMETIC[arguments.name]
    numbers = target.numbers()
    if arguments.json:
        terminal.as_json(numbers)
        return
    _show_tables(target.tables(numbers))
    page = arithmetic_page(arguments.name, numbers, arguments.pages)
    terminal.line(f"open {os.path.relpath(page)}")


# --------------------------------------------------------------------------- training


def _train(arguments: Arguments) -> None:
    """Run the unfinished cells of a target, then write its page."""
    from fedp3.core.files import locked
    from fedp3.runs import existing
    from fedp3_paper.reproduce import runner, summary

    if arguments.configs:
        _write_configs(arguments, arguments.configs)
        return
    _copy_results(arguments)
    request = _request(arguments)
    todo, done = runner.plan(request)
    place = os.path.relpath(summary.path_of(arguments.results, arguments.protocol))
    terminal.note(f"{done} of {done + len(todo)} runs are finished; results go to {place}")

    def train(config: "Config", folder: Path, name: str) -> None:
        options = Options(workers=arguments.workers, data_dir=arguments.data_dir, name=name)
        train_run(config, folder, options, resume=existing.holds_run(folder))

    failures = runner.run_cells(request, todo, train, terminal.note)
    with locked(arguments.runs, ".pages", wait=True):  # another process may end at the same time
        _show(arguments)
    if failures:
        raise RunError("\n".join([f"{len(failures)} of {len(todo)} runs failed:", *failures]))


def _request(arguments: Arguments) -> "Request":
    """The runs that are wanted."""
    from fedp3_paper.reproduce import lr, runner

    return runner.Request(
        targets=runner.targets_named(arguments.name),
        results=arguments.results,
        runs=arguments.runs,
        protocol=arguments.protocol,
        rounds=arguments.rounds,
        seeds=arguments.seeds,
        scans=arguments.scans,
        benches=arguments.benches,
        names=arguments.names,
        overrides=arguments.overrides,
        data_dir=arguments.data_dir,
        rates=lr.chosen(arguments.rates),
    )


def _write_configs(arguments: Arguments, folder: Path) -> None:
    """Write the config file of every cell that is wanted, for `fedp3 run`."""
    from fedp3_paper.reproduce import runner
    from fedp3_paper.reproduce.files import write_cells

    cells = {cell.name: cell for cell, _ in runner.selected(_request(arguments))}
    results = _results(arguments)
    paths = write_cells(cells.values(), results, arguments.protocol, folder, arguments.rounds)
    if arguments.json:
        terminal.as_json({"configs": [str(path) for path in paths]})
        return
    terminal.line(f"wrote {len(paths)} configs; next: " + terminal.command("run", paths[0]))


def _copy_results(arguments: Arguments) -> None:
    """Copy results from another folder, but for cells and seeds that have a result already."""
    from fedp3_paper.reproduce.summary import add, path_of, read_all

    if arguments.source is None:
        return
    place = path_of(arguments.source / "results", arguments.protocol)
    if not place.exists():
        raise InputError(f"--from {arguments.source}: it has no results/{place.name}")
    present = _results(arguments)
    new = []
    for cell, runs in read_all(place.parent, arguments.protocol).items():
        new += [result for seed, result in runs.items() if seed not in present.get(cell, {})]
    add(arguments.results, arguments.protocol, new)


def _results(arguments: Arguments) -> "Mapping[str, Mapping[int, Summary]]":
    """All results of the protocol: cell -> seed -> summary."""
    from fedp3_paper.reproduce.summary import read_all

    return read_all(arguments.results, arguments.protocol)


def _show(arguments: Arguments) -> None:
    """Write the page of a target and print its tables."""
    from fedp3_paper.reproduce.pages import training_page
    from fedp3_paper.reproduce.targets import TARGETS
    from fedp3_paper.reproduce.training import brief, numbers, tables

    if arguments.name == "all":
        _claims(arguments)
        return
    target, results = TARGETS[arguments.name], _results(arguments)
    page = training_page(arguments.name, results, arguments.protocol, arguments.pages)
    if arguments.json:
        terminal.as_json(numbers(target, results, arguments.protocol))
        return
    _show_tables([brief(t) for t in tables(target, results, arguments.protocol)])
    terminal.line(f"open {os.path.relpath(page)}")


# --------------------------------------------------------------------------- claims


def _claims(arguments: Arguments) -> None:
    """Judge every claim and write every page."""
    from fedp3_paper.reproduce import pages, verdicts
    from fedp3_paper.reproduce.arithmetic import ARITHMETIC
    from fedp3_paper.reproduce.cells import PROTOCOLS
    from fedp3_paper.reproduce.claims import findings
    from fedp3_paper.reproduce.targets import TARGETS

    _copy_results(arguments)
    results, protocol = _results(arguments), arguments.protocol
    judged = findings(results, protocol)
    if arguments.json:
        claims = [_plain(asdict(finding)) for finding in judged]
        terminal.as_json({"protocol": protocol, "claims": claims})
        return
    for name, target in ARITHMETIC.items():
        pages.arithmetic_page(name, target.numbers(), arguments.pages)
    for name in TARGETS:
        pages.training_page(name, results, protocol, arguments.pages)
    page = verdicts.claims_page(results, protocol, arguments.pages)
    also = findings(results, protocol, verdicts.other(PROTOCOLS[protocol].score))
    _show_tables([verdicts.claim_table(judged, also, protocol)])
    terminal.line(f"open {os.path.relpath(page)}")


def _plain(value: Any) -> Any:
    """A value for JSON, which has no infinity: an infinite limit becomes None."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and abs(value) == float("inf") else value


# --------------------------------------------------------------------------- learning rates


def _lr(arguments: Arguments) -> None:
    """Score every learning rate of the grid and record the scores."""
    from fedp3.runs.tuning import search
    from fedp3_paper.reproduce.cells import BENCHES, PROTOCOLS
    from fedp3_paper.reproduce.lr import cases

    named = arguments.benches or list(BENCHES)
    rounds = arguments.rounds or PROTOCOLS["desk"].rounds
    for name in dict.fromkeys(BENCHES[bench].rate for bench in named):
        scores = search(
            name,
            cases(BENCHES[name], rounds),
            arguments.rates,
            arguments.data_dir,
            arguments.workers,
            terminal.rounds,
        )
        for lr, score in scores:
            terminal.note(f"{name} lr {lr}: G {100 * score:.2f} % on the validation samples")
    terminal.line(f"open {os.path.relpath(arguments.rates)}")
