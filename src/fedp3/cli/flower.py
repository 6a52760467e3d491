"""Flower: write a run as an app for `flwr run`, and start a SuperLink with SuperNodes on this machine."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from fedp3.cli import show
from fedp3.cli.plan import DataDir, Overrides
from fedp3.cli.stop import Stopped, stoppable
from fedp3.errors import InputError, RunError

app = typer.Typer(
    help="Flower: write a run as an app, start a SuperLink and SuperNodes.",
    no_args_is_help=True,
    epilog="Example: fedp3 flower up",
)


@app.command("app")
def write(
    folder: Annotated[Path, typer.Argument(help="Folder to write the app to")],
    config: Annotated[Path, typer.Option("--config", help="Config file")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", help="Run folder of the server; else DIR/run")] = None,
    data_dir: DataDir = None,
) -> None:
    """Write a complete Flower app that carries out a config, for `flwr run`.

    Example: fedp3 flower app myapp --config my.toml
    """
    from fedp3 import config as configs
    from fedp3.driver import check_engine

    check_engine("flower")
    from fedp3.engines.flower.app import write_app
    from fedp3.experiment import assemble

    settings = configs.load(config, overrides or [])
    assemble(settings, data_dir)  # every mistake shows before a node sees it
    write_app(folder, settings, out or folder / "run", data_dir)
    show.tell(f"wrote {folder}; {settings.partition.clients} clients, each a node with its own partition-id")
    show.tell(f"next: flwr run {folder} --stream, on the SuperLink of your choice; fedp3 flower up starts one here")


@app.command("up")
def up(
    nodes: Annotated[int, typer.Option("--nodes", min=0, help="SuperNodes to start here, one per client")] = 3,
    tls: Annotated[bool, typer.Option("--tls", help="Make certificates and node keys, and let in nobody else")] = False,
    host: Annotated[str, typer.Option("--host", help="Address the SuperLink listens on")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Its port; 0: a free one")] = 0,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address that other machines reach, without TLS")
    ] = False,
    folder: Annotated[Path, typer.Option("--dir", help="Folder for connection, keys and logs")] = Path("flower"),
    data_dir: DataDir = None,
) -> None:
    """Start a SuperLink and SuperNodes on this machine; Ctrl-C stops them.

    Example: fedp3 flower up --nodes 3 --tls
    """
    from fedp3.driver import check_engine

    check_engine("flower")
    from fedp3.engines.flower.cluster import Place, check_address, cluster

    check_address(host, tls, insecure)
    extra = f'data-dir="{data_dir.absolute()}"' if data_dir else ""
    try:
        with stoppable(), cluster(Place(folder, host, port, tls), nodes, lambda _: extra) as running:
            place = running.place
            several = f"{nodes} node{'' if nodes == 1 else 's'}"
            secured = " with TLS" if tls else ""
            show.tell(f"{several} on {place.address}{secured}; logs in {os.path.relpath(folder)}")
            show.tell(f"next: FLWR_HOME={place.home} flwr run APP up --stream")
            while running.superlink.poll() is None:
                gone = [i for i, node in running.nodes.items() if node.poll() is not None]
                for i in gone:
                    show.say(f"node {i} ended; {folder}/node-{i}.log says why")
                    del running.nodes[i]
                time.sleep(0.5)
            raise RunError(f"the SuperLink ended; {folder}/superlink.log says why")
    except Stopped:
        show.say("stopped")
    except OSError as error:
        raise InputError(f"cannot start a cluster in {folder}: {error.strerror or error}") from None


@app.command("key")
def key(path: Annotated[Path, typer.Argument(help="File to write; the public half goes to PATH.pub")]) -> None:
    """Make the key of a node, for a SuperLink with TLS.

    Example: fedp3 flower key node-0
    """
    from fedp3.driver import check_engine

    check_engine("flower")
    from fedp3.engines.flower.certificates import make_node_key

    if path.exists():
        raise InputError(f"{path} exists; a key is never overwritten")
    make_node_key(path)
    show.tell(f"{path} stays here; next, where the SuperLink is: flwr supernode register {path.name}.pub up")
