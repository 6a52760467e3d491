"""The command line.  Heavy imports wait until a command needs them, so that `--help` answers at once."""

import sys
from collections.abc import Sequence

import typer

from fedp3.cli import data, demo, doctor, flower, plan, privacy, reproduce, runs, sweep
from fedp3.cli.stop import Stopped
from fedp3.errors import FedP3Error, InputError

app = typer.Typer(
    name="fedp3",
    help="Train one network over devices that cannot all hold, compute or upload it.",
    epilog="Start with: fedp3 demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("demo")(demo.demo)
app.command("init")(plan.init)
app.command("plan")(plan.plan)
app.command("methods")(plan.methods)
app.command("run")(runs.run)
app.command("resume")(runs.resume)
app.command("report")(sweep.report)
app.command("sweep")(sweep.sweep)
app.command("compare")(sweep.compare)
app.command("reproduce")(reproduce.reproduce)
app.add_typer(data.app, name="data")
app.add_typer(privacy.app, name="privacy")
app.command("audit")(privacy.audit)
app.add_typer(flower.app, name="flower")
app.command("doctor")(doctor.doctor)


@app.command(
    "theory", add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
def theory(context: typer.Context) -> None:
    """The paper's theorems as experiments.

    Example: fedp3 theory theorem1 --out figures
    """
    from fedp3.theory.app import app as experiments  # brings torch along, which --help need not wait for

    experiments(args=context.args, prog_name="fedp3 theory")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: exit 0 fine, 1 the run failed, 2 wrong input, 130 or 143 stopped and resumable."""
    try:
        app(args=list(arguments) if arguments is not None else None, standalone_mode=True)
    except Stopped as stopped:
        sys.exit(128 + stopped.signal)
    except FedP3Error as error:
        print(f"fedp3: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)
    except OSError as error:
        if error.filename is None:  # no file that was named: not the user's matter
            raise
        print(f"fedp3: cannot read or write {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(1)
