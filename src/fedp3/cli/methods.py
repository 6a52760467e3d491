"""`fedp3 methods`: the methods that a config can name."""

from fedp3.cli import terminal
from fedp3.cli.options import AsJson, Use


def methods(use: Use = None, json: AsJson = False) -> None:
    """List the methods that a config can name.

    Example: fedp3 methods
    """
    from fedp3.config.plugins import load_plugins
    from fedp3.methods import METHODS

    load_plugins(use or ())
    if json:
        terminal.as_json({name: method.about for name, method in METHODS.items()})
        return
    for name, method in METHODS.items():
        terminal.line(f"{name:<13} {method.about}")
