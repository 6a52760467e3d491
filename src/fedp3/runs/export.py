"""Networks as files that need no fedp3: safetensors, torch.export (pt2) and ONNX.

An export is a folder with the network, a README that says how to load it, and model.json.  It is
loaded again and compared with the network before it is called done.  Networks are traced and
compared on made-up records, and the file contains none of them.
"""

import importlib.util
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn

from fedp3 import __version__
from fedp3.core.errors import InputError, RunError
from fedp3.core.hashing import model_sha256
from fedp3.core.randomness import Stream, stream
from fedp3.core.settings import OWN
from fedp3.data.catalogue import OF_FILES, tokenizer_path
from fedp3.data.inputs import only_tensor, tensors_of
from fedp3.models.hf_folder import CONFIG, TOKENIZER
from fedp3.models.zoo import MODELS
from fedp3.privacy.made_up import made_up_records
from fedp3.runs.formats import FORMATS, Format
from fedp3.runs.networks import (
    Trained,
    is_plain,
    network,
    number_of,
    outputs_of,
    personal_layers,
)

BATCHES = (4, 1, 7)  # the first is traced; the others show that any number of samples works
TOLERANCE = 1e-4  # of the largest output: other programs add up in another order


def export(
    run: Trained,
    folder: Path,
    *,
    what: str = "global",
    client: int | str | None = None,
    format: str = "pt2",
) -> dict[str, Any]:
    """Write a network of a run to a new folder; returns the content of model.json.

    Args:
        run: the run.
        folder: where to; it must be empty or not exist.
        what: "global", "dispatched" or "personal"; see `fedp3.runs.networks.network`.
        client: whose network, by number or name; None for the server's model.
        format: "pt2", "safetensors", "onnx" or "hf".

    Raises:
        InputError: this network cannot be exported, or not in this format.
        RunError: what was written computes something else.
    """
    chosen = check_format(format)
    check_folder(folder)
    number = number_of(run, client)
    net = network(run, what, number)
    if not chosen.any_net and not is_plain(net):
        raise InputError(
            f"the method {run.experiment.config.method} changes what this network computes, which "
            f"its tensors do not show; use the format pt2 or onnx instead of {format}"
        )
    data = run.experiment.client.data
    if not chosen.several_inputs:
        only_tensor(data.x, f"the format {format}")
    rng = stream(run.experiment.config.run.seed, Stream.LAYER)
    inputs = [made_up_records(data, size, rng) for size in BATCHES]
    about = _about(run, net, what, number, format)
    with _complete_or_nothing(folder) as place:
        file = place / f"model.{chosen.suffix}"
        with _quiet():
            difference = _write_and_compare(chosen, net, inputs, file, format)
        about |= {"file": file.name, "difference": difference}
        _copy_tokenizer(run, place)
        _name_classes(place, data.class_names)
        (place / "model.json").write_text(json.dumps(about, indent=1) + "\n")
        (place / "README.md").write_text(_readme(run, net, chosen, about))
    return about | {"out": str(folder)}


@contextmanager
def _complete_or_nothing(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of an empty or absent one if nothing goes wrong in it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise InputError(f"cannot write to {folder.parent}: {error.strerror or error}") from None
    try:
        yield new
        new.chmod(0o755)
        for file in new.iterdir():  # some exporters write files that only their owner reads
            file.chmod(0o644)
        if folder.exists():
            folder.rmdir()
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of exporters about their own future and about packages nobody needs."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not an empty folder; choose another folder")


def check_format(name: str) -> Format:
    """The format of this name; refused if it is unknown, or needs what is not installed."""
    chosen = FORMATS.pick(name)
    missing = [m for m in chosen.needs if importlib.util.find_spec(m) is None]
    if missing:
        install = " ".join(sorted({chosen.needs[m] for m in missing}))
        raise InputError(
            f"the format {name} needs {', '.join(missing)}; add with: pip install {install}"
        )
    return chosen


def _write_and_compare(
    chosen: Format, net: nn.Module, inputs: list[Any], file: Path, name: str
) -> float:
    """Write a network, load it again, and return by how much its outputs differ."""
    try:
        chosen.write(net, inputs[0], file)
        difference = _largest_difference(chosen.read(file, net), net, inputs)
    except OSError as error:
        raise RunError(f"cannot write {file.name}: {error.strerror or error}") from None
    except Exception as error:  # exporters raise many kinds
        lines = str(error).strip().splitlines() or [""]
        raise InputError(
            f"the network cannot be exported as {name} ({type(error).__name__}: {lines[0]}); the "
            "format safetensors takes any network"
        ) from None
    if not difference <= TOLERANCE:
        raise RunError(
            f"the exported {name} computes something else than the network: outputs differ by "
            f"{difference:.3g} of the largest; nothing was written, try another format"
        )
    return difference


def _largest_difference(again: Callable[[Any], Tensor], net: nn.Module, inputs: list[Any]) -> float:
    """The largest difference of outputs, as a share of the largest output."""
    worst = 0.0
    for x in inputs:
        want, got = outputs_of(net, x), again(x)
        if got.shape != want.shape:
            return float("inf")
        scale = max(float(want.abs().max()), 1e-12)
        worst = max(worst, float((got - want).abs().max()) / scale)
    return worst


def _name_classes(place: Path, names: Sequence[str]) -> None:
    """Write the texts of classes where `transformers` looks for them."""
    path = place / CONFIG
    if not names or not path.exists():
        return
    config = json.loads(path.read_text())
    config["id2label"] = {str(i): name for i, name in enumerate(names)}
    config["label2id"] = {name: i for i, name in enumerate(names)}
    path.write_text(json.dumps(config, indent=2) + "\n")


def _copy_tokenizer(run: Trained, place: Path) -> None:
    """Put the tokenizer that a network was trained with beside it."""
    config = run.experiment.config
    if config.data.name not in OF_FILES or config.model.name == OWN:
        return
    architecture = MODELS.pick(config.model.name)
    own = architecture.tokenizer(config.model) if architecture.tokenizer else None
    path = tokenizer_path(config.data, own)
    if path is not None:
        for beside in (path, path.with_name("tokenizer_config.json")):
            if beside.exists():
                name = TOKENIZER if beside == path else beside.name
                shutil.copyfile(beside, place / name)


# --------------------------------------------------------------------------- what it says


def _about(
    run: Trained, net: nn.Module, what: str, client: int | None, format: str
) -> dict[str, Any]:
    config, data = run.experiment.config, run.experiment.client.data
    x = tensors_of(data.x)[0]
    layers = run.experiment.client.layers
    whole = sum(w.numel() for w in run.experiment.client.net.parameters())
    if layers.frozen:  # adapters are no part of the network that is exported
        whole = sum(w.numel() for w in network(run, "global").parameters())
    values = net.state_dict()
    if what == "global" and run.state.W.keys() <= values.keys():
        # Then the hash is that of result.json, which leaves out counters and what is frozen.
        values = {n: values[n] for n in run.state.W}
    return {
        "what": what,
        "client": client,
        "format": format,
        "method": config.method,
        "rounds": run.state.t,
        "parameters": sum(w.numel() for w in net.parameters()),
        "nonzero": sum(int(w.count_nonzero()) for w in net.parameters()),
        "parameters_of_the_global_network": whole,
        "weights_sha256": model_sha256(values),
        "input": ["batch", *x.shape[1:]],
        "classes": data.classes,
        "class_names": list(data.class_names),
        "writes_text": data.objective == "language_modelling",
        "divide_by": 255 if x.dtype == torch.uint8 else 1,
        "mean": list(data.mean),
        "std": list(data.std),
        "fedp3": __version__,
        "torch": torch.__version__,
    }


TITLES = {
    "global": "The global network",
    "dispatched": "The network of client {client}, as the server dispatches it",
    "personal": "The personal network of client {client}, after its local training",
}


def _readme(run: Trained, net: nn.Module, chosen: Format, about: Mapping[str, Any]) -> str:
    whole = about["parameters_of_the_global_network"]
    size = f"{about['parameters']:,} parameters, {100 * about['parameters'] / whole:.0f} %"
    pruned = about["parameters"] - about["nonzero"]
    zeros = f" {pruned:,} of them are zero." if pruned else ""
    shape = ", ".join(map(str, about["input"]))
    whole_numbers = tensors_of(run.experiment.client.data.x)[0].dtype == torch.int64
    values = "tokens (int64)" if whole_numbers else "float32 values"
    scaling = ""
    if about["divide_by"] != 1:
        scaling = "Pixels 0..255 are divided by 255 first"
        if about["mean"]:
            scaling += f", then normalised per channel: (x - {about['mean']}) / {about['std']}"
        scaling = f" {scaling}."
    names = ""
    if about["class_names"]:
        numbered = ", ".join(f"{i}: {name}" for i, name in enumerate(about["class_names"]))
        names = f" The classes are {numbered}."
    stays = personal_layers(run.experiment)
    warning = ""
    if stays and about["what"] == "global":
        warning = (
            f"\nThe layers {', '.join(stays)} are trained on clients and never uploaded. This "
            "network has them as they were before training.\n"
        )
    return f"""\
# {TITLES[about["what"]].format(client=about["client"])}

Trained with fedp3 {about["fedp3"]} by the method {about["method"]}, in {about["rounds"]} rounds. \
It has {size} of the global network.{zeros} Loading it needs no fedp3:

```python
{chosen.lines}```

`x` holds {values} of shape ({shape}).{scaling} The outputs are scores of \
{about["classes"]} classes; the largest is the prediction.{names} \
When the file was written, it was loaded again, and its outputs differed from the network's by \
{about["difference"]:.1e} of the largest.
{warning}
```text
{net}
```
"""
