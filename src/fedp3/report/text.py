"""Numbers for people: 93.1 %, 4.21 MB, 2 min 5 s; what is not known is a dash."""

from fedp3.report.runs import Stat

NONE = "–"
NBSP = "\u00a0"


def number(x: float | None) -> str:
    """About three digits."""
    if x is None:
        return NONE
    digits = 0 if abs(x) >= 99.95 else 1 if abs(x) >= 9.995 else 2 if abs(x) >= 0.0995 or x == 0 else 3
    return f"{x:,.{digits}f}"


def percent(x: float | None) -> str:
    """A share of 1."""
    return NONE if x is None else f"{100 * x:.1f}{NBSP}%"


def mb(x: float | None) -> str:
    """Megabytes, in the unit that fits."""
    if x is None:
        return NONE
    for factor, unit in ((1e-3, "GB"), (1, "MB"), (1e3, "kB")):
        if abs(x) * factor >= 0.9995:
            return f"{number(x * factor)}{NBSP}{unit}"
    return f"{round(x * 1e6)}{NBSP}bytes"


def duration(seconds: float | None) -> str:
    """A time in the one or two units that fit."""
    if seconds is None:
        return NONE
    if seconds < 59.95:
        return f"{seconds:.1f}{NBSP}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{NBSP}min {rest}{NBSP}s"
    return f"{minutes // 60:,}{NBSP}h {minutes % 60}{NBSP}min"


def percent_stat(value: Stat | None) -> str:
    """A share with its spread over seeds."""
    if value is None or value.std is None:
        return percent(value.mean if value else None)
    return f"{100 * value.mean:.1f} ± {100 * value.std:.1f}{NBSP}%"
