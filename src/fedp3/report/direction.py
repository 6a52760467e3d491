"""Which of two scores is better: the only place of a report that knows it."""

from collections.abc import Mapping, Sequence

from fedp3.report.runs import Run, Seed


def direction(of: Run | Seed) -> int:
    """+1 if a higher score of this run is better, -1 if a lower one is."""
    seed = of.seeds[0] if isinstance(of, Run) else of
    return -1 if seed.score.lower_is_better else 1


def reaches(score: float, target: float, sign: int) -> bool:
    """Whether a score is as good as the target.

    Args:
        score: the score.
        target: the target.
        sign: the direction of both.
    """
    return sign * (score - target) >= 0


def best(scores: Mapping[str, float], sign: int) -> str:
    """The name of the best score, the first of equal ones."""
    return max(scores, key=lambda name: sign * scores[name])


def relaxed(score: float, share: float, sign: int) -> float:
    """A target slightly easier than a score: this share of it, or of its inverse."""
    return score * share if sign > 0 else score / share


def common_direction(runs: Sequence[Run]) -> int:
    """The direction of all these runs, which is that of the first."""
    return direction(runs[0])
