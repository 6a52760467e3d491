"""Tables of the page that compare runs: at equal cost, at the end, and to a target."""

from collections.abc import Mapping, Sequence

from fedp3.core.scores import Score, score_of
from fedp3.report import text
from fedp3.report.answers import Answer, difference_text
from fedp3.report.comparison import shown_epsilons
from fedp3.report.runs import Json, kinds_of, mean
from fedp3.report.table import Cell, Head, Table
from fedp3.report.target_table import target_table

RUN = Head(name="Run", meaning="name of the run folder", number=False)
SCORES: Mapping[str, str] = {
    "G": "{score} of the server model, mean over clients",
    "D": "{score} of the model as dispatched, before local training, mean over clients",
    "P": "{score} after one local update, at the end and over all clients; the curves of P are "
    "over each round's participants",
    "C": "{score} of the server model on a test set of no client",
}
EPSILONS: Mapping[str, Head] = {  # key of a row -> heading
    "epsilon_max": Head(name="ε", meaning="of LDP, the largest of any client"),
    "client_epsilon": Head(
        name="client-level ε", meaning="of every client, against all who see the models"
    ),
}


def standings_table(answer: Answer, index: Mapping[str, int]) -> Table:
    """All runs at one budget.

    Args:
        answer: the runs at the budget.
        index: name of a run -> its index.
    """
    best = "the run with the best score here"
    heads = (
        RUN,
        Head(
            name=answer.kind,
            meaning=f"at {answer.place}, between the evaluations before and after it; "
            "± one standard deviation over seeds",
        ),
        Head(
            name=f"Against {answer.reference}",
            meaning=f"difference {text.difference_unit(answer.score)}, paired by seed, with its "
            f"95 % interval, to {'the run that was chosen' if answer.chosen else best}",
        ),
        Head(
            name="Verdict",
            meaning="better or worse if the seeds decide it; the chance that any verdict at this "
            "budget is false is at most 5 % (Student's t, Holm's correction)",
            number=False,
        ),
    )
    rows = tuple(
        (
            (s.run, ""),
            _stat_cell(answer.score, mean(s.score), None if s.score is None else s.score.std),
            ("" if s.run == answer.reference else difference_text(answer.score, s.difference), ""),
            (s.verdict, s.reason),
        )
        for s in answer.standings
    )
    return Table(
        name=f"at-equal-{answer.axis}",
        title=f"At {answer.place}",
        heads=heads,
        rows=rows,
        runs=tuple(index[s.run] for s in answer.standings),
    )


def comparison_table(rows: Sequence[Json], *, one_fleet: bool) -> Table:
    """Scores and costs of entire runs.

    Args:
        rows: the rows of the comparison.
        one_fleet: all runs have the same fleet, so that their times can stand side by side.
    """
    kinds, epsilons = kinds_of(rows), shown_epsilons(rows)
    score = score_of(rows[0])
    fleet = [Head(name="Fleet (s)", meaning=FLEET)] if one_fleet else []
    heads = (
        RUN,
        Head(
            name="Method",
            meaning="sets the defaults of plan, pruning and aggregation",
            number=False,
        ),
        Head(name="Seeds", meaning="number of runs that are averaged"),
        *(Head(name=kind, meaning=SCORES[kind].format(score=score.name)) for kind in kinds),
        Head(name="Worst client", meaning=f"{text.worst_end(score)} G of any client"),
        Head(name="MB up", meaning="clients to server, over the entire run"),
        Head(name="MB down", meaning="server to clients, over the entire run"),
        Head(
            name="GFLOP",
            meaning="local training of one client over the entire run, mean over clients",
        ),
        *fleet,
        Head(name="Time (s)", meaning="measured on the machine that ran it"),
        Head(name="Rejected", meaning="updates that the server rejected"),
        *(EPSILONS[key] for key in epsilons),
    )
    cells = tuple(
        (
            (row["run"], ""),
            (row["method"], ""),
            (str(row["seeds"]), ""),
            *(_stat_cell(score, row[kind], row[f"{kind}_std"]) for kind in kinds),
            (text.score(score, row["worst"]), ""),
            *(_traffic(row, way) for way in ("up", "down")),
            (text.number(row["gflop"]), ""),
            *([(text.number(row["fleet_seconds"]), "")] if one_fleet else []),
            (text.number(row["seconds"]), ""),
            (str(row["rejected"]), ""),
            *((text.number(row[key]), "") for key in epsilons),
        )
        for row in rows
    )
    return Table(
        name="comparison",
        title="Scores at the end, and costs of the entire run",
        heads=heads,
        rows=cells,
        runs=tuple(range(len(rows))),
    )


FLEET = (
    "time of all rounds on the devices, or on devices as capable as their keep share where none "
    "are described"
)


def reach_table(rows: Sequence[Json]) -> Table | None:
    """What a target took; None if no run was evaluated."""
    table = target_table(rows)
    if table is None:
        return None
    several = len(rows) > 1
    return Table(
        name="to-reach",
        title=table.title,
        heads=(RUN, *(Head(name=name, meaning=meaning) for name, meaning in table.heads)),
        rows=tuple(((row["run"], ""), *line) for row, line in zip(rows, table.lines, strict=True)),
        runs=tuple(range(len(rows))) if several else (),
    )


def _stat_cell(score: Score, value: float | None, std: float | None) -> Cell:
    return text.score(score, value), "" if std is None else f"± {score.number(std)}"


def _traffic(row: Json, way: str) -> Cell:
    share = row[f"share_{way}"]
    note = "" if share is None else f"{100 * share:.0f} % of dense"
    return text.number(row[f"mb_{way}"]), note
