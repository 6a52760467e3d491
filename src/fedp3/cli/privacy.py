"""`fedp3 privacy`: epsilons, noise, ledgers, and the statement of a run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedp3.cli import terminal
from fedp3.cli.options import AsJson
from fedp3.core.errors import InputError
from fedp3.core.files import finite_or_none

app = typer.Typer(
    help="Compute epsilons and noise under LDP, show ledgers, and write the statement of a run.",
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
    result = {"epsilon": finite_or_none(spent), "noise_multiplier": noise_multiplier}
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
        forms.append({"c": c, "noise_multiplier": noise, "epsilon": finite_or_none(spent)})
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


@app.command("ledger")
def show_ledger(
    path: Annotated[Path, typer.Argument(help="Ledger file, run folder or folder of a node")],
    csv: Annotated[bool, typer.Option("--csv", help="Print all lines as CSV")] = False,
    json: AsJson = False,
) -> None:
    """Check a ledger's chain of hashes, and show or export its entries.

    Example: fedp3 privacy ledger runs/a
    """
    from dataclasses import asdict, fields

    from fedp3.privacy import ledger

    folder = path if path.is_dir() else path.parent
    if not (folder / ledger.FILE).exists() or (path.is_file() and path.name != ledger.FILE):
        raise InputError(f"{path} is not a ledger: want a file {ledger.FILE}, or its folder")
    charges = ledger.read(folder)
    if csv:
        names = [field.name for field in fields(ledger.Charge)]
        print(",".join(names))
        for c in charges:
            print(",".join("" if v is None else str(v) for v in asdict(c).values()))
        return
    anchor = ledger.anchor_of(folder)
    if json:
        charged = [asdict(c) for c in charges]
        terminal.as_json({"charges": charged, "entries": anchor.entries, "last": anchor.last})
        return
    columns = dict.fromkeys(("client", "account"), "left") | dict.fromkeys(
        ("tasks", "steps", "epsilon", "last"), "right"
    )
    rows_by_client: dict[tuple[int, str], list[Any]] = {}
    for c in charges:
        rows_by_client.setdefault((c.client, c.account), []).append(c)
    rows = []
    for (client, account), own in sorted(rows_by_client.items()):
        last = own[-1]
        spent = "-" if last.epsilon is None else f"{last.epsilon:.4g}"
        steps = sum(c.steps for c in own)
        rows.append((str(client), account, str(len(own)), str(steps), spent, last.time))
    terminal.table(columns, rows)
    terminal.line(f"{anchor.entries} lines, chain complete; last line {anchor.last[:16]}")


@app.command("statement")
def write_statement(
    folder: Annotated[Path, typer.Argument(help="Run folder of a run with privacy enabled")],
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write; by default RUN/privacy.md")
    ] = None,
) -> None:
    """Write the privacy statement of a run, for a reviewer to check and sign.

    Example: fedp3 privacy statement runs/a
    """
    from fedp3.core.files import read_json, write_atomic
    from fedp3.privacy import ledger
    from fedp3.privacy.client_level.budget import FOLDER
    from fedp3.privacy.client_level.statement import client_statement
    from fedp3.privacy.statement import statement

    about = read_json(folder / "run.json")
    modes = {"privacy": (folder, statement), "client_privacy": (folder / FOLDER, client_statement)}
    texts = [
        write(folder.resolve().name, about, ledger.read(place), ledger.anchor_of(place))
        for key, (place, write) in modes.items()
        if key in about
    ]
    if not texts:
        raise InputError(f"{folder} ran without privacy: nothing is promised, so nothing is stated")
    (text,) = texts
    path = out or folder / "privacy.md"
    write_atomic(path, (text + "\n").encode())
    terminal.line(f"wrote {path}")


def _check(rate: float, steps: int) -> None:
    if not 0 < rate <= 1:
        raise InputError(f"--sample-rate must be a probability in (0, 1], got {rate:g}")
    if steps < 1:
        raise InputError(f"--steps must be at least 1, got {steps}")


def _assumptions(rate: float, steps: int, delta: float) -> dict[str, Any]:
    from fedp3.privacy import accountant

    return {
        "accountant": accountant.describe(),
        "adjacency": accountant.ADJACENCY,
        "sampling": accountant.SAMPLING,
        "sample_rate": rate,
        "steps": steps,
        "delta": delta,
    }
