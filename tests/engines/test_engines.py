"""Engines carry; they do not change a bit, and a client that breaks is its own failure."""

import multiprocessing
import os
import signal
import time
from collections import OrderedDict
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from fedp3 import config
from fedp3.core.errors import InputError, RunError
from fedp3.core.hashing import model_sha256
from fedp3.core.threads import one_thread
from fedp3.core.types import ClientPlan, ClientState, RejectionCode, Task
from fedp3.data import from_tensors
from fedp3.engines.base import States
from fedp3.engines.catalogue import make_engine
from fedp3.engines.in_process import sequential
from fedp3.engines.process_pool import pool
from fedp3.experiment.assemble import assemble, assemble_from
from fedp3.planning.dispatch import global_tasks
from fedp3.privacy.mechanism import PrivateSteps
from fedp3.privacy.settings import Mechanism
from fedp3.runs.session import run_rounds
from fedp3.server.round_plans import plans_for
from fedp3.server.rounds import run, run_round

SMALL = [
    "model.width=0.03",
    "partition.clients=6",
    "run.clients_per_round=4",
    "run.rounds=3",
    "local.steps=2",
]


@pytest.fixture(scope="module")
def experiment():
    return assemble(
        config.parse({}, [*SMALL, "prune.keep=[0.9, 0.5]", "plan.head=personal_uploaded"])
    )


def all_clients(server):
    """The server, with every client in every round."""
    return replace(server, run=replace(server.run, clients_per_round=0))


def final_hash(experiment, engine) -> str:
    try:
        return run_rounds(experiment, engine).result["model_sha256"]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("setting", "stacked"),
    [("selector=magnitude", True), ("selector=neuron", True), ("local_pruner=uniform", False)],
)
def test_one_two_and_four_workers_give_the_same_bits(setting, stacked):
    e = assemble(
        config.parse(
            {}, [*SMALL, f"prune.{setting}", "aggregate.rule=attention", "plan.head=personal"]
        )
    )
    assert e.client.stacked == stacked
    hashes = {workers: final_hash(e, make_engine(e, workers)) for workers in (1, 2, 4)}
    assert len(set(hashes.values())) == 1, hashes


def test_any_reply_order_gives_the_same_bits(experiment):
    engine = sequential(experiment.client, experiment.shards)
    straight = final_hash(experiment, engine)
    backwards = sequential(experiment.client, experiment.shards)

    def reversed_replies(tasks):
        return reversed(list(backwards.execute(tasks)))

    *_, (state, _) = run(experiment.server, experiment.start, reversed_replies)
    assert model_sha256(state.W) == straight


def test_answers_of_one_round_stay_what_they_were_in_the_next(experiment):
    """Workers write into blocks of shared memory that were used before; answers are copies."""
    seen: list[tuple[dict, dict]] = []
    one_by_one = replace(experiment.client, stacked=False)  # one block per client, not per stack
    engine = pool(one_by_one, experiment.shards, 2)

    def watched(tasks):
        for reply in engine.execute(tasks):
            seen.append((reply.tensors, {n: w.clone() for n, w in reply.tensors.items()}))
            yield reply

    try:
        list(run(experiment.server, experiment.start, watched))
    finally:
        engine.close()
    assert sum(bool(tensors) for tensors, _ in seen) == 12
    assert all(torch.equal(tensors[n], copy[n]) for tensors, copy in seen for n in copy)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_that_fails_in_a_stack_fails_alone(workers):
    e = assemble(config.parse({}, [*SMALL, "plan.layers=full", "prune.keep=1.0"]))
    assert e.client.stacked
    lost = replace(e.shards[2], train=e.shards[2].train + 10**6)  # no such samples
    engine = make_engine(replace(e, shards={**e.shards, 2: lost}), workers)
    try:
        state, record = run_round(all_clients(e.server), e.start, engine.execute)
    finally:
        engine.close()
    assert list(record.rejected) == [2] and "IndexError" in record.rejected[2].text
    assert record.accepted == (0, 1, 3, 4, 5) and state.t == 1


def test_clients_train_on_one_thread_and_the_setting_comes_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


class Breaks(nn.Module):
    """A network that raises, hangs, or ends its process, when it sees a certain client's data."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.fc1, self.ffc, self.how = nn.Linear(4, 3), nn.Linear(3, 2), how

    def forward(self, x):
        if self.training and float(x[0, 0]) > 50:
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hangs":
                time.sleep(3600)
            raise ValueError("this client cannot")
        return self.ffc(torch.relu(self.fc1(x)))


def breaking(how: str):
    """Six clients, of which client 2 breaks."""
    x, y = torch.randn(60, 4), torch.arange(60) % 2
    e = assemble_from(
        config.parse(
            {}, ["partition.kind=iid", *SMALL[1:], "run.clients_per_round=0", "plan.layers=full"]
        ),
        Breaks(how),
        from_tensors(x, y),
    )
    with torch.no_grad():
        e.client.data.x[e.shards[2].train] = 99.0
    return e


def test_a_client_that_raises_is_rejected_with_its_reason_and_the_round_goes_on():
    e = breaking("raises")
    new, record = run_round(e.server, e.start, sequential(e.client, e.shards).execute)
    assert list(record.rejected) == [2]
    assert "ValueError: this client cannot" in record.rejected[2].text
    assert record.accepted == (0, 1, 3, 4, 5)
    without = [p for p in plans_for(e.server, 0) if p.client != 2]
    assert len(without) == 5 and new.seen.keys() == {0, 1, 3, 4, 5}


def test_a_client_whose_process_is_killed_fails_alone():
    e = breaking("dies")
    engine = pool(e.client, e.shards, 2)
    try:
        _, record = run_round(e.server, e.start, engine.execute)
        assert record.accepted == (0, 1, 3, 4, 5)
        assert "died twice" in record.rejected[2].text
        _, again = run_round(e.server, e.start, engine.execute)
        assert again.accepted == (0, 1, 3, 4, 5)
    finally:
        engine.close()


@dataclass(frozen=True)
class DyingSteps:
    """Private steps whose process ends when client 2 draws its records."""

    steps: PrivateSteps
    is_plain: bool = False
    repeatable: bool = False

    def batches(self, local, samples, seed, *address):
        if address[1] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.steps.batches(local, samples, seed, *address)

    def gradient(self, *arguments):
        return self.steps.gradient(*arguments)

    def generator(self, *arguments):
        return self.steps.generator(*arguments)


def test_under_ldp_no_client_draws_noise_a_second_time_because_a_process_died():
    e = breaking("never")
    every_record = Mechanism(sample_rate=1.0, randomness="os", ghost=True)
    layers = {"fc1": nn.Linear(4, 3), "relu": nn.ReLU(), "ffc": nn.Linear(3, 2)}
    private = replace(
        e.client,
        steps=DyingSteps(PrivateSteps(every_record)),
        net=nn.Sequential(OrderedDict(layers)),
    )
    engine = pool(private, e.shards, 2)
    try:
        _, record = run_round(e.server, e.start, engine.execute)
        assert 2 in record.rejected and "noise that is not charged" in record.rejected[2].text
        assert {*record.rejected.values()} == {record.rejected[2]}
        assert record.rejected[2].code == RejectionCode.LOST
    finally:
        engine.close()


def test_when_nobody_answers_the_run_ends_with_the_reasons():
    e = breaking("raises")
    with torch.no_grad():
        e.client.data.x[:] = 99.0
    states = []
    with pytest.raises(RunError, match=r"5 rounds in a row.*this client cannot"):
        states.extend(
            run(
                replace(e.server, run=replace(e.server.run, rounds=9)),
                e.start,
                sequential(e.client, e.shards).execute,
            )
        )
    assert len(states) == 5
    assert {model_sha256(state.W) for state, _ in states} == {model_sha256(e.start.W)}


@pytest.mark.parametrize("workers", [1, 2])
def test_after_the_deadline_clients_are_late_and_the_round_closes(workers, experiment):
    e, make = experiment, {1: sequential, 2: lambda r, s, **kw: pool(r, s, 2, **kw)}[workers]
    engine = make(e.client, e.shards, deadline=1e-9)
    try:
        _, record = run_round(e.server, e.start, engine.execute)
        assert len(record.late) >= 1
        assert not record.rejected
        assert len(record.late) + len(record.accepted) == 4
    finally:
        engine.close()


def test_a_worker_that_hangs_makes_its_client_late_is_replaced_and_does_not_hold_up_the_end():
    e = breaking("hangs")
    engine = pool(e.client, e.shards, 2, deadline=4)
    scoring = global_tasks(e.start.W, plans_for(all_clients(e.server), 0), 0, {})

    def workers_after_scoring() -> set[int]:
        """Scores have no deadline, so that a slow start does not count."""
        assert len(list(engine.execute(scoring))) == 6
        return {child.pid for child in multiprocessing.active_children()}

    try:
        first = workers_after_scoring()
        _, record = run_round(e.server, e.start, engine.execute)
        assert record.late == (2,) and record.accepted == (0, 1, 3, 4, 5)
        time.sleep(4.1)
        assert not first & workers_after_scoring()
        _, record = run_round(e.server, e.start, engine.execute)
        assert record.late == (2,)
    finally:
        engine.close()  # returns, although client 2 sleeps for an hour
    assert not multiprocessing.active_children()


def test_a_network_that_cannot_be_pickled_is_refused_for_workers(experiment):
    class Local(nn.Linear):
        pass

    with pytest.raises(InputError, match="can be pickled"):
        pool(replace(experiment.client, net=Local(2, 2)), experiment.shards, 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_whose_personal_layers_are_gone_fails_and_does_not_begin_anew(workers, experiment):
    e = experiment
    later = replace(e.start, t=1, seen={0: 0, 1: 0})  # rounds that left no state here
    engine = make_engine(e, workers)
    try:
        _, record = run_round(all_clients(e.server), later, engine.execute)
    finally:
        engine.close()
    assert set(record.rejected) == {0, 1} and record.accepted == (2, 3, 4, 5)
    assert "this client's state of 'ffc' after round 1 is gone" in record.rejected[0].text


def test_states_keep_the_one_a_task_starts_from_and_the_newest():
    states, plan = States(), ClientPlan(7, {})
    for t in (1, 4):
        states.keep(7, ClientState(t, {"w": torch.ones(1)}))
    # Round 4's update was never accepted.
    assert states.start(Task(t=5, plan=plan, weights={}, state_from=1)).t == 1
    states.keep(7, ClientState(5, {"w": torch.ones(1)}))
    assert set(states.by_client[7]) == {1, 5}
    assert states.start(Task(t=6, plan=plan, weights={}, kind="evaluate", state_from=1)).t == 1
    assert set(states.by_client[7]) == {1, 5}, "an evaluation forgets nothing"
    assert states.start(Task(t=6, plan=plan, weights={}, state_from=-1)) is None
