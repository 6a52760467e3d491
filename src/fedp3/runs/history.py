"""The rounds of a run as rows of a table."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedp3.core.errors import InputError
from fedp3.core.scores import ACCURACY, score_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORES = ("G", "D", "P", "C")


class History(Sequence[dict[str, Any]]):
    """One row per round: scores, loss, traffic and time.

    A row has `round` (from 1), `G`, `D` and `P` (mean score, such as accuracy; None if the round
    was not evaluated), `C` (on the central test set; None without one), `loss`, `bytes_up`,
    `bytes_down`, `seconds`, `epsilon` (None without LDP),
    `client_epsilon` (None without client-level DP), `virtual_seconds` and `joules` (None without a
    virtual clock; joules also if a device has no watts), `void`, and the numbers of clients that
    were `accepted`, `late` and `rejected`.  A client whose invalid reply was followed by a valid
    one counts as both rejected and accepted.

    `virtual_seconds` is the virtual time since the end of the round before, so that the sum of the
    rows is that of the run.
    """

    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        self._rows = []
        self.score = next((score_of(e["G"]) for e in events if e["G"]), ACCURACY)
        ended: float | None = None
        for event in events:
            self._rows.append(_row(event) | _clock(event, ended))
            ended = event["clock"]["ended"] if event.get("clock") else ended

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def column(self, name: str) -> list[Any]:
        """One value per round."""
        return [row[name] for row in self._rows]

    def to_pandas(self) -> Any:
        """The history as a pandas DataFrame; raises an InputError if pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise InputError("pandas is not installed; add it with: pip install pandas") from None
        return pandas.DataFrame(self._rows)

    def to_polars(self) -> Any:
        """The history as a polars DataFrame; raises an InputError if polars is not installed."""
        try:
            import polars
        except ImportError:
            raise InputError("polars is not installed; add it with: pip install polars") from None
        return polars.DataFrame(self._rows)

    def plot(self, path: str | Path | None = None) -> "Figure":
        """A figure of score and training loss by round.

        Args:
            path: a file to write the figure to as well.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9.0, 3.6), layout="constrained")
        scores, losses = figure.subplots(1, 2)
        unit = 100 if self.score.percent else 1
        for kind in SCORES:
            points = [
                (row["round"], unit * row[kind]) for row in self._rows if row[kind] is not None
            ]
            if points:
                scores.plot(*zip(*points, strict=True), marker="o", ms=3.5, label=kind)
        name = self.score.name
        scores.set(xlabel="round", ylabel=f"{name}, %" if self.score.percent else name)
        scores.legend()
        points = [(row["round"], row["loss"]) for row in self._rows if row["loss"] is not None]
        if points:
            losses.plot(*zip(*points, strict=True))
        losses.set(xlabel="round", ylabel="training loss")
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def __repr__(self) -> str:
        if not self._rows:
            return "<History of 0 rounds>"
        last = next((row for row in reversed(self._rows) if row["G"] is not None), None)
        score = ""
        if last is not None:
            score = f", G {self.score.text(last['G'])} in round {last['round']}"
        return f"<History of {len(self._rows)} rounds{score}>"


def _row(event: Mapping[str, Any]) -> dict[str, Any]:
    counts = {name: len(event[name]) for name in ("accepted", "late", "rejected")}
    scores = {kind: event[kind]["mean"] if event.get(kind) else None for kind in SCORES}
    plain = {
        name: event[name]
        for name in ("loss", "bytes_up", "bytes_down", "seconds", "epsilon", "void")
    }
    plain["client_epsilon"] = event.get("client_epsilon")
    return {"round": event["t"] + 1, **scores, **plain, **counts}


def _clock(event: Mapping[str, Any], ended: float | None) -> dict[str, Any]:
    """Virtual time and energy of a round.

    Args:
        event: the round.
        ended: when the round before it ended, if that is known.
    """
    clock = event.get("clock")
    if not clock:
        return {"virtual_seconds": None, "joules": None}
    # A record that does not start with the first round has no end of the round before.
    before = (clock["began"] if event["t"] else 0.0) if ended is None else ended
    return {"virtual_seconds": clock["ended"] - before, "joules": clock["joules"]}
