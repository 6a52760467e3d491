"""`fedp3 flower`: write a run as an app for `flwr run`, and start a cluster on this machine."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedp3.cli import terminal
from fedp3.cli.options import DataDir, Overrides
from fedp3.cli.signals import Stopped, stoppable
from fedp3.core.errors import InputError, RunError

if TYPE_CHECKING:
    from fedp3.deploy.cluster import Cluster

app = typer.Typer(
    help="Run on Flower: write a run as an app, start a SuperLink and SuperNodes, make node keys.",
    no_args_is_help=True,
    epilog="Example: fedp3 flower up",
)


@app.command("app")
def write(
    folder: Annotated[Path, typer.Argument(help="Folder to write the app to")],
    config: Annotated[Path, typer.Option("--config", help="Config file")],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Run folder of the server; by default FOLDER/run"),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Write a config as a complete Flower app, for `flwr run`.

    Example: fedp3 flower app myapp --config my.toml
    """
    from fedp3 import config as configs
    from fedp3.config.plugins import load_plugins
    from fedp3.engines.catalogue import check_engine

    check_engine("flower")
    from fedp3.deploy.app_files import write_app
    from fedp3.experiment.assemble import assemble

    load_plugins(())  # those of installed packages
    settings = configs.load(config, overrides or [])
    assemble(settings, data_dir)  # finds every mistake before a node sees the config
    write_app(folder, settings, out or folder / "run", data_dir)
    terminal.line(
        f"wrote {folder}; it has {settings.partition.clients} clients: "
        "start one node for each, with its number as partition-id"
    )
    terminal.line(
        f"next: flwr run {folder} --stream, on any SuperLink; fedp3 flower up starts one here"
    )


@app.command("up")
def up(
    nodes: Annotated[
        int, typer.Option("--nodes", min=0, help="Number of SuperNodes to start, one per client")
    ] = 3,
    tls: Annotated[
        bool,
        typer.Option("--tls", help="Make certificates and node keys, and admit only those nodes"),
    ] = False,
    host: Annotated[
        str, typer.Option("--host", help="Address on which the SuperLink listens")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=65535, help="Port of the SuperLink; 0 takes a free one"),
    ] = 0,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Allow an address that other machines can reach, without TLS"
        ),
    ] = False,
    folder: Annotated[
        Path, typer.Option("--dir", help="Folder for connection, keys and logs")
    ] = Path("flower"),
    data_dir: DataDir = None,
) -> None:
    """Start a SuperLink and SuperNodes on this machine; Ctrl-C stops them.

    Example: fedp3 flower up --nodes 3 --tls
    """
    from fedp3.engines.catalogue import check_engine

    check_engine("flower")
    from fedp3.deploy.cluster import Place, check_address, cluster

    check_address(host, tls, insecure)
    place = Place(folder=folder, host=host, port=port, tls=tls)
    node_config = f'data-dir="{data_dir.absolute()}"' if data_dir else ""
    try:
        with stoppable(), cluster(place, nodes, lambda _: node_config) as running:
            count = f"{nodes} node" if nodes == 1 else f"{nodes} nodes"
            secured = " with TLS" if tls else ""
            terminal.line(
                f"{count} on {running.place.address}{secured}; logs in {os.path.relpath(folder)}"
            )
            terminal.line(f"next: FLWR_HOME={running.place.home} flwr run APP up --stream")
            _watch(running, folder)
    except Stopped:
        terminal.note("stopped")
    except OSError as error:
        raise InputError(f"cannot start a cluster in {folder}: {error.strerror or error}") from None


def _watch(running: "Cluster", folder: Path) -> None:
    """Report nodes that end; raise when the SuperLink ends."""
    while running.superlink.poll() is None:
        ended = [i for i, node in running.nodes.items() if node.poll() is not None]
        for i in ended:
            terminal.note(f"node {i} ended; the reason is in {folder}/node-{i}.log")
            del running.nodes[i]
        time.sleep(0.5)
    raise RunError(f"the SuperLink ended; the reason is in {folder}/superlink.log")


@app.command("key")
def key(
    path: Annotated[
        Path, typer.Argument(help="File for the private key; the public key goes to PATH.pub")
    ],
) -> None:
    """Make the key of a node, for a SuperLink with TLS.

    Example: fedp3 flower key node-0
    """
    from fedp3.engines.catalogue import check_engine

    check_engine("flower")
    from fedp3.deploy.certificates import make_node_key

    if path.exists():
        raise InputError(f"{path} exists; a key is never overwritten")
    make_node_key(path)
    terminal.line(
        f"keep {path} on this machine; "
        f"next, on that of the SuperLink: flwr supernode register {path.name}.pub up"
    )
