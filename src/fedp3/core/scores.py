"""The score of a model: its name, which direction is better, and how it is printed.

Everything that compares models asks `Score`: evaluation, tuning, early stopping, tables and pages.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


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
        """This share of the best value; where less is better, the best value over the share."""
        return best / share if self.lower_is_better else share * best

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
        if self.percent:
            return f"{100 * value:.{digits}f} %"
        return f"{value:.{digits + 2}f}"


ACCURACY = Score("accuracy", percent=True)


def score_of(about: Mapping[str, Any]) -> Score:
    """The score that a run.json or result.json speaks of.

    Runs of versions that did not record it were scored by accuracy.
    """
    recorded = about.get("score")
    return Score(**recorded) if recorded else ACCURACY
