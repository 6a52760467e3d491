"""`fedp3 export`: a network of a run as a file that needs no fedp3."""

import os
from pathlib import Path
from typing import Annotated

import typer

from fedp3.cli import terminal
from fedp3.cli.options import AsJson, DataDir


def export(
    folder: Annotated[Path, typer.Argument(help="Run folder")],
    client: Annotated[
        int | None,
        typer.Option("--client", help="Whose network, from 0", show_default=False),
    ] = None,
    what: Annotated[
        str | None,
        typer.Option(
            "--what",
            help="global, the server's network; dispatched, as a client is sent it; or personal, "
            "after the client's local training. By default global, or dispatched with --client",
            show_default=False,
        ),
    ] = None,
    format: Annotated[
        str, typer.Option("--format", help="pt2 (torch.export), safetensors, onnx or hf")
    ] = "pt2",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="New folder; by default in RUN/export", show_default=False),
    ] = None,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Write a trained network as a file that plain PyTorch or ONNX Runtime loads.

    The folder has a README with the lines that load it. The file is loaded again and its outputs
    are compared with the network's. A client's network is really smaller where units are pruned.

    Example: fedp3 export runs/a --client 7 --what dispatched --format onnx
    """
    from fedp3.runs import export as exports
    from fedp3.runs.networks import read_trained

    what = what or ("global" if client is None else "dispatched")
    name = what if client is None else f"{what}-{client}"
    place = out or folder / "export" / f"{name}-{format}"
    exports.check_format(format)
    exports.check_folder(place)
    about = exports.export(
        read_trained(folder, data_dir), place, what=what, client=client, format=format
    )
    if json:
        terminal.as_json(about)
        return
    share = about["parameters"] / about["parameters_of_the_global_network"]
    size = f"{about['parameters']:,} parameters, {terminal.share(share, 0)} of the global network"
    terminal.line(f"{size}; outputs differ by {about['difference']:.1e} of the largest")
    terminal.line(f"read {os.path.relpath(place / 'README.md')}")
