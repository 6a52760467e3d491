"""Numbers and names as text: 93.1 %, 4.21 MB, 2 min 5 s.  An unknown number is a dash."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedp3.core.scores import ACCURACY, Score
from fedp3.report.runs import Stat

NONE = "–"
NBSP = "\u00a0"


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of measurement, as a multiple of the smallest one."""

    name: str
    size: float
    words: str = ""  # the name in full, if it is shown alone


TIMES = (Unit("s", 1, "seconds"), Unit("min", 60, "minutes"), Unit("h", 3600, "hours"))
ENERGIES = (Unit("J", 1), Unit("kJ", 1e3), Unit("MJ", 1e6))


def unit(units: Sequence[Unit], largest: float) -> Unit:
    """The largest of these units of which the largest value has at least two.

    Args:
        units: from the smallest unit, which is the default, to the largest.
        largest: the largest value that is shown, in the smallest unit.
    """
    return next((u for u in reversed(units) if largest >= 2 * u.size), units[0])


def number(x: float | None) -> str:
    """A number with about three significant digits."""
    if x is None:
        return NONE
    size = abs(x)
    if size >= 99.95:
        digits = 0
    elif size >= 9.995:
        digits = 1
    elif size >= 0.0995 or size == 0:
        digits = 2
    else:
        digits = 3
    return f"{x:,.{digits}f}"


def percent(x: float | None) -> str:
    """A share of 1, in percent."""
    return NONE if x is None else f"{100 * x:.1f}{NBSP}%"


def mb(x: float | None) -> str:
    """A number of megabytes, in GB, MB, kB or bytes."""
    if x is None:
        return NONE
    for factor, unit in ((1e-3, "GB"), (1, "MB"), (1e3, "kB")):
        if abs(x) * factor >= 0.9995:
            return f"{number(x * factor)}{NBSP}{unit}"
    return f"{round(x * 1e6)}{NBSP}bytes"


def duration(seconds: float | None) -> str:
    """A time in seconds, in minutes and seconds, or in hours and minutes."""
    if seconds is None:
        return NONE
    if seconds < 59.95:
        return f"{seconds:.1f}{NBSP}s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{NBSP}min {remainder}{NBSP}s"
    return f"{minutes // 60:,}{NBSP}h {minutes % 60}{NBSP}min"


def score(kind: Score, value: float | None) -> str:
    """A value of a score."""
    return NONE if value is None else kind.text(value).replace(" ", NBSP)


def score_stat(kind: Score, value: Stat | None) -> str:
    """A score with its standard deviation over seeds."""
    if value is None or value.std is None:
        return score(kind, None if value is None else value.mean)
    unit = f"{NBSP}%" if kind.percent else ""
    return f"{kind.number(value.mean)} ± {kind.number(value.std)}{unit}"


def score_name(kind: Score, letter: str) -> str:
    """G, D or P in a sentence, with the name of the score unless it is the usual one."""
    return letter if kind == ACCURACY else f"{letter} ({kind.name})"


def difference_unit(kind: Score) -> str:
    """The unit of a difference between two scores."""
    return "in percentage points" if kind.percent else f"of {kind.name}"


def worst_end(kind: Score) -> str:
    """At which end of several scores the worst one is."""
    return "highest" if kind.lower_is_better else "lowest"


def energy(joules: float | None) -> str:
    """An energy in J, kJ or MJ."""
    if joules is None:
        return NONE
    chosen = unit(ENERGIES, 2 * joules)
    return f"{number(joules / chosen.size)}{NBSP}{chosen.name}"


def ranges(chosen: Sequence[str], layers: Sequence[str]) -> str:
    """The chosen layers in model order, with consecutive ones joined: "fc1–fc3, head".

    Args:
        chosen: names of the chosen layers.
        layers: all layers of the model, in order.
    """
    if len(set(chosen)) == len(layers):
        return "all"
    parts = []
    start: int | None = None
    for j in range(len(layers) + 1):
        if j < len(layers) and layers[j] in chosen:
            start = j if start is None else start
        elif start is not None:
            joint = "–" if j - start > 2 else ", "
            parts.append(joint.join(dict.fromkeys((layers[start], layers[j - 1]))))
            start = None
    return ", ".join(parts) or NONE


def listed(names: Sequence[str]) -> str:
    """Names as in a sentence: "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
