"""Rounds in virtual time: who is late is left out, on every engine and after every resume."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedp3 import config
from fedp3.core.errors import InputError
from fedp3.core.hashing import model_sha256
from fedp3.core.types import AcceptedUpdate, ClientUpdate, Reply, Task
from fedp3.devices.buffer import Flight
from fedp3.devices.round_ends import LATE, SURPLUS, USED, Visit
from fedp3.devices.run_fleet import FleetInputs, as_planned
from fedp3.devices.settings import DeviceRow, DevicesSettings, device_of
from fedp3.engines.base import Engine
from fedp3.engines.in_process import sequential
from fedp3.engines.process_pool import pool
from fedp3.experiment.assemble import assemble
from fedp3.experiment.experiment import Experiment
from fedp3.runs import session
from fedp3.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedp3.server.aggregators import AGGREGATORS, weighted_mean
from fedp3.server.buffered import moved
from fedp3.server.context import RoundRecord, ServerState
from fedp3.server.round_plans import plans_for
from fedp3.server.rounds import run
from worlds import same, world

MODES = {
    "wait": (),
    "deadline": ("devices.planner=manual", "devices.round_seconds=0.5", "method=fedavg"),
    "first": ("devices.planner=manual", "devices.round_seconds=0", "method=fedavg"),
    "buffered": ("devices.buffer=2",),
    "sub-models": ("method=heterofl",),
}


def experiment(mode: str, *overrides: str) -> Experiment:
    end = "wait" if mode == "sub-models" else mode
    return assemble(
        config.parse(
            {},
            [
                "partition.clients=12",
                "model.name=mlp",
                "model.width=0.1",
                "local.steps=2",
                "run.rounds=5",
                "run.clients_per_round=5",
                "run.eval_every=0",
                "run.final_p=false",
                "devices.fleet=phones",
                "devices.round_seconds=0.6",
                *MODES[mode],
                f"devices.round_end={end}",
                *overrides,
            ],
        )
    )


def outcome(
    e: Experiment, engine: Engine, start: ServerState | None = None
) -> tuple[ServerState, list[RoundRecord]]:
    state, records = start or e.start, []
    for new, record in run(e.server, state, engine.execute):
        state = new
        records.append(record)
    engine.close()
    return state, records


def backwards(e: Experiment) -> Engine:
    """An engine whose replies come in the opposite order."""
    engine = sequential(e.client, e.shards)

    def execute(tasks: Sequence[Task]) -> Iterator[Reply]:
        yield from reversed(list(engine.execute(list(reversed(tasks)))))

    return Engine(execute=execute, states=engine.states, close=engine.close)


@pytest.mark.parametrize("mode", MODES)
def test_a_straggler_experiment_repeats_to_the_bit_on_every_engine(mode: str) -> None:
    e = experiment(mode)
    state, records = outcome(e, sequential(e.client, e.shards))
    for engine in (pool(e.client, e.shards, 2), backwards(e)):
        other, again = outcome(e, engine)
        assert model_sha256(other.W) == model_sha256(state.W)
        assert [r.clock for r in again] == [r.clock for r in records]
        assert (other.clock, other.flying) == (state.clock, state.flying)


@pytest.mark.parametrize("mode", ["deadline", "first"])
def test_who_is_late_is_left_out_and_costs_a_download(mode: str) -> None:
    e = experiment(mode)
    engine = sequential(e.client, e.shards)
    executed: list[list[int]] = []

    def execute(tasks: Sequence[Task]) -> Iterator[Reply]:
        executed.append([task.plan.client for task in tasks])
        return iter(list(engine.execute(tasks)))

    late = 0
    for k, (_, record) in enumerate(run(e.server, e.start, execute)):
        clock = record.clock
        assert clock is not None
        used = [i for i, c in clock.clients.items() if c.outcome == USED]
        assert executed[k] == list(record.accepted) == used
        assert set(record.late) == set(record.sampled) - set(used)
        assert all(
            c.outcome in {USED, {"deadline": LATE, "first": SURPLUS}[mode]}
            for c in clock.clients.values()
        )
        assert (record.bytes_down > record.bytes_up) == bool(record.late)
        late += len(record.late)
    assert late > 0


def test_the_clock_goes_on_from_round_to_round_and_rounds_last_as_long_as_their_slowest() -> None:
    _, records = outcome(e := experiment("wait"), sequential(e.client, e.shards))
    ended = 0.0
    for record in records:
        assert record.clock is not None
        assert record.clock.began == ended
        parts = record.clock.clients.values()
        ended = record.clock.ended
        assert ended == pytest.approx(max(c.began + c.down + c.compute + c.up for c in parts))


def test_devices_that_are_not_there_are_not_asked(tmp_path: Path) -> None:
    trace = tmp_path / "nights"
    trace.write_text("0,on\n0.9,off\n2.0,off\n")
    e = experiment("wait", f"devices.availability={trace}", "run.rounds=10")
    everyone, _ = outcome(other := experiment("wait"), sequential(other.client, other.shards))
    state, records = outcome(e, sequential(e.client, e.shards))
    assert min(len(r.sampled) for r in records) < 5
    assert model_sha256(everyone.W) != model_sha256(state.W)
    outcomes = {c.outcome for r in records if r.clock for c in r.clock.clients.values()}
    assert "left" in outcomes


def test_asynchronous_rounds_of_equal_devices_that_wait_for_all_are_synchronous() -> None:
    same_devices = ("devices.fleet={'Pixel 3'=1.0}", "run.clients_per_round=0")
    plain = ("devices.planner=manual", "method=fedavg", "partition.sizes=100")
    a = experiment("wait", *same_devices, *plain)
    b = experiment("buffered", *same_devices, *plain, "devices.buffer=12")
    (one, _), (other, records) = (outcome(e, sequential(e.client, e.shards)) for e in (a, b))
    assert all(len(r.accepted) == 12 for r in records)
    assert same(one.W, other.W)


# --------------------------------------------------------------------------- overlapping rounds


def test_a_stale_change_is_applied_to_the_model_of_now() -> None:
    here = world("mlp")
    old, now = here.W, {n: w + 1 for n, w in here.W.items()}
    (task,) = here.tasks(here.plans("full", 1.0)[:1], t=1)
    (update,) = list(here.engine().execute([task]))
    state = ServerState(t=4, W=now, versions={1: old})
    assert isinstance(update, ClientUpdate)
    (result,) = moved([AcceptedUpdate(update, task.plan, task.masks)], state)
    for n, w in result.update.tensors.items():
        expected = now[n] + (update.tensors[n] - old[n]) / math.sqrt(4)
        assert torch.allclose(w, expected, atol=1e-6)
    fresh = ServerState(t=1, W=old)
    (unchanged,) = moved([AcceptedUpdate(update, task.plan, task.masks)], fresh)
    assert unchanged.update is update


def test_a_rule_from_outside_says_itself_whether_rounds_may_overlap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What decides is the rule that was registered, and a server optimizer keeps it."""

    def weigh(update: AcceptedUpdate) -> float:
        return math.sqrt(update.examples)

    monkeypatch.setattr(AGGREGATORS, "_table", dict(AGGREGATORS))
    name = "root"
    AGGREGATORS.add(name, weighted_mean(weigh, of_changes=True))
    AGGREGATORS.add(f"{name}-of-places", weighted_mean(weigh))
    for more in ("aggregate.damp=0", "aggregate.damp=0.5", "aggregate.server=adam"):
        e = experiment("buffered", f"aggregate.rule={name}", more)
        assert e.server.aggregator.of_changes
        with pytest.raises(InputError, match=f"rule: '{name}-of-places' weighs an update by where"):
            experiment("buffered", f"aggregate.rule={name}-of-places", more)
    assert not experiment("wait", f"aggregate.rule={name}-of-places").server.aggregator.of_changes


def test_buffered_rounds_use_updates_of_older_models() -> None:
    e = experiment("buffered", "run.rounds=8")
    _, records = outcome(e, sequential(e.client, e.shards))
    stale = [c.began < r.clock.began for r in records if r.clock for c in r.clock.clients.values()]
    assert any(stale) and not all(stale)


def test_a_checkpoint_holds_the_clients_in_flight_and_their_models(tmp_path: Path) -> None:
    here = world("mlp")
    flights = tuple(
        Flight(v, Visit(client=i, began=v, down=1, compute=2, up=3)) for i, v in ((3, 0), (1, 2))
    )
    versions = {0: {n: w + 1 for n, w in here.W.items()}, 2: here.W}
    state = ServerState(t=3, W=here.W, clock=77, flying=flights, versions=versions)
    (tmp_path / "checkpoint").mkdir()
    save_checkpoint(tmp_path, Checkpoint(state, {}), "digest")
    loaded, broken = load_checkpoint(tmp_path, "digest")
    assert loaded is not None and not broken
    assert (loaded.state.clock, loaded.state.flying) == (77, flights)
    assert loaded.state.versions.keys() == versions.keys()
    assert all(same(loaded.state.versions[v], versions[v]) for v in versions)


class Stop(Exception):
    """Interrupts a run."""


@pytest.mark.parametrize("mode", ["deadline", "buffered"])
def test_a_run_that_was_stopped_goes_on_with_the_same_clock_and_bits(
    mode: str, tmp_path: Path
) -> None:
    e = experiment(mode)

    def train(folder: Path, *, stop_after: int = 99, resume: bool = False) -> session.Outcome:
        def on_round(record: RoundRecord) -> None:
            if record.t == stop_after:
                raise Stop

        return session.train(
            e,
            folder,
            lambda experiment, states: sequential(experiment.client, experiment.shards, states),
            resume=resume,
            watch=session.watch_with(on_round),
        )

    whole = train(tmp_path / "whole")
    with pytest.raises(Stop):
        train(tmp_path / "parts", stop_after=2)
    parts = train(tmp_path / "parts", resume=True)
    assert parts.result["model_sha256"] == whole.result["model_sha256"]
    assert parts.result["virtual_seconds"] == whole.result["virtual_seconds"] > 0


# --------------------------------------------------------------------------- schedules of layers


@pytest.mark.parametrize("mode", ["wait", "deadline", "buffered"])
def test_the_clock_counts_what_is_due_in_each_round(mode: str) -> None:
    """Rounds of one small layer are shorter than rounds of all; a buffered run ends the same."""
    e = experiment(
        mode,
        *("method=fedpart", "plan.warm=1", "plan.stretch=1", "run.clients_per_round=0"),
        *("devices.planner=manual", "devices.round_seconds=60"),
    )
    engine = sequential(e.client, e.shards)
    records = [record for _, record in run(e.server, e.start, engine.execute)]
    assert all(record.accepted for record in records)
    if mode != "buffered":
        seconds = [r.clock.ended - r.clock.began for r in records if r.clock]
        assert seconds[0] > max(seconds[1:]), "the first round trains and uploads everything"
        assert seconds[4] < seconds[2], "the head is the smallest layer"


def test_a_device_must_hold_the_largest_round_of_a_schedule() -> None:
    e = assemble(
        config.parse(
            {},
            [
                *("method=fedp3-paced", "plan.period=2", "plan.share=0.3", "partition.clients=2"),
                *("run.clients_per_round=0", "model.name=cnn", "model.width=0.1"),
            ],
        )
    )
    rounds = [plans_for(e.server, t) for t in range(e.server.turn)]
    peaks = [e.costs_of(plans)[0].peak_mb for plans in rounds]
    assert max(peaks) > min(peaks)
    between = (max(peaks) + min(peaks)) / 2
    row = DeviceRow(name="small", memory_mb=between, gflops=1, mbps_down=1, mbps_up=1)
    inputs = FleetInputs(
        settings=DevicesSettings(fleet="phones", memory_share=1.0),
        devices=(device_of(row), device_of(replace(row, memory_mb=2 * max(peaks)))),
        context=e.client,
        profile=e.profile,
        examples=e.server.examples,
        extra={},
    )
    for order in (rounds, rounds[::-1]):
        fleet = as_planned(inputs, [plan for plans in order for plan in plans])
        assert fleet.able == {1} and fleet.binding == ("memory", "")
