"""A run with codes in both directions against plain loops, in which every client has a copy."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedp3 import config
from fedp3.client.update import local_update
from fedp3.core.types import Rejection, RejectionCode, Task
from fedp3.engines.in_process import sequential
from fedp3.experiment.assemble import assemble
from fedp3.experiment.experiment import Experiment
from fedp3.messages.compression import UNCOMPRESSED
from fedp3.planning.client_plans import client_plans
from fedp3.planning.participation import eligible_clients, sample_clients
from fedp3.runs.session import run_rounds
from fedp3.server.gate import GateResult
from fedp3.server.publication import sent_weights, without_lost_copies
from fedp3.server.rounds import run
from fedp3.server.scoring import finish
from messages.test_compressors import naive

SMALL = [
    *("method=fedavg", "model.width=0.02", "partition.clients=5", "run.clients_per_round=3"),
    *("local.steps=3", "local.lr=0.1", "run.rounds=6", "aggregate.rule=simple"),
]


def made(*more: str) -> Experiment:
    return assemble(config.parse({}, [*SMALL, *more]))


def loops(e: Experiment, code: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """W and R after a run of FedAvg with a code in both directions.

    All changes are remembered for ever.  Every client has its own copy, to which it applies what it
    missed, and its own residual.
    """
    W = {n: w.clone() for n, w in e.start.W.items()}
    R = {n: w.half().float() for n, w in W.items()}
    published: list[dict[str, Tensor]] = []
    copies = {i: ({n: w.clone() for n, w in R.items()}, 0) for i in range(e.server.clients)}
    residuals = {i: {n: torch.zeros_like(w) for n, w in W.items()} for i in copies}
    plain = replace(e.client, spec=replace(e.client.spec, compression=UNCOMPRESSED))
    plans = client_plans(e.server.plan, e.server.layers, e.server.keep, e.server.spec.seed, 0)
    for t in range(e.server.run.rounds):
        clients = sample_clients(eligible_clients(e.server.examples, t, None), e.server.run, t)
        changes = []
        for i in clients:
            copy, version = copies[i]
            for change in published[version:]:
                copy = {n: (w + change[n]).half().float() for n, w in copy.items()}
            copies[i] = copy, len(published)
            assert all(torch.equal(copy[n] + 0.0, R[n] + 0.0) for n in R)
            task = Task(t=t, plan=plans[i], weights=copy)
            update, _ = local_update(plain, e.shards[i], task, None)
            change = {}
            for n, w in update.tensors.items():
                wanted = w - copy[n] + residuals[i][n]
                change[n] = torch.tensor(naive(code, wanted, None)).view(w.shape)
                residuals[i][n] = wanted - change[n]
            changes.append(change)
        for n in W:
            W[n] = W[n] + torch.stack([change[n] for change in changes]).mean(0)
        step = {n: torch.tensor(naive(code, W[n] - R[n], None)).view(W[n].shape) for n in W}
        published.append(step)
        R = {n: (w + step[n]).half().float() for n, w in R.items()}
    return W, R


@pytest.mark.parametrize("code", ["int4", "ternary"])
def test_a_run_with_codes_is_what_plain_loops_make(code: str) -> None:
    e = made(f"upload.compress={code}", f"download.compress={code}")
    state = run_rounds(e, sequential(e.client, e.shards)).state
    assert state.published is not None
    W, R = loops(e, code)
    for n, w in W.items():
        # A number near a limit may be rounded the other way, which feedback makes up for later.
        step = float((w - e.start.W[n]).abs().max())
        assert float((state.W[n] - w).abs().mean()) < 0.01 * step, n
        assert float((state.published.R[n] - R[n]).abs().mean()) < 0.01 * step, n


def test_without_codes_nothing_is_published_and_w_is_sent() -> None:
    e = made()
    assert e.start.published is None
    assert sent_weights(e.start) is e.start.W


def test_scores_are_of_the_servers_weights_and_of_those_that_devices_hold() -> None:
    """G scores W, D scores R."""
    e = made("download.compress=ternary")
    assert e.start.published is not None
    zeros = {n: torch.zeros_like(w) for n, w in e.start.W.items()}
    state = replace(e.start, published=replace(e.start.published, R=zeros))
    final = finish(e.server, state, sequential(e.client, e.shards).execute)
    assert final.G is not None and final.D is not None
    assert final.D.loss == pytest.approx(math.log(10)), "a network of zeros knows nothing"
    assert final.G.loss != pytest.approx(math.log(10))


def test_a_late_client_is_sent_what_it_missed_the_next_time() -> None:
    """What is counted follows from accepted updates alone."""
    e = made("download.compress=ternary", "run.clients_per_round=0", "run.rounds=3")
    engine = sequential(e.client, e.shards)
    lost = []

    def execute(tasks):
        for reply in engine.execute(tasks):
            if tasks[0].kind == "train" and tasks[0].t == 1 and reply.client == 2:
                lost.append(reply)
                continue
            yield reply

    downloads = {}
    published = []
    for state, record in run(e.server, e.start, execute):
        downloads[record.t] = record.bytes_down
        published.append(state.published)
    assert len(lost) == 1
    everybody = downloads[1]
    assert downloads[2] == everybody + everybody // 5, "client 2 gets two changes, others one"
    assert published[1].holding(2).versions != published[1].versions
    assert published[2].holding(2) == published[2].holding(1)


def test_a_client_that_lost_its_copy_keeps_what_is_personal() -> None:
    for method, forgets in (("fedavg", True), ("fedper", False), ("scaffold", False)):
        e = made(f"method={method}", "download.compress=ternary", "upload.compress=ternary")
        state = replace(e.start, seen={0: 3, 1: 3})
        result = GateResult(rejected={1: Rejection(RejectionCode.COPY, "gone")})
        new = without_lost_copies(e.server, state, result)
        assert new.published is not None and new.published.holding(1) is None
        assert new.published.holding(0) is not None
        assert (1 not in new.seen) == forgets, method
        assert new.seen[0] == 3


def test_an_update_counts_as_its_change_of_what_was_published() -> None:
    """One client that does not train leaves W as it is, though it started from R."""
    e = made("download.compress=ternary", "local.lr=1e-30", "run.rounds=1")
    first = {n: w + 0.001 for n, w in e.start.W.items()}
    start = replace(e.start, W=first)
    ((state, _),) = run(e.server, start, sequential(e.client, e.shards).execute)
    for n, w in state.W.items():
        torch.testing.assert_close(w, first[n], atol=1e-6, rtol=0)
