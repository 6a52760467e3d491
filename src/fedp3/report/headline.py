"""The first sentences of a report or a comparison: its result in words."""

from collections.abc import Sequence

from fedp3.core.scores import ACCURACY, Score
from fedp3.report import text
from fedp3.report.answers import answers, sentence
from fedp3.report.equality import inequalities
from fedp3.report.runs import Json, Run, final, moved
from fedp3.report.targets import choose_target, cost_row


def headline(runs: Sequence[Run], target: float | None = None) -> list[str]:
    """The answer to "what came out?" as sentences.

    Args:
        runs: the runs.
        target: the G whose cost is measured; None means 98 % of the best final G of these runs.
    """
    if len(runs) == 1:
        return [_alone(runs[0])]
    if all(final(run, "G") is None for run in runs):
        return ["None of these runs has been evaluated yet."]
    said = [sentence(answer) for answer in answers(runs) if answer.axis != "joules"]
    said += _to_target(runs, target)
    found = inequalities(runs)
    if found:
        differing = "; ".join(inequality.sentence for inequality in found)
        said.append(f"Caution: these runs differ in what should be equal ({differing}).")
    return said


def _alone(run: Run) -> str:
    rounds = min(len(seed.events) for seed in run.seeds)
    planned = run.seeds[0].config["run"]["rounds"]
    finished = all(seed.result for seed in run.seeds)
    after = f"after {rounds} rounds" if finished else f"after {rounds} of {planned} rounds, so far"
    G = final(run, "G")
    if G is None:
        return f"The server model has not been evaluated yet, {after}."
    seeds = f", mean over {len(run.seeds)} seeds" if len(run.seeds) > 1 else ""
    scored = _named(run.score, text.score_stat(run.score, G), "an accuracy of ")
    said = f"The server model has {scored}{seeds}, {after}."
    C = final(run, "C")
    if C is not None:
        said += f" On a test set of no client it has {text.score_stat(run.score, C)}."
    _, share = moved(run, "up")
    if share is not None and abs(share - 1) >= 0.005:
        said += f" Clients uploaded {100 * share:.0f}{text.NBSP}% of what dense FedAvg uploads."
    return said


def _named(score: Score, shown: str, usual: str) -> str:
    """A value of G with the name of its score.

    Args:
        score: the score.
        shown: the value.
        usual: the words before an accuracy.
    """
    name = usual if score == ACCURACY else f"{text.score_name(score, 'G')} "
    return f"{name}{shown}"


def _to_target(runs: Sequence[Run], wanted: float | None) -> list[str]:
    """What a target took in each run, if any reached it."""
    target = choose_target(runs, wanted)
    if target is None:
        return []
    rows = {run.name: cost_row(run, target) for run in runs}
    took = [f"{run.name} took {costs}" for run in runs if (costs := _costs(rows[run.name]))]
    never = [run.name for run in runs if rows[run.name]["seeds_at_target"] != len(run.seeds)]
    if not took:
        return []
    score = runs[0].score
    said = f"To reach {_named(score, text.score(score, target.G), '')}, {'; '.join(took)}"
    if never:
        said += f"; {text.listed(never)} did not get there{_in_all_seeds(runs)}"
    return [said + "."]


def _in_all_seeds(runs: Sequence[Run]) -> str:
    return " in all seeds" if any(len(run.seeds) > 1 for run in runs) else ""


def _costs(row: Json) -> str:
    """The costs of a target in words; empty if it was not reached."""
    if row["round_to_target"] is None:
        return ""
    costs = [f"{row['round_to_target']:.3g} rounds", text.mb(row["mb_to_target"])]
    if row["seconds_to_target"] is not None:
        costs.append(f"{text.duration(row['seconds_to_target'])} of virtual time")
    return text.listed(costs)
