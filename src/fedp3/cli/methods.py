"""`fedp3 methods`: the methods that a config can name, and what they set."""

from typing import Annotated

import typer

from fedp3.cli import terminal
from fedp3.cli.options import AsJson, Use

Name = Annotated[
    str, typer.Argument(metavar="[METHOD]", help="List what this method sets", show_default=False)
]


def methods(method: Name = "", use: Use = None, json: AsJson = False) -> None:
    """List the methods that a config can name, or what one of them sets.

    Example: fedp3 methods

    Example: fedp3 methods heterofl
    """
    from fedp3.config.plugins import load_plugins
    from fedp3.config.toml import toml_value
    from fedp3.methods import METHODS

    load_plugins(use or ())
    if method:
        chosen = METHODS.pick(method)
        if json:
            terminal.as_json({"method": method, "about": chosen.about, "sets": chosen.settings})
            return
        terminal.line(f"{method}: {chosen.about}")
        for section, keys in chosen.settings.items():
            for key, value in keys.items():
                terminal.line(f"  {section}.{key} = {toml_value(value)}")
        if not chosen.settings:
            terminal.line("  sets nothing: its settings are the defaults")
        return
    if json:
        terminal.as_json({name: entry.about for name, entry in METHODS.items()})
        return
    for name, entry in METHODS.items():
        terminal.line(f"{name:<13} {entry.about}")
