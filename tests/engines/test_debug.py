"""The debug engine raises exceptions in a client's code, and has the result of the others."""

from dataclasses import replace

import pytest
import torch

from fedp3 import config
from fedp3.client import stacked
from fedp3.client.hooks import Hooks
from fedp3.core.types import Failure, RejectionCode
from fedp3.engines.catalogue import ENGINES, make_engine
from fedp3.engines.in_process import debug, sequential
from fedp3.experiment.assemble import assemble
from fedp3.runs.session import run_rounds
from fedp3.server.rounds import run_round
from worlds import same

SMALL = [
    "model.width=0.03",
    "partition.clients=5",
    "run.clients_per_round=3",
    "run.rounds=3",
    "local.steps=3",
    "plan.head=personal",
]


def failing_loss(net, x, y, inputs):
    raise ZeroDivisionError("this loss divides by nothing")


def trained(experiment, engine: str):
    running = make_engine(experiment, 1, engine=engine)
    try:
        return run_rounds(experiment, running)
    finally:
        running.close()


def test_an_exception_in_a_clients_code_is_raised_with_its_traceback():
    experiment = assemble(config.parse({}, SMALL))
    spec = replace(experiment.client.spec, hooks=Hooks(loss=failing_loss))
    client = replace(experiment.client, spec=spec)
    with pytest.raises(ZeroDivisionError, match="divides by nothing") as raised:
        run_round(experiment.server, experiment.start, debug(client, experiment.shards).execute)
    assert raised.traceback[-1].name == "failing_loss"

    replies = []

    def execute(tasks):
        for reply in sequential(client, experiment.shards).execute(tasks):
            replies.append(reply)
            yield reply

    _, record = run_round(experiment.server, experiment.start, execute)
    assert record.void and len(replies) == 3
    for reply in replies:
        assert isinstance(reply, Failure) and reply.code == RejectionCode.FAILED
        assert "ZeroDivisionError: this loss divides by nothing (failing_loss" in reply.reason


def test_an_exception_ends_a_whole_run():
    experiment = assemble(config.parse({}, SMALL))
    spec = replace(experiment.client.spec, hooks=Hooks(loss=failing_loss))
    experiment = replace(experiment, client=replace(experiment.client, spec=spec))
    with pytest.raises(ZeroDivisionError):
        trained(experiment, "debug")


def test_clients_are_never_stacked_and_the_result_agrees_to_rounding(monkeypatch):
    experiment = assemble(config.parse({}, SMALL))
    assert experiment.client.stacked
    expected = trained(experiment, "inprocess")

    def never(*_):
        raise AssertionError("clients were stacked")

    monkeypatch.setattr(stacked, "train", never)
    monkeypatch.setattr(stacked, "score", never)
    result = trained(experiment, "debug")
    for name, w in expected.state.W.items():
        torch.testing.assert_close(result.state.W[name], w, rtol=1e-4, atol=1e-6)
    for key in ("accuracy_global", "accuracy_personal", "mb_up", "mb_down", "rejected"):
        assert result.result[key] == pytest.approx(expected.result[key], abs=0.02), key


def test_where_nothing_is_stacked_it_gives_the_same_bits():
    experiment = assemble(config.parse({}, [*SMALL, "prune.local_pruner=uniform"]))
    assert not experiment.client.stacked
    expected = trained(experiment, "inprocess")
    assert same(trained(experiment, "debug").state.W, expected.state.W)


def test_the_debug_engine_is_one_of_the_engines_by_name():
    assert set(ENGINES) == {"inprocess", "flower", "debug"}


def backwards(outputs, labels):
    return -outputs


def test_transformed_outputs_are_scored_alike_by_every_engine():
    """A network so small that its clients would be stacked must not skip the method's transform."""
    experiment = assemble(config.parse({}, SMALL))
    assert experiment.client.stacked
    spec = replace(experiment.client.spec, hooks=Hooks(transform_outputs=backwards))
    experiment = replace(experiment, client=replace(experiment.client, spec=spec))
    first, second = (trained(experiment, name).result for name in ("inprocess", "debug"))
    assert first["accuracy_personal"] == pytest.approx(second["accuracy_personal"])
