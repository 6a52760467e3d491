"""`fedp3 sweep`: several methods over several seeds."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedp3.cli import terminal
from fedp3.cli.options import DataDir, Overrides, Use, Workers
from fedp3.cli.signals import stoppable
from fedp3.cli.training import Options, train_seeds
from fedp3.core.errors import InputError

if TYPE_CHECKING:
    from fedp3.config import Config


def sweep(
    path: Annotated[Path, typer.Argument(help="Config file")],
    methods: Annotated[str, typer.Option("--methods", help="Methods, separated by commas")],
    out: Annotated[Path, typer.Option("--out", help="Folder for all runs")],
    overrides: Overrides = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds per method")] = 1,
    tune: Annotated[
        str,
        typer.Option(
            "--tune",
            help="Values of one key to try for each method, as in local.lr=0.1,0.2; the one with "
            "the best validation score of the server's model is used",
        ),
    ] = "",
    tune_rounds: Annotated[
        int,
        typer.Option("--tune-rounds", min=0, help="Rounds per value; 0 takes those of the config"),
    ] = 0,
    workers: Workers = 0,
    data_dir: DataDir = None,
    use: Use = None,
) -> None:
    """Run several methods over several seeds; the same command resumes a stopped sweep.

    --tune scores every value on a validation split of the training samples, with the first seed.
    OUT/tuned.json has the scores.

    Example: fedp3 sweep my.toml --methods fedavg,fedp3 --seeds 3 --tune local.lr=0.1,0.2 --out a
    """
    from fedp3 import config
    from fedp3.config.plugins import load_plugins
    from fedp3.experiment.assemble import assemble

    plugins = load_plugins(use or ())
    names = [name.strip() for name in methods.split(",") if name.strip()]
    if not names:
        raise InputError(
            "--methods names none; give some as in fedavg,fedp3 (`fedp3 methods` lists them)"
        )
    key, values = _parse_tune(tune)
    cases: dict[str, dict[str, Config]] = {name: {} for name in names}
    for name in names:
        for value in values:
            changes = [*(overrides or []), f"method={name}"]
            changes += [f"{key}={value}"] if key else []
            cases[name][value] = config.load(path, changes)
    for by_value in cases.values():  # finds every mistake before anything is trained
        assemble(by_value[values[0]], data_dir)
    options = Options(workers=workers, data_dir=data_dir, plugins=plugins)
    for name, by_value in cases.items():
        value = values[0]
        if key:
            value = _best(name, by_value, tune_rounds, out / "tuned.json", options)
        train_seeds(by_value[value], out / name, seeds, options)
    terminal.line(f"next: fedp3 compare {out}/*")


def _parse_tune(text: str) -> tuple[str, list[str]]:
    """The key and the values of --tune; without it, no key and one empty value."""
    if not text:
        return "", [""]
    key, _, listed = text.partition("=")
    values = [value.strip() for value in listed.split(",") if value.strip()]
    if not key.strip() or len(values) < 2:
        raise InputError(
            f"--tune {text}: name a key and at least two values, as in local.lr=0.1,0.2,0.5"
        )
    return key.strip(), values


def _best(
    method: str, cases: "Mapping[str, Config]", rounds: int, path: Path, options: Options
) -> str:
    """The value with the best score on the validation split."""
    from fedp3.core.files import read_json
    from fedp3.core.scores import score_of
    from fedp3.runs import tuning

    short = {value: tuning.shortened(case, rounds) for value, case in cases.items()}
    with stoppable():
        scores = dict(
            tuning.search(
                method,
                short,
                path,
                options.data_dir,
                options.workers,
                terminal.rounds,
                options.plugins,
            )
        )
    kind = score_of(read_json(path)[method])
    value = kind.leader(scores)
    if len(set(scores.values())) == 1:
        terminal.note(
            f"warning: {method}: all values have the same G on the validation split; "
            f"the first, {value}, is used"
        )
        return value
    tried = ", ".join(f"{v}: {kind.text(score)}" for v, score in scores.items())
    terminal.note(f"{method}: {value} is best on the validation split ({tried})")
    return value
