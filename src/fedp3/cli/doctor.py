"""What is here and what is missing."""

import importlib.metadata
import importlib.util
import os
from typing import Any

from fedp3.cli import show
from fedp3.cli.plan import AsJson, DataDir

OPTIONAL = {"flower": "flwr", "privacy": "dp_accounting", "tensorboard": "tensorboard"}
SHOWN = ("torch", "numpy", "pydantic", "typer", "rich", "safetensors", "jinja2", "scikit-learn", "pooch", "matplotlib")


def doctor(data_dir: DataDir = None, json: AsJson = False) -> None:
    """Report versions, data sets found, optional parts and threads.

    Example: fedp3 doctor
    """
    import torch

    from fedp3 import data
    from fedp3.driver import versions

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = [
        "cpu",
        *(["cuda"] if torch.cuda.is_available() else []),
        *(["mps"] if torch.backends.mps.is_available() else []),
    ]
    found: dict[str, Any] = {
        "versions": versions() | {n: importlib.metadata.version(n) for n in SHOWN},
        "data": {r.name: str(r.path) if r.path else None for r in data.inventory(data_dir)},
        "extras": {name: importlib.util.find_spec(module) is not None for name, module in OPTIONAL.items()},
        "cores": cores,
        "torch_threads": torch.get_num_threads(),
        "devices": devices,
    }
    if json:
        show.as_json(found)
        return
    for title in ("versions", "data", "extras"):
        show.tell(title)
        for name, value in found[title].items():
            missing = f"no; install with: pip install 'fedp3[{name}]'" if title == "extras" else "not found"
            text = {True: "yes", False: missing, None: missing}.get(value, value)
            show.tell(f"  {name:<14} {text}")
    threads = f"cores {cores}, torch threads {found['torch_threads']}; every client trains on one thread"
    show.tell(f"{threads}; devices: {', '.join(devices)}")
