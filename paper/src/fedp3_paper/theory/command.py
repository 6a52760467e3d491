"""`fedp3 theory`: passes its arguments to the experiments in `app`."""

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the command line of fedp3."""
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command("theory", add_help_option=False, context_settings=anything)(theory)


def theory(context: typer.Context) -> None:
    """The paper's theorems as experiments.

    Example: fedp3 theory theorem1 --out figures
    """
    from fedp3_paper.theory.app import app  # imports torch, which `fedp3 --help` does not need

    app(args=context.args, prog_name="fedp3 theory")
