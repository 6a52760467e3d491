"""Train one network over devices that cannot all hold, compute or upload it.

`fedp3.run(model, data)` is the short way in; `fedp3 --help` the other.  The algorithm itself is in `fedp3.server`
(Algorithm 1), `fedp3.client` and `fedp3.steps` (Algorithm 2) and `fedp3.aggregate` (Algorithm 3).
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"
__all__ = ["Result", "__version__", "layer_map", "run"]

if TYPE_CHECKING:
    from fedp3.api import Result, run
    from fedp3.layermap import layer_map

_HOMES = {"run": "fedp3.api", "Result": "fedp3.api", "layer_map": "fedp3.layermap"}


def __getattr__(name: str) -> Any:  # torch is imported when something of it is used, not before
    if name not in _HOMES:
        raise AttributeError(f"module 'fedp3' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
