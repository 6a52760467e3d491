"""Flower's simulation with its FedAvg on W3, as its users write it.

`python -m benchmarks.flower_peer [ROUNDS]` prints the wall seconds of a round, without the start of
Ray, and those of ours over as many processes.
"""

import os
import sys
import time
from functools import cache

import torch

from benchmarks import bare, fleets
from fedp3.engines.process_pool import pool
from fedp3.server.rounds import run

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


@cache
def work() -> bare.Work:
    """The work, made once in each process."""
    torch.set_num_threads(1)
    return bare.work_of(fleets.tiny(*fleets.DENSE))


def ours(rounds: int) -> float:
    """Wall seconds per round of ours over two processes."""
    e = fleets.tiny(*fleets.DENSE)
    engine = pool(e.client, e.shards, 2)
    results = zip(run(e.server, e.start, engine.execute), range(rounds + 1), strict=False)
    try:
        ends = [time.perf_counter() for _ in results]
    finally:
        engine.close()
    return (ends[-1] - ends[0]) / rounds


def theirs(rounds: int) -> float:
    """Wall seconds per round of Flower's simulation over two processes."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server, ends = ClientApp(), ServerApp(), []

    @client.train()
    def train(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        W = bare.sum_of(work(), message.content["arrays"].to_torch_state_dict(), [i])
        counts = MetricRecord({"num-examples": len(work().train[i])})
        return Message(RecordDict({"arrays": ArrayRecord(W), "metrics": counts}), reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_train=0.1, fraction_evaluate=0.0)

        def note_end(round_: int, arrays: ArrayRecord) -> None:
            ends.append(time.perf_counter())

        start = ArrayRecord(work().net.state_dict())
        strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds + 1, evaluate_fn=note_end)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server, client, len(work().train), backend_config=resources)
    return (ends[-1] - ends[1]) / rounds


def main() -> None:
    """Print both times."""
    from benchmarks import flower_peer  # Ray's processes can import it under this name

    os.environ.update(QUIET)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print(flower_peer.theirs(rounds), flower_peer.ours(rounds))


if __name__ == "__main__":
    main()
