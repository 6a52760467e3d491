"""LDP on paper and under attack: what steps cost, what noise a budget asks for, and an audit of the code that runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedp3.cli import show
from fedp3.cli.plan import AsJson, DataDir, Overrides
from fedp3.cli.utility import utility
from fedp3.errors import InputError, RunError

app = typer.Typer(
    help="LDP: the epsilon of steps, the noise for an epsilon, the accuracy it leaves.",
    no_args_is_help=True,
    epilog="Example: fedp3 privacy sigma --epsilon 8 --sample-rate 0.1 --steps 160",
)

app.command("utility")(utility)

Rate = Annotated[float, typer.Option("--sample-rate", help="Chance of each record to be in a step, q")]
Steps = Annotated[int, typer.Option("--steps", help="Steps in all: rounds a client joins times its local steps")]
Delta = Annotated[float, typer.Option("--delta", help="Well below 1 / records of the client")]


def _checked(rate: float, steps: int) -> None:
    if not 0 < rate <= 1:
        raise InputError(f"--sample-rate is a chance in (0, 1], got {rate:g}")
    if steps < 1:
        raise InputError(f"--steps is a number from 1, got {steps}")


def _common(rate: float, steps: int, delta: float) -> dict[str, Any]:
    from fedp3.privacy import account

    return {
        "accountant": account.describe(account.best()),
        "adjacency": account.ADJACENCY,
        "sampling": account.SAMPLING,
        "sample_rate": rate,
        "steps": steps,
        "delta": delta,
    }


@app.command("epsilon")
def epsilon(
    noise_multiplier: Annotated[float, typer.Option("--noise-multiplier", help="Noise on a step's sum / clip, z")],
    sample_rate: Rate,
    steps: Steps,
    delta: Delta = 1e-5,
    json: AsJson = False,
) -> None:
    """What so many private steps cost.

    Example: fedp3 privacy epsilon --noise-multiplier 1.1 --sample-rate 0.1 --steps 160 --delta 1e-5
    """
    from fedp3.privacy import account

    _checked(sample_rate, steps)
    spent = account.epsilon({(noise_multiplier, sample_rate): steps}, delta)
    found = {"epsilon": spent if spent < float("inf") else None, "noise_multiplier": noise_multiplier}
    found |= _common(sample_rate, steps, delta)
    if json:
        show.as_json(found)
        return
    show.tell(f"epsilon {spent:.4g} at delta {delta:g} ({found['adjacency']}, {found['sampling']} sampling)")
    show.tell(f"accountant {found['accountant']}")


@app.command("sigma")
def sigma(
    epsilon: Annotated[float, typer.Option("--epsilon", help="Target")],
    sample_rate: Rate,
    steps: Steps,
    delta: Delta = 1e-5,
    json: AsJson = False,
) -> None:
    """The least noise for a target epsilon, and what the paper's closed form would really give.

    Example: fedp3 privacy sigma --epsilon 8 --sample-rate 0.1 --steps 160 --delta 1e-5
    """
    from fedp3.privacy import account

    _checked(sample_rate, steps)
    z = account.noise_multiplier(epsilon, delta, sample_rate, steps)
    forms = []
    for c in (2.0, 4.0):  # the paper names no constant; its sources lead to one of these
        noise = account.paper_noise(epsilon, delta, sample_rate, steps, c)
        really = account.epsilon({(noise, sample_rate): steps}, delta)
        forms.append({"c": c, "noise_multiplier": noise, "epsilon": really if really < float("inf") else None})
    found = {"noise_multiplier": z, "epsilon": epsilon, "paper": forms} | _common(sample_rate, steps, delta)
    if json:
        show.as_json(found)
        return
    key = f"noise_multiplier={z:g}" if z else "epsilon=inf"  # there 0 asks for the least noise of an epsilon
    show.tell(f"noise multiplier {z:.4g} for epsilon {epsilon:g} at delta {delta:g} ({found['adjacency']}, "
              f"{found['sampling']} sampling); in a run: privacy.{key}")  # fmt: skip
    for form in forms:
        spent = "an unbounded epsilon" if form["epsilon"] is None else f"epsilon {form['epsilon']:.4g}"
        closed = f"the paper's closed form with c = {form['c']:g}: {form['noise_multiplier']:.4g}"
        show.tell(f"{closed}, which really gives {spent}")
    show.tell(f"accountant {found['accountant']}")


def audit(
    path: Annotated[Path, typer.Argument(help="Config file of a run under LDP")],
    overrides: Overrides = None,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> None:
    """Attack the code that a config would run: sensitivity, noise, sampler, ledger, epsilon from below.

    Example: fedp3 audit my.toml privacy.enabled=true
    """
    from fedp3 import config
    from fedp3.engines.inprocess import one_thread
    from fedp3.experiment import assemble
    from fedp3.privacy import audit as attacks
    from fedp3.privacy.neighbours import bench
    from fedp3.server import plans_for

    experiment = assemble(config.load(path, overrides or []), data_dir)
    budget, recipe = experiment.problem.budget, experiment.recipe
    if budget is None:
        raise InputError(f"{path} runs without LDP, so there is nothing to audit; set privacy.enabled=true")
    own = bench(recipe, plans_for(experiment.problem, 0)[0], 6)
    subject = attacks.Subject(budget, recipe.local, experiment.config.privacy.others, own)
    show.say("attacking local_update; about half a minute of one core")
    with one_thread():  # as a client trains; many tiny steps gain nothing from more
        found = attacks.audit(subject)
    failed = [f for f in found if not f.passed]
    if json:
        show.as_json({"passed": not failed, "findings": [_row(f) for f in found]})
    else:
        _show(found)
        if not failed:
            show.tell("next: " + show.command("run", path, *(overrides or [])))
    if failed:
        raise RunError(
            f"{len(failed)} checks failed, so the claimed epsilon does not hold for this code: do not release"
        )


def _row(f: Any) -> dict[str, Any]:
    return {"part": f.part, "what": f.what, "measured": f.measured, "passed": f.passed, "limits": _limits(f)}


def _show(found: Sequence[Any]) -> None:
    columns = {"part": "left", "what": "left", "measured": "right", "limits": "left", "": "left"}
    rows = [(f.part, f.what, f"{f.measured:.3g}", _limits(f), "ok" if f.passed else "FAILED") for f in found]
    show.table(columns, rows)
    show.tell(f"{sum(f.passed for f in found)} of {len(found)} checks passed; what they are: docs/privacy.md")


def _limits(f: Any) -> str:
    return f"{f.low:.3g} to {f.high:.3g}"
