"""The command line.  Heavy imports wait until a command needs them, so that `--help` is fast.

Any installed package can add commands.  It names a function in the entry point group
`fedp3.commands`; that function takes a Typer app and adds its commands to it:

    [project.entry-points."fedp3.commands"]
    hello = "my_package.commands:register"
"""

import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from inspect import cleandoc
from typing import Annotated

import click
import typer
from typer.core import TyperGroup

from fedp3 import __version__
from fedp3.cli import (
    audit,
    compare,
    data,
    demo,
    devices,
    doctor,
    export,
    flower,
    init,
    methods,
    node,
    permit,
    plan,
    privacy,
    report,
    resume,
    run,
    sample,
    sweep,
    watch,
)
from fedp3.cli.signals import Stopped
from fedp3.core.errors import FedP3Error, InputError

GROUP = "fedp3.commands"
# Commands of the package in paper/, which is in a checkout of the repository but in no wheel.
IN_A_CHECKOUT = ("reproduce", "theory", "utility")
ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True}


def _flow(app: typer.Typer) -> None:
    """Join the lines of each paragraph of help, of which Typer keeps the breaks."""
    for command in app.registered_commands:
        paragraphs = cleandoc(getattr(command.callback, "__doc__", "") or "").split("\n\n")
        command.help = command.help or "\n\n".join(" ".join(p.split()) for p in paragraphs)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _flow(group.typer_instance)


def command_line(offered: Iterable[EntryPoint]) -> typer.Typer:
    """The Typer app with all commands.

    Args:
        offered: entry points of other packages that add commands.
    """
    app = typer.Typer(
        name="fedp3",
        help="Train one network over devices that cannot all hold, compute or upload all of it.",
        epilog="Example: fedp3 demo",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_options)
    app.command("demo")(demo.demo)
    app.command("init")(init.init)
    app.command("plan")(plan.plan)
    app.command("methods")(methods.methods)
    app.command("run")(run.run)
    app.command("resume")(resume.resume)
    app.command("watch")(watch.watch)
    app.command("report")(report.report)
    app.command("export")(export.export)
    app.command("sample")(sample.sample)
    app.command("sweep")(sweep.sweep)
    app.command("compare")(compare.compare)
    app.add_typer(data.app, name="data")
    app.add_typer(devices.app, name="devices")
    app.add_typer(privacy.app, name="privacy")
    app.command("audit")(audit.audit)
    app.add_typer(flower.app, name="flower")
    app.add_typer(node.app, name="node")
    app.add_typer(permit.app, name="permit")
    app.command("doctor")(doctor.doctor)
    # Where the package of these commands is installed, it replaces them below.
    for name in IN_A_CHECKOUT:
        absent = app.command(
            name, hidden=True, add_help_option=False, context_settings=ANY_ARGUMENTS
        )
        absent(_absent)
    for entry in sorted(offered):
        _add(app, entry)
    _flow(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fedp3 {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit"
        ),
    ] = False,
) -> None:
    """Options of `fedp3` itself."""


def _absent(context: typer.Context) -> None:
    raise InputError(
        f"`fedp3 {context.info_name}` comes with a checkout of the repository; "
        "there, run: pip install -e paper"
    )


def _add(app: typer.Typer, entry: EntryPoint) -> None:
    """Add the commands of one entry point; if that fails, print one line about it and go on."""
    added = typer.Typer()
    try:
        entry.load()(added)
        typer.main.get_command(added)  # raises here, not in every call, if Typer cannot build it
    except Exception as error:
        package = entry.dist.name if entry.dist else entry.value
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"fedp3: left out the command {entry.name!r} of {package}: {reason}", file=sys.stderr)
        return
    app.registered_commands += added.registered_commands
    app.registered_groups += added.registered_groups


def _suggest_once(command: click.Command) -> None:
    """Let only one of Click, which does so since 8.4, and Typer suggest similar commands."""
    if isinstance(command, TyperGroup) and hasattr(click.exceptions, "NoSuchCommand"):
        command.suggest_commands = False
        for part in command.commands.values():
            _suggest_once(part)


def main(
    arguments: Sequence[str] | None = None,
    offered: Iterable[EntryPoint] | None = None,
) -> None:
    """Run the command line.

    The exit code is 0 on success, 1 if the run failed, 2 for wrong input, and 130 or 143 if the
    command was stopped by a signal; a stopped run can be resumed.

    Args:
        arguments: None takes those of the process.
        offered: entry points that add commands; None takes those of all installed packages.
    """
    app = command_line(entry_points(group=GROUP) if offered is None else offered)
    command = typer.main.get_command(app)
    _suggest_once(command)
    try:
        command(args=list(arguments) if arguments is not None else None, standalone_mode=True)
    except Stopped as stopped:
        sys.exit(128 + stopped.signal)
    except FedP3Error as error:
        print(f"fedp3: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)
    except OSError as error:
        if error.filename is None:  # not about a file, so there is nothing that the user can fix
            raise
        print(f"fedp3: cannot read or write {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(1)
