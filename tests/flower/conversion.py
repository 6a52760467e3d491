"""The stock app in `quickstart/`, and the lines that turn it into one of FedP3.

`flwr new` downloads its apps, so that this one was written for these tests.  It has the files,
functions and keys of Flower's quickstart for PyTorch, and makes its data itself.
"""

import difflib
import shutil
from pathlib import Path

from fedp3.data.gathering import gather
from fedp3.data.shards import Shard
from fedp3.data.user_data import pool
from fedp3.deploy.strategy_settings import completed
from fedp3.engines.catalogue import make_engine
from fedp3.experiment.assemble import assemble_from
from fedp3.runs.session import run_rounds

STOCK = Path(__file__).parent / "quickstart"
# file -> lines that are replaced -> what replaces them
CHANGES = {
    "pyproject.toml": {'    "torch",\n': '    "torch",\n    "fedp3[flower]",\n'},
    "quickstart/client_app.py": {
        "from quickstart.task import Net, load_data\n": (
            "from fedp3.flower import fedp3_client\nfrom quickstart.task import Net, load_data\n"
        ),
        "app = ClientApp()\n": "app = ClientApp()\nfedp3_client(app, Net, load_data)\n",
    },
    "quickstart/server_app.py": {
        "from flwr.serverapp.strategy import FedAvg\n": "from fedp3.flower import FedP3\n",
        "    strategy = FedAvg(fraction_evaluate=fraction_evaluate)\n": (
            '    strategy = FedP3(global_model, prune={"keep": 0.5})\n'
        ),
    },
}


def write_converted(folder: Path) -> list[str]:
    """Write the converted app; returns the changed lines, as `diff` shows them."""
    shutil.copytree(STOCK, folder, ignore=shutil.ignore_patterns("__pycache__"))
    changed = []
    for name, replacements in CHANGES.items():
        before = after = (STOCK / name).read_text()
        for old, new in replacements.items():
            assert after.count(old) == 1, (name, old)
            after = after.replace(old, new)
        (folder / name).write_text(after)
        shown = difflib.ndiff(before.splitlines(), after.splitlines())
        changed += [line for line in shown if line[0] in "+-"]
    return changed


def trained_without_flower(task, initial) -> str:
    """The hash of the model that the same run gives without Flower.

    Args:
        task: the module `quickstart.task`.
        initial: the weights that it starts from.
    """
    settings = {"prune": {"keep": 0.5}, "local": {"lr": 0.1}, "run": {"rounds": 2}}
    parts = [gather(loader.dataset).data for i in range(3) for loader in task.load_data(i, 3)]
    data, indices = pool(parts)
    net = task.Net()
    net.load_state_dict(initial)
    shards = {i: Shard(indices[2 * i], indices[2 * i + 1]) for i in range(3)}
    experiment = assemble_from(completed(settings, net, 3), net, data, shards=shards)
    return str(run_rounds(experiment, make_engine(experiment, 1)).result["model_sha256"])
