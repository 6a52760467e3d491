"""`fedp3 permit`: a run owner's signature, which nodes may require."""

import time
from pathlib import Path
from typing import Annotated

import typer

from fedp3.cli import terminal
from fedp3.cli.options import Overrides
from fedp3.core.errors import InputError

app = typer.Typer(
    help="Sign a run off the server, for nodes that act on signed runs only.",
    no_args_is_help=True,
    epilog="Example: fedp3 permit sign myapp/fedp3_app/config.toml --key owner.key",
)


@app.command("key")
def key(path: Annotated[Path, typer.Argument(help="File for the private key")]) -> None:
    """Make the key of a run owner; prints the public key for the policies of nodes.

    Example: fedp3 permit key owner.key
    """
    from fedp3.node.permits import make_owner_key

    if path.exists():
        raise InputError(f"{path} exists; a key is never overwritten")
    public = make_owner_key(path)
    terminal.line(f"keep {path} off the server; in the policy of each node:")
    terminal.line(f'owners = ["{public}"]')


@app.command("sign")
def sign(
    config: Annotated[Path, typer.Argument(help="Config of the run")],
    key_file: Annotated[Path, typer.Option("--key", help="Private key of the run owner")],
    overrides: Overrides = None,
    days: Annotated[float, typer.Option("--days", min=0.0, help="How long it is valid")] = 30.0,
    run: Annotated[
        str, typer.Option("--run", help="Name of a run that was begun; by default a new run")
    ] = "",
    out: Annotated[Path, typer.Option("--out", help="File to write")] = Path("permit.json"),
) -> None:
    """Permit one run of a config for some days.

    Example: fedp3 permit sign myapp/fedp3_app/config.toml --key owner.key --days 7
    """
    import re

    from fedp3 import config as configs
    from fedp3.config.plugins import load_plugins
    from fedp3.core.files import write_atomic
    from fedp3.node.permits import permit_text, sign_permit

    load_plugins(())
    if run and not re.fullmatch("[0-9a-f]{32}", run):
        raise InputError(f"--run {run!r} is not the name of a run: 32 hex digits, from flower.json")
    digest = configs.load(config, overrides or []).digest()
    permit = sign_permit(key_file, digest, int(time.time() + days * 86400), run)
    write_atomic(out, (permit_text(permit) + "\n").encode())
    terminal.line(f"wrote {out}: run {permit.run}, config {digest[:16]}, until {permit.until}")
    terminal.line(f"next: flwr run APP --run-config 'permit=\"{out.absolute()}\"'")
