"""FedP3 on Flower: the same run, simulated on one machine or deployed over several.

Flower carries the messages.  What is sent, accepted and averaged is decided by the same code as in
every other engine.

    records.py        our messages inside Flower's
    grid.py           the server's side: an engine over Flower's Grid
    client_app.py     the node's side: a ClientApp
    node.py           what a node stores on its own disk, and what it refuses
    prepared.py       what a node prepares once and reads for later messages
    simulation.py     many nodes on this machine
    orphan_reaper.py  ends Ray's processes after a crash

ServerApps, clusters and certificates are in `fedp3.deploy`.
"""

import os

# Flower and Ray read these when they are imported: this package must be imported before them.
SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    # Without this, every run would build an environment from the network.
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a warning about Ray's future default
}
for _name, _value in SWITCHES.items():
    os.environ.setdefault(_name, _value)
