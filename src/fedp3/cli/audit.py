"""`fedp3 audit`: attack the code that a config would run under LDP."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedp3.cli import terminal
from fedp3.cli.options import AsJson, DataDir, Overrides, Use
from fedp3.core.errors import InputError, RunError

if TYPE_CHECKING:
    from fedp3.privacy.audit.findings import Finding


def audit(
    path: Annotated[Path, typer.Argument(help="Config file of a run under LDP")],
    overrides: Overrides = None,
    only: Annotated[
        str,
        typer.Option(
            help="Parts to run, separated by commas: sensitivity, noise, independence, sampling, "
            "distinguishing, composition, charging, releases, accountant",
            metavar="NAMES",
        ),
    ] = "",
    seed: Annotated[
        int, typer.Option(help="Seed of the made-up records and random directions", min=0)
    ] = 0,
    data_dir: DataDir = None,
    use: Use = None,
    json: AsJson = False,
) -> None:
    """Attack the code that a config would run under LDP.

    Short runs on made-up records, with the config's network, plans and settings, are compared with
    what the guarantee allows: clipping, noise, sampling, the ledger, everything that leaves a
    client, and the accountant.  The exit code is 1 if a check fails.

    Example: fedp3 audit my.toml privacy.enabled=true --only noise,charging
    """
    from fedp3 import config
    from fedp3.config.plugins import load_plugins
    from fedp3.core.threads import one_thread
    from fedp3.experiment.assemble import assemble
    from fedp3.privacy.audit import audit as attacks
    from fedp3.runs.rehearsal import audit_subject

    load_plugins(use or ())
    experiment = assemble(config.load(path, overrides or []), data_dir)
    if experiment.server.budget is None:
        raise InputError(
            f"{path} runs without LDP, so there is nothing to audit; set privacy.enabled=true"
        )
    parts = [name.strip() for name in only.split(",") if name.strip()] or attacks.NAMES
    subject = audit_subject(experiment, seed)
    with one_thread():  # as in training; more threads do not speed up many small steps
        findings = attacks.audit(
            subject, parts, lambda name: terminal.note(f"auditing: {name} ...")
        )
    failed = [finding for finding in findings if not finding.passed]
    if json:
        terminal.as_json({"passed": not failed, "findings": [_as_row(f) for f in findings]})
    else:
        _show(findings)
        if not failed:
            terminal.line("next: " + terminal.command("run", path, *(overrides or [])))
    if failed:
        raise RunError(
            f"{len(failed)} checks failed, so the claimed epsilon does not hold for this code: "
            "do not release its results"
        )


def _as_row(finding: "Finding") -> dict[str, Any]:
    return {
        "part": finding.part,
        "what": finding.what,
        "where": finding.where,
        "note": finding.note,
        "measured": _number(finding.measured),
        "low": _number(finding.low),
        "high": _number(finding.high),
        "p_value": finding.p_value,
        "refutable_epsilon": _number(finding.refutable),
        "error": finding.error,
        "passed": finding.passed,
    }


def _number(value: float | None) -> float | None:
    """JSON has neither infinity nor NaN."""
    return value if value is not None and math.isfinite(value) else None


def _show(findings: "Sequence[Finding]") -> None:
    """One row for each check; of those that were made in several places, the worst."""
    columns = {
        "part": "left",
        "check": "left",
        "places": "right",
        "measured": "right",
        "wanted": "left",
        "result": "left",
    }
    by_check: dict[tuple[str, str], list[Finding]] = {}
    for f in findings:
        by_check.setdefault((f.part, f.what), []).append(f)
    rows = []
    for (part, what), alike in by_check.items():
        worst = min(alike, key=_how_far)
        result = "ok" if worst.passed else _failure(worst)
        cells = (part, what, str(len(alike)), f"{worst.measured:.3g}", _wanted(worst), result)
        rows.append(cells)
    terminal.table(columns, rows)
    passed = len([f for f in findings if f.passed])
    terminal.line(f"{passed} of {len(findings)} checks passed; docs/privacy.md describes the parts")


def _how_far(finding: "Finding") -> tuple[bool, float, float]:
    """A key that is smallest for the finding that is worst."""
    p_value = 1.0 if finding.p_value is None else finding.p_value
    return finding.passed, p_value, -finding.measured


def _wanted(finding: "Finding") -> str:
    """The limits of a finding, or the probability of its value, and the epsilon it could refute."""
    if finding.p_value is not None:
        text = f"p = {finding.p_value:.2g}"
    elif finding.low == finding.high:
        text = f"{finding.low:.4g}"
    elif math.isinf(finding.low):
        text = f"at most {finding.high:.4g}"
    elif math.isinf(finding.high):
        text = f"at least {finding.low:.4g}"
    else:
        text = f"{finding.low:.4g} to {finding.high:.4g}"
    if finding.refutable is not None:
        text += f" (could refute epsilon up to {finding.refutable:.3g})"
    return text


def _failure(finding: "Finding") -> str:
    details = [text for text in (finding.where, finding.note, finding.error) if text]
    return "FAILED" + (f": {', '.join(details)}" if details else "")
