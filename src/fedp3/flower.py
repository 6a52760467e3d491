"""FedP3 in a Flower app: a strategy for its server, and one line for its nodes.

    server:  strategy = FedP3(Net(), prune={"keep": 0.5})
    node:    fedp3_client(app, Net, load_data)

docs/flower.md shows a complete app.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("flwr") is None:
    raise ImportError("fedp3.flower needs Flower: pip install 'fedp3[flower]'")

from fedp3.deploy.node_app import fedp3_client

if TYPE_CHECKING:
    from fedp3.deploy.strategy import FedP3

__all__ = ["FedP3", "fedp3_client"]


def __getattr__(name: str) -> Any:
    # Flower starts a process on a node for every message: it does not import what servers need.
    if name != "FedP3":
        raise AttributeError(f"module 'fedp3.flower' has no attribute {name!r}")
    from fedp3.deploy.strategy import FedP3

    return FedP3
