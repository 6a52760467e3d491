"""The model as a mean of the server's weights over rounds."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedp3 import config
from fedp3.core.hashing import model_sha256
from fedp3.core.types import Reply, Task
from fedp3.engines.base import Engine, States
from fedp3.engines.in_process import sequential
from fedp3.experiment.assemble import assemble
from fedp3.experiment.experiment import Experiment
from fedp3.report.result import Result
from fedp3.runs.history import History
from fedp3.runs.networks import Trained, network
from fedp3.runs.session import train
from fedp3.server.averaged_weights import next_average
from fedp3.server.context import ServerState
from fedp3.server.rounds import run
from fedp3.server.scoring import initial_scores

SMALL = (
    *("partition.clients=4", "model.width=0.015625", "local.steps=2", "local.batch=8"),
    *("run.rounds=5", "run.clients_per_round=0", "run.eval_every=1"),
)


def experiment(*overrides: str) -> Experiment:
    return assemble(config.parse({}, [*SMALL, *overrides]))


def engine(e: Experiment) -> Engine:
    return sequential(e.client, e.shards)


def states(e: Experiment) -> list[ServerState]:
    return [state for state, _ in run(e.server, e.start, engine(e).execute)]


def reference(values: list[Fraction], most: int) -> Fraction:
    """The weight of every round written out, in exact arithmetic."""
    shares = [Fraction(1)]
    for t in range(2, len(values) + 1):
        last = Fraction(1, min(t, most))
        shares = [s * (1 - last) for s in shares] + [last]
    assert sum(shares) == 1
    return sum((s * v for s, v in zip(shares, values, strict=True)), Fraction(0))


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=12), st.integers(2, 6))
def test_the_average_is_that_of_the_reference(values: list[int], most: int) -> None:
    average = None
    for t, value in enumerate(values, 1):
        W = {"w": torch.tensor([float(value)], dtype=torch.float64)}
        average = next_average(average, W, t, most)
    assert average is not None
    want = float(reference([Fraction(v) for v in values], most))
    assert float(average["w"]) == pytest.approx(want, rel=1e-12, abs=1e-9)


def test_clients_train_from_the_same_weights_whatever_is_averaged() -> None:
    plain, averaged = states(experiment()), states(experiment("aggregate.average=3"))
    for a, b in zip(plain, averaged, strict=True):
        assert model_sha256(a.W) == model_sha256(b.W)
    assert model_sha256(plain[-1].model) != model_sha256(averaged[-1].model)


def test_the_first_rounds_count_alike() -> None:
    done = states(experiment("aggregate.average=9"))
    for n, a in done[-1].model.items():
        mean = torch.stack([s.W[n].double() for s in done]).mean(0)
        torch.testing.assert_close(a.double(), mean, rtol=1e-6, atol=1e-7)


def test_an_average_of_one_round_is_the_model_itself() -> None:
    assert states(experiment("aggregate.average=1"))[-1].average is None


def test_a_void_round_leaves_the_average_as_it_is() -> None:
    e = experiment("aggregate.average=3", "run.quorum=4", "run.max_void=9")
    lose = 3  # in this round nobody answers
    answer = engine(e).execute

    def execute(tasks: Sequence[Task]) -> Iterable[Reply]:
        return [] if tasks[0].kind == "train" and tasks[0].t == lose else answer(tasks)

    done = [state for state, _ in run(e.server, e.start, execute)]
    assert model_sha256(done[lose].model) == model_sha256(done[lose - 1].model)
    assert model_sha256(done[lose + 1].model) != model_sha256(done[lose].model)


def test_g_the_result_and_the_exported_network_are_of_the_average() -> None:
    e = experiment("aggregate.average=4")
    outcome = train(e, None, lambda e, states: engine(e))
    model = outcome.state.model
    assert outcome.result["model_sha256"] == model_sha256(model)
    assert Result(e, outcome, History([])).weights is model
    net = network(Trained(experiment=e, state=outcome.state, clients=States()), "global")
    assert all(torch.equal(w, model[n]) for n, w in net.state_dict().items())
    alone = initial_scores(
        e.server, replace(outcome.state, W=model, average=None), engine(e).execute
    )
    assert alone["G"] is not None
    assert alone["G"].mean == outcome.result["score_global"]
