"""How long planning for devices and virtual time take, beside the training that they are for."""

import time
from collections.abc import Callable, Mapping

from benchmarks import fleets
from benchmarks.ratio import Work
from fedp3 import config
from fedp3.devices.buffer import Flight, fill_buffer
from fedp3.devices.clock import Work as DeviceWork
from fedp3.devices.clock import make_timings, visit
from fedp3.devices.fleets import make_fleet
from fedp3.devices.run_fleet import FleetInputs, plan_windows
from fedp3.engines.in_process import sequential
from fedp3.experiment.assemble import assemble_from, load_parts
from fedp3.experiment.experiment import Experiment
from fedp3.server.round_plans import plans_for
from fedp3.server.rounds import run_round
from fedp3.server.virtual_time import timed_round

EVENTS = 1_000_000


def experiment(*overrides: str) -> Experiment:
    """A run over phones; data are the digits, since planning does not look at them."""
    settings = config.parse({}, ["devices.fleet=phones", *overrides])
    net, data = load_parts(settings)
    return assemble_from(settings, net, data)


def seconds(work: Work) -> float:
    """The shortest of three times."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def planning(pairs: int) -> str:
    """Planning for 1,000 phones after start-up, by network."""
    parts = []
    for model, limit in {"cnn": 15, "resnet18": 300}.items():
        e = experiment(
            "partition.clients=1000",
            "partition.kind=iid",
            f"model.name={model}",
            f"devices.round_seconds={limit}",
        )
        fleet = e.server.fleet
        assert fleet is not None
        inputs = FleetInputs(
            settings=e.config.devices,
            devices=fleet.devices,
            context=e.client,
            profile=fleet.profile,
            examples=e.server.examples,
            extra=e.start.extra,
        )

        def plan(e: Experiment = e, inputs: FleetInputs = inputs) -> None:
            plan_windows(inputs, e.config.plan)
            plans_for(e.server, 1)

        parts.append(f"{model} {seconds(plan):.2f} s")
    return ", ".join(parts) + " for 1,000 phones, after start-up"


def share(pairs: int) -> str:
    """The share of a round that plans and virtual time take."""
    e = fleets.cnn("devices.fleet=phones", "devices.round_seconds=15")
    engine = sequential(e.client, e.shards)
    whole = seconds(lambda: run_round(e.server, e.start, engine.execute) and None)
    clients = fleets.participants(e)

    def plan() -> None:
        plans = plans_for(e.server, 1)
        timed_round(e.server, [plans[i] for i in clients], 0)

    return f"{100 * seconds(plan) / whole:.2f} % of a round of the CNN, 10 of 100 phones"


def events(pairs: int) -> str:
    """A million phases of clients in asynchronous rounds."""
    devices = make_fleet("phones", 1000, 0)
    timings = make_timings(devices, 0, "daily")
    work = DeviceWork(10**6, 10**6, 10.0)
    order = list(range(len(devices)))
    began = time.perf_counter()
    flying: tuple[Flight, ...] = ()
    now = visited = version = 0
    while 3 * visited < EVENTS:  # a visit is a download, a computation and an upload
        buffer = fill_buffer(
            flying,
            order,
            timings,
            lambda i, start: visit(i, timings[i], work, start),
            version=version,
            now=now,
            concurrency=100,
            size=50,
        )
        flying, now, version = buffer.flying, buffer.ended, version + 1
        visited += len(buffer.arrived)
    took = time.perf_counter() - began
    return f"{took:.1f} s for {3 * visited:,} events of 1,000 phones, {version:,} rounds"


ROWS: Mapping[str, Callable[[int], str]] = {
    "D1 planning for devices": planning,
    "D2 planning and virtual time in a round": share,
    "D3 a million events of the clock": events,
}
