"""`fedp3 audit`: attack the code that a config would run under LDP."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedp3.cli import terminal
from fedp3.cli.options import AsJson, DataDir, Overrides, Use
from fedp3.core.errors import InputError, RunError

if TYPE_CHECKING:
    from fedp3.privacy.audit.attacks import Finding

RECORDS = 6  # of the made-up client that is attacked


def audit(
    path: Annotated[Path, typer.Argument(help="Config file of a run under LDP")],
    overrides: Overrides = None,
    data_dir: DataDir = None,
    use: Use = None,
    json: AsJson = False,
) -> None:
    """Attack the code that a config would run under LDP.

    The attacks measure sensitivity, noise, sampling, the ledger, and a lower bound of epsilon.

    Example: fedp3 audit my.toml privacy.enabled=true
    """
    from fedp3 import config
    from fedp3.config.plugins import load_plugins
    from fedp3.engines.base import one_thread
    from fedp3.experiment.assemble import assemble
    from fedp3.privacy.audit import attacks
    from fedp3.privacy.audit.neighbours import bench

    load_plugins(use or ())
    experiment = assemble(config.load(path, overrides or []), data_dir)
    budget, client = experiment.server.budget, experiment.client
    if budget is None:
        raise InputError(
            f"{path} runs without LDP, so there is nothing to audit; set privacy.enabled=true"
        )
    subject = attacks.Subject(
        budget=budget,
        local=client.local,
        others=experiment.config.plan.others,
        own=bench(client, experiment.first_plans[0], RECORDS),
    )
    terminal.note("attacking local_update; this takes about half a minute on one core")
    with one_thread():  # as in training; more threads do not speed up many small steps
        findings = attacks.audit(subject)
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
        "measured": finding.measured,
        "passed": finding.passed,
        "limits": _limits(finding),
    }


def _show(findings: "Sequence[Finding]") -> None:
    columns = {
        "part": "left",
        "check": "left",
        "measured": "right",
        "limits": "left",
        "result": "left",
    }
    rows = [
        (f.part, f.what, f"{f.measured:.3g}", _limits(f), "ok" if f.passed else "FAILED")
        for f in findings
    ]
    terminal.table(columns, rows)
    passed = len([f for f in findings if f.passed])
    terminal.line(
        f"{passed} of {len(findings)} checks passed; docs/privacy.md describes each of them"
    )


def _limits(finding: "Finding") -> str:
    return f"{finding.low:.3g} to {finding.high:.3g}"
