"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings that override the file, as in local.lr=0.05", show_default=False),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help="Folder of data sets; by default the one that FEDP3_DATA names, or the cache",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object")]
Workers = Annotated[
    int,
    typer.Option(
        "--workers",
        min=0,
        help="Number of worker processes; 0 chooses by the size of the run. "
        "The result is the same with any number",
    ),
]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        help="inprocess; flower (Flower's simulation); "
        "debug (an exception of a client's code ends the run with its traceback)",
    ),
]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard events")]
Use = Annotated[
    list[Path] | None,
    typer.Option(
        "--use",
        help="Python file that registers user-defined parts; repeat the option for several",
    ),
]
Folders = Annotated[list[Path], typer.Argument(help="Run folders")]
Target = Annotated[
    float | None,
    typer.Option(
        "--target",
        help="The G whose cost is measured, in rounds, MB and virtual time, as in 0.8; "
        "by default 98 % of the best final G of these runs (102 % where less is better)",
        show_default=False,
    ),
]
