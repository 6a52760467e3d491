"""`fedp3 privacy`: the epsilon of private steps, and the noise for an epsilon."""

import math
from typing import Annotated, Any

import typer

from fedp3.cli import terminal
from fedp3.cli.options import AsJson
from fedp3.core.errors import InputError

app = typer.Typer(
    help="Compute the epsilon of private steps under LDP, and the noise for an epsilon.",
    no_args_is_help=True,
    epilog="Example: fedp3 privacy sigma --epsilon 8 --sample-rate 0.1 --steps 160",
)

Rate = Annotated[
    float, typer.Option("--sample-rate", help="Probability q with which a step uses a record")
]
Steps = Annotated[
    int, typer.Option("--steps", help="Total steps: rounds that a client joins times local steps")
]
Delta = Annotated[
    float, typer.Option("--delta", help="Delta, well below 1 / (records of the client)")
]
# The paper leaves the constant c of its closed form open; its sources lead to one of these.
PAPER_CONSTANTS = (2.0, 4.0)


@app.command("epsilon")
def epsilon(
    noise_multiplier: Annotated[
        float,
        typer.Option(
            "--noise-multiplier",
            help="Noise multiplier z: standard deviation of the noise divided by the clipping norm",
        ),
    ],
    sample_rate: Rate,
    steps: Steps,
    delta: Delta = 1e-5,
    json: AsJson = False,
) -> None:
    """Compute the epsilon of a number of private steps.

    Example: fedp3 privacy epsilon --noise-multiplier 1.1 --sample-rate 0.1 --steps 160
    """
    from fedp3.privacy import accountant

    _check(sample_rate, steps)
    spent = accountant.epsilon({(noise_multiplier, sample_rate): steps}, delta)
    result = {"epsilon": _finite(spent), "noise_multiplier": noise_multiplier}
    result |= _assumptions(sample_rate, steps, delta)
    if json:
        terminal.as_json(result)
        return
    terminal.line(
        f"epsilon {spent:.4g} at delta {delta:g} "
        f"({result['adjacency']}, {result['sampling']} sampling)"
    )
    terminal.line(f"accountant {result['accountant']}")


@app.command("sigma")
def sigma(
    epsilon: Annotated[float, typer.Option("--epsilon", help="Target epsilon")],
    sample_rate: Rate,
    steps: Steps,
    delta: Delta = 1e-5,
    json: AsJson = False,
) -> None:
    """Compute the least noise for a target epsilon, and what the paper's closed form gives.

    Example: fedp3 privacy sigma --epsilon 8 --sample-rate 0.1 --steps 160
    """
    from fedp3.privacy import accountant

    _check(sample_rate, steps)
    z = accountant.noise_multiplier(epsilon, delta, sample_rate, steps)
    forms = []
    for c in PAPER_CONSTANTS:
        noise = accountant.paper_noise(epsilon, delta, sample_rate, steps, c)
        spent = accountant.epsilon({(noise, sample_rate): steps}, delta)
        forms.append({"c": c, "noise_multiplier": noise, "epsilon": _finite(spent)})
    result = {"noise_multiplier": z, "epsilon": epsilon, "paper": forms}
    result |= _assumptions(sample_rate, steps, delta)
    if json:
        terminal.as_json(result)
        return
    setting = f"privacy.noise_multiplier={z:g}"
    if z == 0:  # only an unlimited budget allows no noise
        setting += " privacy.epsilon=inf"
    terminal.line(
        f"noise multiplier {z:.4g} for epsilon {epsilon:g} at delta {delta:g} "
        f"({result['adjacency']}, {result['sampling']} sampling); in a run: {setting}"
    )
    for form in forms:
        real = "an unbounded epsilon"
        if form["epsilon"] is not None:
            real = f"epsilon {form['epsilon']:.4g}"
        terminal.line(
            f"the paper's closed form with c = {form['c']:g}: {form['noise_multiplier']:.4g}, "
            f"which really gives {real}"
        )
    terminal.line(f"accountant {result['accountant']}")


def _check(rate: float, steps: int) -> None:
    if not 0 < rate <= 1:
        raise InputError(f"--sample-rate must be a probability in (0, 1], got {rate:g}")
    if steps < 1:
        raise InputError(f"--steps must be at least 1, got {steps}")


def _finite(value: float) -> float | None:
    """The value, or None for infinity, which JSON does not have."""
    return None if math.isinf(value) else value


def _assumptions(rate: float, steps: int, delta: float) -> dict[str, Any]:
    from fedp3.privacy import accountant

    return {
        "accountant": accountant.describe(accountant.best()),
        "adjacency": accountant.ADJACENCY,
        "sampling": accountant.SAMPLING,
        "sample_rate": rate,
        "steps": steps,
        "delta": delta,
    }
