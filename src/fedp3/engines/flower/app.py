"""A run on a Grid from its first query to its result, and complete Flower apps that do nothing else.

The run folder is the server's, as in process; a run that was cut off goes on with `resume`.  What clients keep is on
the nodes' own disks, under the name the run folder holds, and is in no checkpoint.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log

from fedp3 import config as configs
from fedp3 import driver, inputs, record
from fedp3.codec import room_for
from fedp3.config import Config
from fedp3.engines.flower.grid import Roster, Wire, over
from fedp3.errors import ConfigError, InputError
from fedp3.experiment import Experiment, assemble, check_problem
from fedp3.locks import locked
from fedp3.report import write_report
from fedp3.server import RoundRecord

PACKAGE = "fedp3_app"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a ServerApp is told beside the config: the keys of its run-config."""

    out: Path | None = None  # run folder; none: nothing is written, nothing can be resumed
    resume: bool = False
    wait: float = 60.0  # seconds to wait for nodes before the first round


def server_app(config: Config) -> ServerApp:
    """The ServerApp of a config; its run-config says where to write, and whether to go on."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        given = context.run_config
        data_dir = str(given.get("data-dir") or "")
        settings = Settings(Path(str(given["out"])), bool(given.get("resume")), float(given.get("wait", 60.0)))
        serve(grid, assemble(config, Path(data_dir) if data_dir else None), settings)

    return app


def serve(grid: Grid, experiment: Experiment, settings: Settings) -> driver.Outcome | None:
    """Train over the nodes of this grid; None where the run was finished before."""
    config, folder = experiment.config, settings.out
    _check(config)
    if folder is not None and settings.resume:
        driver.reopen(folder, config)
        if (folder / "result.json").exists():
            log(INFO, "%s is finished", folder)
            return None
        experiment = inputs.as_begun(folder, experiment)
    elif folder is not None and (folder / "config.toml").exists():
        raise InputError(f"{folder} holds a run already; go on with it by: flwr run --run-config 'resume=true'")
    run = _name(folder) if settings.resume and folder is not None else secrets.token_hex(16)
    problem = experiment.problem
    wire = Wire(problem.layers, problem.pruning, config.digest(), run, config.run.deadline)
    wire = replace(wire, compression=problem.compression, room=room_for(experiment.start.extra))
    roster = Roster()
    missing = roster.gather(grid, wire, experiment.shards, settings.wait)
    if missing:
        log(WARNING, "beginning without the clients %s", sorted(missing))
    experiment = as_registered(experiment, roster)
    if folder is None:
        return driver.drive(experiment, over(grid, wire, roster), None, _tell(problem.rounds))
    return _in_folder(grid, wire, roster, experiment, folder)


def _in_folder(grid: Grid, wire: Wire, roster: Roster, experiment: Experiment, folder: Path) -> driver.Outcome:
    if not (folder / "config.toml").exists():
        folder.mkdir(parents=True, exist_ok=True)
        record.write_json(folder / "flower.json", {"run": wire.run})
        driver.begin(experiment, folder, own_net=True)
    with locked(folder):
        checkpoint, broken = driver.pick_up(folder, experiment.config.digest())
        for text in broken:
            log(WARNING, text)
        start = checkpoint.state if checkpoint else None
        log(INFO, "beginning after round %d of %d", start.t if start else 0, experiment.problem.rounds)
        outcome = driver.drive(experiment, over(grid, wire, roster), folder, _tell(experiment.problem.rounds), start)
    log(INFO, "open %s", write_report([folder]))
    return outcome


def as_registered(experiment: Experiment, roster: Roster) -> Experiment:
    """The experiment over the nodes that are there: none is sent more of a layer than it can hold.

    Where the server has no data of its own, clients have as many examples as their nodes said.
    """
    problem = experiment.problem
    said = {i: roster.met[n] for i, n in roster.nodes.items()}
    keep = [min(share, said[i].capacity) if i in said else share for i, share in enumerate(problem.keep)]
    examples = {i: m or (said[i].examples if i in said else 0) for i, m in problem.examples.items()}
    fitted = replace(problem, keep=tuple(keep), examples=examples)
    check_problem(fitted)  # these may hold less than was planned for
    return replace(experiment, problem=fitted)


def _name(folder: Path) -> str:
    """What a run is called on the nodes' disks."""
    if not (folder / "flower.json").exists():
        raise InputError(
            f"{folder} was not begun on Flower's nodes, which keep what it needs; go on with: fedp3 resume"
        )
    return str(record.read_json(folder / "flower.json")["run"])


def _tell(rounds: int) -> driver.OnRound:
    def line(r: RoundRecord) -> None:
        said = f"ok {len(r.accepted)} late {len(r.late)} rejected {len(r.rejected)}"
        loss = "-" if r.loss is None else f"{r.loss:.3f}"
        log(INFO, "round %d/%d  loss %s  %s  %.1f s%s", r.t + 1, rounds, loss, said, r.seconds, "  VOID" * r.void)
        for client, reason in r.rejected.items():
            log(WARNING, "client %d: %s", client, reason)

    return line


def _check(config: Config) -> None:
    """Refuse what cannot be deployed."""
    if config.privacy.enabled and config.privacy.randomness != "os":
        raise ConfigError(
            "[privacy] randomness = 'seeded' is for simulation: elsewhere the noise must be the node's alone; set 'os'"
        )
    if config.partition.file and not Path(config.partition.file).is_absolute():
        raise ConfigError(
            f"[partition] file = {config.partition.file!r} is read on every machine: give its whole path there"
        )


# --------------------------------------------------------------------------- apps as files


def write_app(folder: Path, config: Config, out: Path, data_dir: Path | None) -> Path:
    """Write a complete app for `flwr run`."""
    _check(config)
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; choose another folder for the app")
    keys = {"out": str(out.absolute()), "data-dir": str(data_dir.absolute()) if data_dir else ""}
    files = {
        "pyproject.toml": _PROJECT.format(package=PACKAGE, **{k.replace("-", "_"): v for k, v in keys.items()}),
        "README.md": _README.format(folder=folder.name),
        f"{PACKAGE}/__init__.py": _INIT.format(package=PACKAGE),
        f"{PACKAGE}/server.py": _SERVER.format(package=PACKAGE),
        f"{PACKAGE}/client.py": _CLIENT.format(package=PACKAGE),
        f"{PACKAGE}/config.toml": configs.to_toml(config),
    }
    _write(folder, files)
    return folder


def _write(folder: Path, files: Mapping[str, str]) -> None:
    try:
        (folder / PACKAGE).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise InputError(f"cannot write the app to {folder}: {error.strerror or error}") from None


_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedp3-app"
version = "1.0.0"
description = "A FedP3 run on Flower"
license = "Apache-2.0"
dependencies = ["fedp3[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.flwr.app]
publisher = "fedp3"

[tool.flwr.app.components]
serverapp = "{package}.server:app"
clientapp = "{package}.client:app"

[tool.flwr.app.config]
out = "{out}"       # run folder, on the machine of the SuperLink
resume = false      # go on with the run in `out`
wait = 60.0         # seconds to wait for all nodes before the first round
data-dir = "{data_dir}"       # where the data set lies; a node's own --node-config data-dir goes first
"""

_README = """\
# {folder}

A FedP3 run as a Flower app; `fedp3_app/config.toml` is the run.

    flwr run . --stream                                     # over the nodes of your SuperLink
    flwr run . --stream --run-config 'resume=true'          # go on after a crash

Every node says which client it is: `flower-supernode ... --node-config "partition-id=0"`.
"""

_INIT = '''"""A FedP3 run as a Flower app."""
'''

_SERVER = '''"""The server: the run that config.toml describes."""

from pathlib import Path

from fedp3 import config
from fedp3.engines.flower.app import server_app

app = server_app(config.load(Path(__file__).with_name("config.toml")))
'''

_CLIENT = '''"""A node: its part of the data set that config.toml names."""

from pathlib import Path

from fedp3 import config
from fedp3.engines.flower.client import client_app, configured

app = client_app(configured(config.load(Path(__file__).with_name("config.toml"))))
'''
