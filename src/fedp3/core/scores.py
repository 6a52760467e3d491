"""The score of a model: its name, which direction is better, and how it is printed.

Everything that compares models asks `Score`: evaluation, tuning, early stopping, tables and pages.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

LARGE = 1e7  # from here on numbers are written as in 3.4e+38, the score of a diverged model


@dataclass(frozen=True, slots=True)
class Score:
    """What a model is judged by.

    Args:
        name: the name of the metric.
        lower_is_better: whether smaller values are better, as for a loss.
        percent: whether it is a share of 1, which is printed in percent.
    """

    name: str
    lower_is_better: bool = False
    percent: bool = False

    def better(self, a: float, b: float) -> bool:
        """Whether a is better than b; a number is better than NaN."""
        if math.isnan(b):
            return not math.isnan(a)
        return a < b if self.lower_is_better else a > b

    def utility(self, value: float) -> float:
        """A number that is larger for a better value: the value, or its negative."""
        return -value if self.lower_is_better else value

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is the target, or better."""
        return value == target or self.better(value, target)

    def near(self, best: float, share: float) -> float:
        """A value slightly worse than the best: this share of it, or the best over the share."""
        worse_is_larger = self.lower_is_better == (best >= 0)
        return best / share if worse_is_larger else share * best

    def leader(self, values: Mapping[str, float]) -> str:
        """The name of the best of these values, among equals the first."""
        return max(values, key=lambda name: self.utility(values[name]))

    def best(self, values: Iterable[float]) -> float:
        """The best of these values."""
        return min(values) if self.lower_is_better else max(values)

    def worst(self, values: Iterable[float]) -> float:
        """The worst of these values."""
        return max(values) if self.lower_is_better else min(values)

    def from_worst(self, values: Iterable[float]) -> list[float]:
        """The values in order, the worst first."""
        return sorted(values, reverse=self.lower_is_better)

    def text(self, value: float | None, digits: int = 1) -> str:
        """A value of this score for people; a dash if there is none.

        Args:
            value: the value.
            digits: decimal places of a percentage; other scores have two more.
        """
        if value is None:
            return "-"
        return self.number(value, digits) + (" %" if self.percent else "")

    def number(self, value: float, digits: int = 1, sign: str = "") -> str:
        """A value, a spread or a difference without a unit; that of a share is in percent.

        Args:
            value: the value.
            digits: see `text`.
            sign: "+" to write the sign of positive numbers as well.
        """
        if self.percent:
            return f"{100 * value:{sign}.{digits}f}"
        if abs(value) >= LARGE:
            return f"{value:{sign}.{digits + 2}g}"
        return f"{value:{sign}.{digits + 2}f}"


ACCURACY = Score("accuracy", percent=True)


def score_of(about: Mapping[str, Any]) -> Score:
    """The score that a run.json or result.json speaks of.

    Runs of versions that did not record it were scored by accuracy.
    """
    recorded = about.get("score")
    return Score(**recorded) if recorded else ACCURACY
