"""What a run is of besides its config: the net's layers, the data, and who has which samples."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from fedp3 import record
from fedp3.errors import InputError
from fedp3.experiment import Experiment


def hashes(experiment: Experiment) -> dict[str, str]:
    """Hashes of what a run is of besides its config.  W_0 is not among them: whoever goes on has a checkpoint."""
    data, shards = experiment.recipe.data, sorted(experiment.shards.items())
    shapes = repr(sorted(experiment.problem.layers.shapes.items())).encode()
    cut = [w.numpy() for _, s in shards for w in (torch.tensor([len(s.train)]), s.train, s.test)]
    return {
        "net": _sha256(shapes),
        "data": _sha256(data.x.contiguous().numpy(), data.y.numpy()),
        "clients": _sha256(*cut),
    }


def _sha256(*parts: Any) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def check(folder: Path, experiment: Experiment) -> None:
    """Refuse to go on with a run over other data, another split or a net of other layers than it began with."""
    then = record.read_json(folder / "run.json").get("inputs", {})
    now = hashes(experiment)
    other = [what for what, found in now.items() if then.get(what, found) != found]
    if other:
        raise InputError(
            f"{folder} was begun with other {' and '.join(other)}: a run goes on with what it began with; "
            "choose another folder"
        )
