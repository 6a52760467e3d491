"""Run the app in the working directory in Flower's simulation of three nodes, from fixed weights.

It is a process of its own because Ray leaves sockets and event loops behind.
"""

import sys

import torch
from quickstart import server_app
from quickstart.client_app import app
from quickstart.task import Net

from fedp3.engines.flower.simulation import _start_ray

from flwr.serverapp import ServerApp  # isort: skip
from flwr.simulation import run_simulation  # isort: skip

RUN_CONFIG = {"num-server-rounds": 2, "fraction-evaluate": 1.0, "learning-rate": 0.1}
served = ServerApp()


@served.main()
def main(grid, context):
    """`run_simulation` gives an app no run-config."""
    net = Net()
    torch.save(net.state_dict(), "initial.pt")
    server_app.Net = lambda: net
    context.run_config = {**RUN_CONFIG, "save-to": "final.pt"}
    server_app.app(grid=grid, context=context)


if __name__ == "__main__":
    stop = _start_ray(1)
    try:
        resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(served, app, num_supernodes=3, backend_config=resources)
    finally:
        stop()
    sys.exit(0)
