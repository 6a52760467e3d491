"""`fedp3 node`: the policy of a device, what it holds and has spent, and what it would refuse."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedp3.cli import terminal
from fedp3.cli.options import AsJson, DataDir, Overrides, Use
from fedp3.core.errors import InputError, RunError

if TYPE_CHECKING:
    from fedp3.node.folder import NodeSettings

KEYS = """Look after a device that takes part in runs of others: its policy, ledger and caches.

A node is started with flower-supernode ... --node-config 'KEY=VALUE ...'.  Its keys are
partition-id (which client it is, from 0), num-partitions (how many clients there are),
capacity (the largest share of a pruned layer that it can hold), device (a fleet file with the line
of its device, for devices.fleet="nodes"), folder (where it stores everything; by default
~/.local/state/fedp3/nodes/client-NUMBER), policy (by default policy.toml in the folder),
data-dir (where its data sets are) and use (files that register parts of your own).

The folder has the ledger, marks of records that trained under LDP, personal layers and the secret
of the split.  Back it up as a whole: a node that finds a part of it missing refuses to go on.
"""
app = typer.Typer(
    help=KEYS,
    no_args_is_help=True,
    epilog="Example: fedp3 node init --client 0",
)

Client = Annotated[
    int | None,
    typer.Option("--client", min=0, help="Number of the client, as in the node's partition-id"),
]
Folder = Annotated[
    Path | None,
    typer.Option("--folder", help="Folder of the node; by default that of the client"),
]


@app.command("init")
def init(client: Client = None, folder: Folder = None) -> None:
    """Write a commented policy for this device, which trusts no server.

    Example: fedp3 node init --client 0
    """
    from fedp3.core.files import write_atomic
    from fedp3.node.folder import claim, client_of, default_folder, node_settings, secret_key
    from fedp3.node.policy import FILE, policy_text

    number = client_of({"partition-id": client})
    place = folder or default_folder(number)
    claim(place, number)
    path = place / FILE
    if path.exists():
        raise InputError(f"{path} exists; a policy is never overwritten: edit it")
    write_atomic(path, policy_text().encode())
    secret_key(place)
    node_settings({"partition-id": number, "folder": str(place)})  # from now on it needs a policy
    terminal.line(f"wrote {path}; read it and change what you want")
    terminal.line(
        "next: flower-supernode ... --node-config "
        f"'partition-id={number} folder=\"{place.absolute()}\"'"
    )


@app.command("status")
def show_status(client: Client = None, folder: Folder = None, json: AsJson = False) -> None:
    """Show what a device holds and has spent over all runs.

    Example: fedp3 node status --client 0
    """
    from fedp3.node.status import status

    about = status(_settings(client, folder))
    if json:
        terminal.as_json(about)
        return
    unlimited = "no limit"
    allowed = about["epsilon_allowed"]
    spent = "no finite epsilon" if about["epsilon"] is None else f"{about['epsilon']:.3f}"
    limit = unlimited if allowed is None else f"{allowed:g} allowed"
    terminal.line(f"client {about['client']} in {about['folder']}")
    updates = sum(about["updates"].values())
    terminal.line(
        f"updates: {updates} in {len(about['updates'])} runs under LDP; epsilon {spent} at delta "
        f"{about['delta']:g} ({limit})"
    )
    terminal.line(f"records that trained under LDP: {about['trained_records']}")
    terminal.line(f"scores returned: {about['scores']} of {about['scores_allowed']}")
    size = sum(c["bytes"] for c in about["caches"])
    terminal.line(f"caches: {len(about['caches'])}, {size / 1e6:.1f} MB")
    for line in about["refusals"]:
        terminal.line(f"refused: {line}")


@app.command("check")
def check(
    target: Annotated[Path, typer.Argument(help="Config file, or a task that a node stored")],
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Config of the run, if TARGET is a task")
    ] = None,
    client: Client = None,
    folder: Folder = None,
    data_dir: DataDir = None,
    use: Use = None,
    json: AsJson = False,
) -> None:
    """Try a config or a stored task against the policy of this device; nothing is trained.

    Example: fedp3 node check my.toml --client 0
    """
    from fedp3 import config as configs
    from fedp3.config.plugins import load_plugins
    from fedp3.messages.framing import MAGIC
    from fedp3.node.status import try_config, try_task

    load_plugins(use or ())
    node = _settings(client, folder)
    try:
        content = target.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {target}: {error.strerror or error}") from None
    if content.startswith(MAGIC):
        if config is None:
            raise InputError(f"{target} is a task; name the config of its run with --config FILE")
        trial = try_task(node, configs.load(config, overrides or []), content, data_dir)
    else:
        trial = try_config(node, configs.load(target, overrides or []), data_dir)
    if json:
        from dataclasses import asdict

        terminal.as_json(asdict(trial) | {"accepted": not trial.reasons})
    else:
        terminal.line(f"config {trial.digest}")
        if trial.epsilon is not None:
            terminal.line(
                f"epsilon {trial.epsilon:.3f} for this run, {trial.epsilon_after:.3f} over all runs"
            )
        for reason in trial.reasons:
            terminal.line(f"refused, {reason}")
        if not trial.reasons:
            terminal.line("accepted")
    if trial.reasons:
        raise RunError(f"the policy in {node.folder} refuses it")


@app.command("caches")
def show_caches(
    client: Client = None,
    folder: Folder = None,
    clear: Annotated[
        Literal["none", "prepared", "states", "all"],
        typer.Option("--clear", help="Delete caches of this kind"),
    ] = "none",
    json: AsJson = False,
) -> None:
    """List what a device stores and could compute or be sent again; --clear deletes it.

    A run whose states are deleted cannot continue on this device if it has personal layers.

    Example: fedp3 node caches --client 0 --clear prepared
    """
    from fedp3.node import folder as folders

    node = _settings(client, folder)
    listed = folders.caches(node.folder)
    deleted = [c for c in listed if clear in (c.kind, "all")]
    for cache in deleted:
        folders.clear(cache)
    if json:
        rows = [{"path": str(c.path), "kind": c.kind, "bytes": c.bytes} for c in listed]
        terminal.as_json({"caches": rows, "deleted": len(deleted)})
        return
    columns = {"kind": "left", "MB": "right", "path": "left"}
    terminal.table(columns, [(c.kind, f"{c.bytes / 1e6:.2f}", str(c.path)) for c in listed])
    if deleted:
        terminal.line(f"deleted {len(deleted)}")


def _settings(client: int | None, folder: Path | None) -> "NodeSettings":
    """The settings of the node with this number or in this folder."""
    from fedp3.core.files import read_json
    from fedp3.node.folder import default_folder, node_settings

    if client is None and folder is None:
        raise InputError("name the device with --client N or --folder DIR")
    place = folder or default_folder(client or 0)
    if not (place / "node.json").exists():
        raise InputError(f"{place} is not the folder of a node; make one with: fedp3 node init")
    number = read_json(place / "node.json").get("client")
    return node_settings({"partition-id": number, "folder": str(place)})
