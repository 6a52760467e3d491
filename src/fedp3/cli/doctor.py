"""`fedp3 doctor`: what is installed on this machine, and what is missing."""

import importlib.metadata
import importlib.util
import os
from typing import Any

from fedp3.cli import terminal
from fedp3.cli.options import AsJson, DataDir

EXTRAS = {
    "flower": "flwr",
    "privacy": "dp_accounting",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "onnx": "onnxruntime",
}
LIBRARIES = (
    "torch",
    "numpy",
    "pydantic",
    "typer",
    "rich",
    "safetensors",
    "jinja2",
    "scikit-learn",
    "pooch",
    "matplotlib",
)


def doctor(data_dir: DataDir = None, json: AsJson = False) -> None:
    """Show versions, data sets, optional extras, threads and devices of this machine.

    Example: fedp3 doctor
    """
    state = _inspect(data_dir)
    if json:
        terminal.as_json(state)
        return
    terminal.line("versions")
    _show(state["versions"])
    terminal.line("data")
    _show({name: path or "not found" for name, path in state["data"].items()})
    terminal.line("extras")
    _show(
        {
            name: "yes" if installed else f"no; install with: pip install 'fedp3[{name}]'"
            for name, installed in state["extras"].items()
        }
    )
    terminal.line(
        f"cores {state['cores']}, torch threads {state['torch_threads']}; "
        f"every client trains on one thread; devices: {', '.join(state['devices'])}"
    )


def _inspect(data_dir: DataDir) -> dict[str, Any]:
    import torch

    from fedp3 import data
    from fedp3.runs.description import versions

    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.append("cuda")
    if torch.backends.mps.is_available():
        devices.append("mps")
    return {
        "versions": versions() | {name: importlib.metadata.version(name) for name in LIBRARIES},
        "data": {s.name: str(s.path) if s.path else None for s in data.inventory(data_dir)},
        "extras": {
            name: importlib.util.find_spec(module) is not None for name, module in EXTRAS.items()
        },
        "cores": (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        "torch_threads": torch.get_num_threads(),
        "devices": devices,
    }


def _show(entries: dict[str, str]) -> None:
    for name, value in entries.items():
        terminal.line(f"  {name:<14} {value}")
