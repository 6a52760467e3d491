"""`fedp3.run(model, data)`: a user's own net on a user's own tensors, with every promise of the command line."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset

from fedp3 import config as configs
from fedp3 import data as datasets
from fedp3 import driver, inputs, record
from fedp3.data import Dataset
from fedp3.driver import OnRound, Outcome
from fedp3.experiment import Experiment, assemble_own
from fedp3.locks import locked
from fedp3.types import Layer, Params

Data = Dataset | TorchDataset[Any] | tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run."""

    experiment: Experiment
    outcome: Outcome
    folder: Path | None

    @property
    def weights(self) -> Params:
        """The trained model, to be loaded with `net.load_state_dict(result.weights, strict=False)`."""
        return self.outcome.state.W

    @property
    def accuracy(self) -> Mapping[str, float | None]:
        """G, D and P, each the mean over clients."""
        kinds = {"G": "accuracy_global", "D": "accuracy_dispatched", "P": "accuracy_personal"}
        return {k: self.outcome.result[name] for k, name in kinds.items()}

    @property
    def model_sha256(self) -> str:
        """The model's identity: equal hashes, equal bits."""
        return str(self.outcome.result["model_sha256"])

    def report(self, path: str | Path) -> Path:
        """Write the self-contained page about this run."""
        from fedp3.errors import InputError
        from fedp3.report import write_report

        if self.folder is None:
            raise InputError("a report is made from a run folder; call fedp3.run with out='some/folder'")
        return write_report([self.folder], Path(path))


def run(
    model: nn.Module,
    data: Data,
    /,
    *,
    out: str | Path | None = None,
    layers: Mapping[Layer, Sequence[str]] | None = None,
    workers: int = 1,
    on_round: OnRound | None = None,
    **settings: Any,
) -> Result:
    """Train any net on any data set; settings are those of the config file, as `section=dict(key=value)`.

    With `out` the run has a folder, and calling the same again goes on where it stopped; what the net then holds does
    not matter, the run has its own W_0.

    Args:
        model: W_0 is what it holds; it is used as a workbench and left in an unspecified state.
        data: tensors (x, y), any map-style torch data set of (x, y), or a `fedp3.data.Dataset`.
        out: run folder.
        layers: layer name -> tensor names, where the layers found by tracing are not what you want.
        workers: processes; more than one needs `if __name__ == "__main__"` around the call.
        on_round: called with the record of every finished round.
        **settings: `method="fedp3"`, `prune=dict(keep=0.5)`, `run=dict(rounds=50)`, ...
    """
    config = configs.parse(_as_own(settings), where="fedp3.run")
    experiment = assemble_own(config, model, _dataset(data), layers)
    folder = Path(out) if out is not None else None
    if folder is None:
        return _drive(experiment, None, workers, on_round, None)
    if not (folder / "config.toml").exists():
        driver.begin(experiment, folder, own_net=True)
    else:
        driver.reopen(folder, config)
        inputs.check(folder, experiment)
        experiment = inputs.as_begun(folder, experiment)
    with locked(folder):
        checkpoint, broken = driver.pick_up(folder, config.digest())
        for text in broken:
            warnings.warn(text, stacklevel=2)
        if checkpoint and (folder / "result.json").exists():  # finished: another final score would cost privacy again
            return Result(experiment, Outcome(checkpoint.state, None, record.read_json(folder / "result.json")), folder)
        return _drive(experiment, folder, workers, on_round, checkpoint)


def _drive(
    experiment: Experiment,
    folder: Path | None,
    workers: int,
    on_round: OnRound | None,
    checkpoint: record.Checkpoint | None,
) -> Result:
    engine = driver.make_engine(experiment, workers, driver.states_of(checkpoint))
    try:
        outcome = driver.drive(experiment, engine, folder, on_round, checkpoint.state if checkpoint else None)
    finally:
        engine.close()
        experiment.recipe.net.requires_grad_()  # as it came, so that it can be given again
    return Result(experiment, outcome, folder)


def _as_own(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, saying that net and data are not those a config could name."""
    said = {section: {**settings.get(section, {}), "name": configs.OWN} for section in ("data", "model")}
    return {**settings, **said}


def _dataset(data: Data) -> Dataset:
    if isinstance(data, Dataset):
        return data
    if isinstance(data, tuple):
        return datasets.from_tensors(*data)
    return datasets.from_torch(data)
