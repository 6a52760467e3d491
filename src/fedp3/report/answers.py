"""Answers to "which run is best?" at equal traffic, virtual time, energy and rounds, in words.

Without a reference, every pair of runs is compared and the answer is about the best run: it was
chosen by the same scores, so that the comparisons with it alone would not be fair.  With a
reference, every other run is compared with that one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from fedp3.core.errors import InputError
from fedp3.core.scores import Score
from fedp3.report import text
from fedp3.report.budgets import AXES, Axis, common_budget, scores_at
from fedp3.report.equality import Inequality, inequalities
from fedp3.report.paired import (
    BETTER,
    UNDECIDED,
    WORSE,
    Difference,
    difference,
    holm,
    reason,
    verdict,
)
from fedp3.report.runs import Run, Stat, mean, stat

INCOMPARABLE = "not comparable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One run at a budget."""

    run: str
    score: Stat | None  # None if not all of its seeds were evaluated before and after the budget
    difference: Difference | None = None  # to the reference; None for the reference itself
    verdict: str = ""  # empty for the reference
    reason: str = ""  # why nothing is decided, if seeds could not decide it, or there is no score


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All runs at one budget."""

    axis: str  # a key of AXES
    budget: float
    kind: str  # G, D or P
    score: Score  # what G, D and P are
    reference: str  # the run that the others are compared with
    chosen: bool  # the user named it; otherwise it is the best run
    standings: tuple[Standing, ...]
    comparisons: int  # that the verdicts are corrected for

    @property
    def place(self) -> str:
        """The budget in words, as in "8.37 MB of traffic"."""
        return f"{AXES[self.axis].amount(self.budget)} of {AXES[self.axis].noun}"

    @property
    def named(self) -> str:
        """G, D or P in a sentence."""
        return text.score_name(self.score, self.kind)

    @property
    def rivals(self) -> list[Standing]:
        """All but the reference."""
        return [s for s in self.standings if s.run != self.reference]


def answers(
    runs: Sequence[Run],
    budgets: Mapping[str, float] | None = None,
    *,
    kind: str = "G",
    against: str | None = None,
    last: int = 1,
) -> list[Answer]:
    """Compare runs at equal cost.

    Args:
        runs: the runs.
        budgets: axis -> cost.  Without any, every axis is answered at the largest cost at which all
            seeds were evaluated.
        kind: the score: G, D or P.
        against: the name of the run that the others are compared with; None means the best.
        last: scores are means over this many evaluations up to the budget.
    """
    _check(runs, against)
    unequal = inequalities(runs)
    if budgets:
        return [_answer(runs, key, at, kind, last, against, unequal) for key, at in budgets.items()]
    answered = []
    for key, axis in AXES.items():
        budget = common_budget(axis, runs, kind)
        if budget is not None and _known(runs, axis, budget, kind, against):
            answered.append(_answer(runs, key, budget, kind, last, against, unequal))
    return answered


def _known(runs: Sequence[Run], axis: Axis, budget: float, kind: str, against: str | None) -> bool:
    """Whether the reference, or without one any run, has a score at the budget."""
    named = [run for run in runs if against in (None, run.name)]
    return any(len(scores_at(run, axis, budget, kind)) == len(run.seeds) for run in named)


def _check(runs: Sequence[Run], against: str | None) -> None:
    names = [run.name for run in runs]
    if against is not None and against not in names:
        raise InputError(f"--against {against}: no such run; the runs are: {', '.join(names)}")
    for run in runs:
        seeds = [seed.config["run"]["seed"] for seed in run.seeds]
        if len(set(seeds)) < len(seeds):
            raise InputError(
                f"{run.name} has two runs with the same seed, of {sorted(seeds)}; "
                "runs are compared seed by seed"
            )


def _unreached(runs: Sequence[Run], axis: Axis, budget: float, kind: str) -> str:
    curves = {run.name: [axis.curve(kind)(seed) for seed in run.seeds] for run in runs}
    known = {name: [c for c in of_run if c] for name, of_run in curves.items()}
    ranges = [
        f"{name} from {axis.amount(max(c[0][1] for c in of_run))} "
        f"to {axis.amount(min(c[-1][1] for c in of_run))}"
        for name, of_run in known.items()
        if of_run
    ]
    if not ranges:
        return f"runs cannot be compared by {axis.noun}: {axis.needs}"
    where = ", ".join(ranges)
    return (
        f"not all runs have a {kind} at {axis.amount(budget)} of {axis.noun}; they were evaluated: "
        f"{where}"
    )


def _absence(run: Run, axis: Axis, budget: float, kind: str) -> str:
    """Why a run has no score at a budget."""
    curves = [curve for seed in run.seeds if (curve := axis.curve(kind)(seed))]
    if len(curves) < len(run.seeds):
        return f"has no {kind} by {axis.noun}"
    end = min(curve[-1][1] for curve in curves)
    if end < budget:
        return f"ended at {axis.amount(end)}"
    return f"was first evaluated at {axis.amount(max(curve[0][1] for curve in curves))}"


def _answer(
    runs: Sequence[Run],
    key: str,
    budget: float,
    kind: str,
    last: int,
    against: str | None,
    unequal: Sequence[Inequality],
) -> Answer:
    axis, score = AXES[key], runs[0].score
    scores = {}
    for run in runs:
        of_run = scores_at(run, axis, budget, kind, last)
        if len(of_run) == len(run.seeds):  # a mean over some of the seeds would be another number
            scores[run.name] = of_run
    if not scores or against not in (None, *scores):
        raise InputError(_unreached(runs, axis, budget, kind))
    stats = {name: stat(of_run.values()) for name, of_run in scores.items()}
    means = {name: value.mean for name, value in stats.items() if value is not None}
    reference = against if against is not None else score.leader(means)
    others = [name for name in scores if name != reference]
    pairs = [(name, reference) for name in others]
    if against is None:
        pairs += combinations(others, 2)
    differences = {pair: difference(scores[pair[0]], scores[pair[1]]) for pair in pairs}
    ps = holm([None if d is None else d.p for d in differences.values()])
    adjusted = dict(zip(pairs, ps, strict=True))
    forbidden = [i.condition for i in unequal if key in i.forbids]
    standings = []
    for run in runs:
        absence = "" if run.name in scores else _absence(run, axis, budget, kind)
        standing = Standing(run=run.name, score=stats.get(run.name), reason=absence)
        pair = (run.name, reference)
        if pair in differences:
            d, p = differences[pair], adjusted[pair]
            standing = replace(
                standing,
                difference=d,
                verdict=verdict(d, p, score),
                reason=reason(d, p, len(pairs)),
            )
            if forbidden:
                why = f"other {' and '.join(forbidden)}"
                standing = replace(standing, verdict=INCOMPARABLE, reason=why)
        standings.append(standing)
    return Answer(
        axis=key,
        budget=budget,
        kind=kind,
        score=score,
        reference=reference,
        chosen=against is not None,
        standings=tuple(standings),
        comparisons=len(pairs),
    )


# --------------------------------------------------------------------------- in words


def sentence(answer: Answer) -> str:
    """The answer as a sentence."""
    place = f"At {answer.place}"
    scored = {s.run: text.score(answer.score, mean(s.score)) for s in answer.standings}
    compared = [s for s in answer.rivals if s.verdict]
    left_out = "".join(f" {s.run} {s.reason}." for s in answer.rivals if not s.verdict)
    if not compared:
        return (
            f"{place} {answer.reference} has {answer.named} {scored[answer.reference]}.{left_out}"
        )
    if len(compared) == 1:
        return f"{place} {_pair(answer, compared[0])}.{left_out}"
    lead = "has" if answer.chosen else "leads with"
    said = [f"{place} {answer.reference} {lead} {answer.named} {scored[answer.reference]}"]
    # A verdict is about the other run; the sentence is about the reference.
    for word, other_side in ((WORSE, "better than"), (BETTER, "worse than")):
        names = [s.run for s in compared if s.verdict == word]
        if names:
            said.append(f"it is {other_side} {text.listed(names)}")
    better = "better or worse" if answer.chosen else "better"
    for word, before, after in (
        (UNDECIDED, f"whether it is {better} than ", " is not decided"),
        (INCOMPARABLE, "it cannot be compared with ", ""),
    ):
        names = [s.run for s in compared if s.verdict == word]
        if names:
            said.append(f"{before}{text.listed(names)}{after}{_why(compared, word)}")
    return "; ".join(said) + "." + left_out


def _why(standings: Sequence[Standing], word: str) -> str:
    """The reason in brackets, if all these runs have the same."""
    reasons = {s.reason for s in standings if s.verdict == word}
    return f" ({reasons.pop()})" if len(reasons) == 1 and "" not in reasons else ""


def _pair(answer: Answer, other: Standing) -> str:
    """Two runs: scores, verdict and difference of the reference to the other."""
    by_name = {s.run: s for s in answer.standings}
    ours = by_name[answer.reference]
    ours_shown, others = (text.score(answer.score, mean(s.score)) for s in (ours, other))
    scores = f"{ours.run} has {answer.named} {ours_shown} and {other.run} {others}"
    if other.reason:
        return f"{scores}: {other.verdict} ({other.reason})"
    assert other.difference is not None
    unit = " points" if answer.score.percent else ""
    shown = difference_text(answer.score, negative(other.difference)) + unit
    seeds = f"over {other.difference.seeds} seeds"
    if other.verdict == UNDECIDED:
        return f"{scores}: not decided, the difference is {shown} {seeds}"
    word = "better" if other.verdict == WORSE else "worse"
    return f"{scores}: {ours.run} is {word}, by {shown} {seeds}"


def negative(d: Difference) -> Difference:
    """The difference seen from the other run."""
    low, high = (None if d.high is None else -d.high), (None if d.low is None else -d.low)
    return Difference(mean=-d.mean, seeds=d.seeds, low=low, high=high, p=d.p)


def difference_text(score: Score, d: Difference | None) -> str:
    """A difference, as in +1.2 [+0.3, +2.1]; that of shares is in percentage points."""
    if d is None:
        return text.NONE
    shown = score.number(d.mean, sign="+")
    if d.low is None or d.high is None:
        return shown
    return f"{shown} [{score.number(d.low, sign='+')}, {score.number(d.high, sign='+')}]"


def as_row(answer: Answer) -> dict[str, object]:
    """The answer as JSON."""
    return {
        "at": answer.axis,
        "budget": answer.budget,
        "score": answer.kind,
        "reference": answer.reference,
        "comparisons": answer.comparisons,
        "answer": sentence(answer).replace(text.NBSP, " "),
        "runs": [_standing_row(s) for s in answer.standings],
    }


def _standing_row(s: Standing) -> dict[str, object]:
    row: dict[str, object] = {
        "run": s.run,
        "score": mean(s.score),
        "std": None if s.score is None else s.score.std,
        "verdict": s.verdict or None,
        "reason": s.reason or None,
    }
    d = s.difference
    if d is not None:
        row |= {"difference": d.mean, "low": d.low, "high": d.high, "seeds": d.seeds, "p": d.p}
    return row
