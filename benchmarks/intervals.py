"""Differences that are paired by seed, as text."""

from collections.abc import Sequence

from fedp3.report.paired import Difference, difference


def shown(d: Difference | None) -> str:
    """A difference of shares in points, with its 95 % interval if there are seeds enough."""
    if d is None:
        return "–"
    if d.low is None or d.high is None:
        return f"{100 * d.mean:+.1f}"
    return f"{100 * d.mean:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]"


def interval(differences: Sequence[float]) -> str:
    """The mean of paired differences, with its 95 % interval."""
    return shown(
        difference(dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0))
    )
