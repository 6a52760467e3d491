"""`fedp3 watch`: a page about a run while it trains."""

import time
from pathlib import Path
from typing import Annotated

import typer

from fedp3.cli import terminal
from fedp3.cli.options import AsJson
from fedp3.cli.signals import Stopped, stoppable


def watch(
    folder: Annotated[Path, typer.Argument(help="Run folder")],
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port on this machine; 0 chooses one")
    ] = 0,
    json: AsJson = False,
) -> None:
    """Show a run in a browser while it trains: rounds, time left, clients and the report.

    The page can stop the run after its current round, as Ctrl-C does. It is served to this machine
    only, at an address with a random token, until you press Ctrl-C here; that does not stop the
    run. It works for every engine, because it reads the run folder.

    Example: fedp3 watch runs/a --port 8000
    """
    from fedp3.report.watch import Server

    with stoppable(), Server(folder, port) as server:
        if json:
            terminal.as_json({"url": server.address.url, "port": server.address.port})
        else:
            terminal.line(f"open {server.address.url}")
            terminal.note("Ctrl-C ends watching, not the run")
        try:
            while True:
                time.sleep(3600)
        except Stopped:
            return
