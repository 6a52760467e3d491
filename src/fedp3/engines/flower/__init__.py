"""FedP3 on Flower: the same run, simulated on one machine or deployed over several.

Flower carries the messages; what is sent, accepted and averaged is decided by the core, as in every engine.
    records.py   our messages inside Flower's          grid.py         the server's side: an engine over a Grid
    client.py    the node's side: a ClientApp          node.py         what a node keeps on its own disk, and refuses
    simulation.py  many nodes on this machine          app.py          the ServerApp, and apps written for `flwr run`
    cluster.py   a SuperLink and SuperNodes here       strategy.py     FedP3 as a Strategy, for an app of your own
"""

import os

SWITCHES = {  # read by Flower and Ray when they are imported: this package must come first
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # else every run builds an environment from the network
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray warns about its own future default otherwise
}
for _name, _value in SWITCHES.items():
    os.environ.setdefault(_name, _value)
