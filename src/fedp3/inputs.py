"""What a run is of besides its config: the net's layers and first weights, the data, and who has which samples."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from fedp3 import record
from fedp3.errors import InputError
from fedp3.experiment import Experiment

INITIAL = "initial.safetensors"  # W_0 of a net that was given, not built from the config


def hashes(experiment: Experiment) -> dict[str, str]:
    """Hashes of what must be the same for a run to go on; W_0 is not among them, a run goes on with its own."""
    data, shards = experiment.recipe.data, sorted(experiment.shards.items())
    layers = experiment.problem.layers
    cut = [w.numpy() for _, s in shards for w in (torch.tensor([len(s.train)]), s.train, s.test)]
    return {
        "net": _sha256(repr(sorted(layers.shapes.items())).encode()),
        "layers": _sha256(repr([(l, list(names)) for l, names in layers.layers.items()]).encode()),
        "data": _sha256(data.x.contiguous().numpy(), data.y.contiguous().numpy()),
        "scaling": _sha256(repr((data.classes, data.mean, data.std, data.crop, data.flip)).encode()),
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


def as_begun(folder: Path, experiment: Experiment) -> Experiment:
    """The experiment with the W_0 that its run began with: since then the net has been a workbench."""
    path = folder / INITIAL
    try:
        W = load_tensors(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {path}, with which this run began: {error}") from None
    if record.model_sha256(W) != record.read_json(folder / "run.json").get("initial_sha256"):
        raise InputError(f"{path} was damaged: it is not what this run began with")
    recipe, start = replace(experiment.recipe, initial=W), replace(experiment.start, W=W)
    return replace(experiment, recipe=recipe, start=start)
