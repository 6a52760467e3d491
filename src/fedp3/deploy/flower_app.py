"""A run on Flower's Grid from the first query to the result.

The run folder is on the server, as in a simulation.  The states of clients are on the nodes' own
disks, under a name that the run folder records, and are in no checkpoint.
"""

import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedp3 import config as configs
from fedp3.config import Config
from fedp3.config.plugins import Plugin, load_plugins
from fedp3.core.errors import ConfigError, InputError
from fedp3.core.files import read_json
from fedp3.devices.settings import NODES, DeviceRow, device_of, recorded_row
from fedp3.devices.table import UNREPORTED, Device
from fedp3.engines.base import Engine, States
from fedp3.engines.flower.grid import Roster, Wire, over
from fedp3.engines.flower.records import Identity
from fedp3.experiment.assemble import assemble, check_plans
from fedp3.experiment.device_plans import with_fleet
from fedp3.experiment.experiment import Experiment
from fedp3.messages.codec import room_for
from fedp3.models.frozen import frozen_sha256
from fedp3.node.permits import Permit, read_permit
from fedp3.privacy.client_level import requirements as client_requirements
from fedp3.privacy.mechanism import mechanism_of
from fedp3.privacy.requirements import refused_deployment
from fedp3.runs import existing, session
from fedp3.runs.callbacks import Callback
from fedp3.runs.round_warnings import OnRound
from fedp3.runs.session import Outcome
from fedp3.server.context import RoundRecord

RESUME = "flwr run --run-config 'resume=true'"
log = logging.getLogger("flwr").log  # what `flwr run --stream` shows


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Settings of a ServerApp besides the config.

    Args:
        out: the run folder; None writes nothing, and nothing can be resumed.
        resume: continue the run in `out`.
        wait: seconds to wait for all nodes before the first round.
        plugins: files that the run uses; they are recorded in the run folder.
        permit: the permission of a run owner, for nodes whose policy needs one.
    """

    out: Path | None = None
    resume: bool = False
    wait: float = 60.0
    plugins: tuple[Plugin, ...] = ()
    permit: Permit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduced:
    """Nodes that were asked who they are before the run was assembled.

    Args:
        roster: which node is which client.
        settings: the settings of the run as JSON, which every message brings.
        action: which functions of their ClientApp answer.
        rest: called between two looks for replies.
        simulated: whether they are processes on this machine, which store nothing themselves.
    """

    roster: Roster
    settings: str
    action: str
    rest: Callable[[], None]
    simulated: bool


def server_app(config: Path) -> ServerApp:
    """The ServerApp of a config file.

    The keys of its run-config are those that `write_app` writes.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        keys = context.run_config
        data_dir = str(keys.get("data-dir") or "")
        settings = ServeSettings(
            out=Path(str(keys["out"])),
            resume=bool(keys.get("resume")),
            wait=float(keys.get("wait", 60.0)),
            plugins=load_plugins(str(keys.get("use") or "").split()),
            permit=read_permit_file(str(keys.get("permit") or "")),
        )
        experiment = assemble(configs.load(config), Path(data_dir) if data_dir else None)
        serve(grid, experiment, settings)

    return app


def serve(
    grid: Grid,
    experiment: Experiment,
    settings: ServeSettings,
    met: Introduced | None = None,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Train over the nodes of this grid; a run that is finished already is read from its folder.

    Args:
        grid: Flower's grid.
        experiment: the run.
        settings: where it is written to, and what else is no part of its config.
        met: the nodes that answered already, and how; None asks them now.
        callbacks: what to call while it trains.
    """
    config, folder = experiment.config, settings.out
    check_deployable(config)
    if folder is not None and not settings.resume:
        existing.refuse_existing(folder, RESUME)
    run = secrets.token_hex(16)
    if settings.permit is not None:
        _check_permit(settings.permit, config)
        run = settings.permit.run
    if folder is not None and existing.holds_run(folder):
        finished = session.read_finished(folder, config)
        if finished is not None:
            log(INFO, "%s holds a finished run", folder)
            return finished
        run = _run_name(folder)
        if settings.permit is not None and settings.permit.run != run:
            raise InputError(
                f"the permit is for another run than the one in {folder}; sign one for run {run}"
            )
    wire = Wire(
        spec=experiment.server.spec,
        digest=config.digest(),
        run=run,
        mechanism=mechanism_of(experiment.client),
        permit=settings.permit,
        deadline=config.run.deadline,
        room=room_for(experiment.start.extra),
        frozen=frozen_sha256(experiment.client.net),
    )
    roster, simulated = Roster(), False
    if met is not None:
        roster, simulated = met.roster, met.simulated
        wire = replace(wire, settings=met.settings, action=met.action, rest=met.rest)
    missing = roster.gather(grid, wire, experiment.shards, settings.wait)
    if missing:
        log(WARNING, "the run begins without the clients %s", sorted(missing))
    rounds = config.run.rounds

    def engine(experiment: Experiment, states: States | None) -> Engine:
        held = None if not simulated else states or States()
        known = wire if met is None else replace(wire, initial=experiment.start.W)
        return over(grid, known, roster, held)

    outcome = session.train(
        as_registered(experiment, roster, folder),
        folder,
        engine,
        resume=settings.resume,
        own_model=True,
        plugins=settings.plugins,
        files={"flower.json": json.dumps({"run": run}).encode()},
        watch=lambda experiment, events: nullcontext(_log_round(rounds)),
        callbacks=callbacks,
        tell=lambda text: log(INFO, text),
        how_to_resume=RESUME,
    )
    if folder is not None:
        from fedp3.report import write_report  # nodes import this module for every message

        log(INFO, "open %s", write_report([folder]))
    return outcome


def as_registered(experiment: Experiment, roster: Roster, folder: Path | None = None) -> Experiment:
    """The experiment, adapted to the nodes that are online.

    No node is sent more of a layer than it can hold.  The number of a client's examples is the one
    that its node reported: a node may split its records itself.  Devices that nodes report are
    those of the run's first beginning, which its folder records.
    """
    server, config = experiment.server, experiment.config
    reported = {i: roster.met[n] for i, n in roster.nodes.items()}
    keep, examples = list(server.keep), dict(server.examples)
    for i in reported.keys() & examples.keys():  # a node may claim a client that does not exist
        keep[i] = min(keep[i], reported[i].capacity)
        examples[i] = reported[i].examples
    adapted = replace(server, keep=tuple(keep), examples=examples, fleet=None)
    devices = None
    if config.devices.fleet == NODES:
        devices = _reported_devices(reported, server.clients, folder)
    adapted = with_fleet(adapted, config, experiment.client, experiment.start.extra, devices)
    check_plans(adapted)  # these nodes may hold less than the config assumes
    return replace(experiment, server=adapted)


def _reported_devices(
    reported: Mapping[int, Identity], clients: int, folder: Path | None
) -> tuple[Device, ...]:
    """The device of every client, as the run folder has it, or as its node reports it now."""
    rows: Mapping[int, DeviceRow | None] = {i: node.device for i, node in reported.items()}
    if folder is not None and existing.holds_run(folder):
        recorded = read_json(folder / "run.json")["devices"]
        rows = {i: recorded_row(row) for i, row in enumerate(recorded)}
    known = {i: device_of(row) for i, row in rows.items() if row is not None}
    missing = sorted(set(range(clients)) - known.keys())
    if not known:
        raise InputError(
            "[devices] fleet = 'nodes', and no node says what its device is; write its line with "
            "fedp3 devices measure, and start the node with --node-config 'device=\"FILE.csv\"'"
        )
    if missing:
        log(WARNING, "clients %s report no device and get no tasks in this run", missing)
    return tuple(known.get(i, UNREPORTED) for i in range(clients))


def _run_name(folder: Path) -> str:
    """The name of a run on the nodes' disks."""
    if not (folder / "flower.json").exists():
        raise InputError(
            f"{folder} was not begun on Flower's nodes, and its states are in its checkpoint; "
            f"continue it with: fedp3 resume {folder}"
        )
    return str(read_json(folder / "flower.json")["run"])


def read_permit_file(path: str) -> Permit | None:
    """The permit in a file; None if no file is named."""
    if not path:
        return None
    try:
        return read_permit(Path(path).read_text())
    except OSError as error:
        raise InputError(f"cannot read the permit {path}: {error.strerror or error}") from None


def _check_permit(permit: Permit, config: Config) -> None:
    """Refuse a permit that every node would refuse."""
    if permit.config != config.digest():
        raise InputError("the permit is for another config; sign one for this app's config.toml")
    if permit.expires < time.time():
        raise InputError(f"the permit ended at {permit.until}; sign a new one")


def _log_round(rounds: int) -> OnRound:
    def line(r: RoundRecord) -> None:
        clients = f"ok {len(r.accepted)} late {len(r.late)} rejected {len(r.rejected)}"
        loss = "-" if r.loss is None else f"{r.loss:.3f}"
        void = "  VOID" if r.void else ""
        log(
            INFO,
            "round %d/%d  loss %s  %s  %.1f s%s",
            r.t + 1,
            rounds,
            loss,
            clients,
            r.seconds,
            void,
        )
        for client, rejection in r.rejected.items():
            log(WARNING, "client %d: %s", client, rejection.text)

    return line


def check_deployable(config: Config) -> None:
    """Refuse what cannot be deployed."""
    refused = [
        refused_deployment(config.privacy),
        client_requirements.refused_deployment(config.client_privacy),
    ]
    if any(refused):
        raise ConfigError("\n".join(filter(None, refused)))
    if config.partition.file and not Path(config.partition.file).is_absolute():
        raise ConfigError(
            f"[partition] file = {config.partition.file!r} is read on every machine: "
            "it must be an absolute path"
        )
