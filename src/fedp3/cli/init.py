"""`fedp3 init`: write a commented config, or translate an old one."""

from pathlib import Path
from typing import Annotated

import typer

from fedp3.cli import terminal
from fedp3.cli.options import Use
from fedp3.core.errors import InputError


def init(
    path: Annotated[Path, typer.Argument(help="File to write")] = Path("my.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists")] = False,
    source: Annotated[
        Path | None, typer.Option("--from", help="Config of version 0.1.0.dev to translate")
    ] = None,
    use: Use = None,
) -> None:
    """Write a commented config; its run on handwritten digits takes seconds.

    With --from, translate a config of version 0.1.0.dev instead.

    Example: fedp3 init my.toml
    """
    from fedp3 import config
    from fedp3.config.plugins import load_plugins

    load_plugins(use or ())  # so that the comments list what they register
    if path.exists() and not force:
        raise InputError(f"{path} exists; choose another name, or overwrite it with --force")
    notes: list[str] = []
    text = config.template()
    if source is not None:
        text, notes = _translated(source)
    try:
        path.write_text(text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    for note in notes:
        terminal.line(note)
    terminal.line(f"wrote {path}; next: fedp3 plan {path}, then fedp3 run {path}")


def _translated(source: Path) -> tuple[str, list[str]]:
    """An old config in today's keys, and a line about each change."""
    from fedp3.config.legacy import translate
    from fedp3.config.load import parse, read_toml
    from fedp3.config.toml import toml_document

    tables, notes = translate(read_toml(source))
    parse(tables, where=str(source), folder=source.parent)  # refuses what cannot be translated
    return toml_document(tables), notes
