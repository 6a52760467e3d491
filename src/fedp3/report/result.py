"""A run that has ended, as Python code sees it: its model, its rounds, its clients, its report."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedp3.core.errors import InputError
from fedp3.core.scores import Score, score_of
from fedp3.core.types import Params
from fedp3.experiment.experiment import Experiment
from fedp3.report import text
from fedp3.report.page import write_report
from fedp3.runs.export import export
from fedp3.runs.history import History
from fedp3.runs.networks import Trained, global_network, network
from fedp3.runs.session import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {"G": "global", "D": "dispatched", "P": "personal", "C": "central"}
PER_CLIENT = ("G", "D", "P")


@dataclass(frozen=True)
class Result:
    """A run that is finished, or that a callback stopped.

    Attributes:
        experiment: the run: its config, server, clients and data.
        outcome: the server's final state, and the numbers of result.json.
        history: one row per round.
        folder: its run folder; None if it has none.
    """

    experiment: Experiment
    outcome: Outcome
    history: History
    folder: Path | None = None

    @property
    def weights(self) -> Params:
        """The trained tensors, buffers included."""
        return self.outcome.state.model

    @cached_property
    def model(self) -> nn.Module:
        """A copy of the network with the trained weights, in evaluation mode."""
        return global_network(self.experiment, self.weights)

    def client_model(self, client: int | str, what: str = "dispatched") -> nn.Module:
        """The network of a client, in evaluation mode; it is smaller where units are pruned.

        Args:
            client: the client, from 0, or its name if the data were passed by name.
            what: "dispatched", as the server sends it (D), or "personal", after the client's local
                training (P), which is computed again for this.
        """
        return network(self._trained, what, client)

    def export(
        self,
        folder: str | Path,
        *,
        what: str = "global",
        client: int | str | None = None,
        format: str = "pt2",
    ) -> dict[str, Any]:
        """Write a network to a new folder, with a README on how to load it without fedp3.

        Args:
            folder: where to; it must be empty or not exist.
            what: "global", or "dispatched" or "personal" with a client; see `client_model`.
            client: whose network; None for the server's model.
            format: "pt2" (torch.export), "safetensors", or "onnx".

        Returns:
            The content of model.json: parameters, input shape, largest difference, ...
        """
        return export(self._trained, Path(folder), what=what, client=client, format=format)

    @property
    def _trained(self) -> Trained:
        deployed = self.folder is not None and (self.folder / "flower.json").exists()
        return Trained(
            experiment=self.experiment,
            state=self.outcome.state,
            clients=self.outcome.clients,
            deployed=deployed,
        )

    @property
    def score(self) -> Score:
        """What G, D, P and C are: the accuracy, or the score of another objective."""
        return score_of(self.outcome.result)

    @property
    def scores(self) -> Mapping[str, float | None]:
        """G, D and P, each the mean over clients of the objective's score.

        With a central test set there is also C, the score of the server's model on it.
        """
        return self._named("score")

    @property
    def accuracy(self) -> Mapping[str, float | None]:
        """The same numbers as `scores`; None where the score is no accuracy."""
        return self._named("accuracy")

    @property
    def class_names(self) -> tuple[str, ...]:
        """Where labels were texts, the text of each output of the network; else empty."""
        return self.experiment.client.data.class_names

    @property
    def per_client(self) -> list[dict[str, Any]]:
        """One row per client: its number of examples, its cost, and its G, D and P at the end.

        The cost is that of its plan in the first round.
        """
        scores = {kind: self._scores(kind) for kind in PER_CLIENT}
        names = dict(enumerate(self.experiment.client_names))
        rows = []
        for cost in self.experiment.costs:
            row = {
                "client": cost.id,
                **({"name": names[cost.id]} if names else {}),
                "examples": cost.examples,
                "layers": cost.layers,
                "keep": cost.capacity,
                "mb_down": cost.mb_down,
                "mb_up": cost.mb_up,
            }
            rows.append(row | {kind: scores[kind].get(cost.id) for kind in PER_CLIENT})
        return rows

    def _named(self, what: str) -> dict[str, float | None]:
        result = self.outcome.result
        has_c = result.get("score_central") is not None
        kinds = {kind: name for kind, name in KINDS.items() if kind in PER_CLIENT or has_c}
        return {kind: result[f"{what}_{name}"] for kind, name in kinds.items()}

    def _scores(self, kind: str) -> dict[int, float]:
        """The final score of each client that was scored."""
        final = self.outcome.result["final"][kind]
        if final is None:
            return {}
        return {int(i): score for i, score in final["clients"].items()}

    @property
    def model_sha256(self) -> str:
        """The hash of the trained weights: equal hashes mean equal bits."""
        return str(self.outcome.result["model_sha256"])

    def plot(self, path: str | Path | None = None) -> "Figure":
        """A figure of score and loss by round.

        Args:
            path: a file to write the figure to as well.
        """
        return self.history.plot(path)

    def report(self, path: str | Path) -> Path:
        """Write a self-contained HTML page about this run.

        Args:
            path: the file to write.
        """
        if self.folder is None:
            raise InputError(
                "a report is made from a run folder; call fedp3.run with out='some/folder'"
            )
        return write_report([self.folder], Path(path))

    def __repr__(self) -> str:
        result = self.outcome.result
        scores = ", ".join(f"{k} {self.score.text(v)}" for k, v in self.scores.items())
        up, down = (text.mb(result[key]).replace(text.NBSP, " ") for key in ("mb_up", "mb_down"))
        traffic = f"{up} up, {down} down"
        if result["rejected"]:
            traffic += f", {result['rejected']} updates rejected"
        stopped = f", stopped: {result['stopped']}" if result.get("stopped") else ""
        about = f"{result['method']}: {result['rounds']} round{'s' * (result['rounds'] != 1)}"
        return f"<Result {about}, {scores}, {traffic}{stopped}>"

    def _repr_html_(self) -> str:
        result = self.outcome.result
        rows = {
            "method": str(result["method"]),
            "rounds": str(result["rounds"]),
            **{kind: self.score.text(value) for kind, value in self.scores.items()},
            "MB up": f"{result['mb_up']:.2f}",
            "MB down": f"{result['mb_down']:.2f}",
            "model sha256": self.model_sha256[:16],
        }
        if result.get("stopped"):
            rows["stopped"] = str(result["stopped"])
        cells = "".join(
            f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in rows.items()
        )
        return f"<table>{cells}</table>"
