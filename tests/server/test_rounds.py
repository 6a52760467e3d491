"""Algorithm 1: limit cases, same bits, and what a round does when clients fail."""

import copy
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference as ref
from fedp3.core.errors import RunError
from fedp3.core.randomness import Stream, stream
from fedp3.core.trees import flatten
from fedp3.core.types import ClientUpdate, Execute, Failure, Rejection, RejectionCode, Reply, Task
from fedp3.engines.base import States
from fedp3.planning.client_plans import PlanSettings
from fedp3.planning.layer_sets import LAYER_SETS
from fedp3.planning.participation import eligible_clients, sample_clients
from fedp3.planning.prune_settings import LOCAL_PRUNERS, SELECTORS
from fedp3.planning.pruning import deal_units
from fedp3.server.aggregators import AGGREGATORS, AggregateSettings
from fedp3.server.context import ServerContext, ServerState
from fedp3.server.round_plans import plans_for
from fedp3.server.rounds import run, run_round
from fedp3.server.scoring import finish
from worlds import KINDS, World, same, world

every_rule = pytest.mark.parametrize("rule", AGGREGATORS)
FULL = PlanSettings(layers="full")


def last(server: ServerContext, state: ServerState, execute: Execute) -> ServerState:
    """The state after all rounds."""
    return [after for after, _ in run(server, state, execute)][-1]


def with_rounds(server: ServerContext, rounds: int) -> ServerContext:
    run_settings = replace(server.run, rounds=rounds)
    return replace(server, run=run_settings, spec=replace(server.spec, rounds=rounds))


def same_state(a: object, b: object) -> bool:
    """Whether two states of an aggregator are equal, tensors to the bit."""
    plain_a, tensors_a = flatten(a, "")
    plain_b, tensors_b = flatten(b, "")
    return plain_a == plain_b and same(tensors_a, tensors_b)


# ---------------------------------------------------- the reference implementation, and every table


@settings(max_examples=60)
@given(
    kind=st.sampled_from(("mlp", "batchnorm", "groupnorm")),
    selector=st.sampled_from(list(SELECTORS)),
    local_pruner=st.sampled_from([q for q in LOCAL_PRUNERS if q != "ordered_matched"]),
    plan=st.builds(
        PlanSettings,
        layers=st.sampled_from([name for name in LAYER_SETS if not name.startswith("resnet")]),
        redraw=st.booleans(),
        others=st.sampled_from(("train", "freeze")),
        upload=st.sampled_from(("none", "retained", "zeros")),
    ),
    unfed=st.sampled_from(("abstain", "vote")),
    rule=st.sampled_from([r for r in AGGREGATORS if r != "attention"]),
    keep=st.integers(2, 10).map(lambda k: k / 10),
    participants=st.integers(1, 3),
    seed=st.integers(0, 50),
)
def test_rounds_are_those_of_the_reference(
    kind, selector, local_pruner, plan, unfed, rule, keep, participants, seed
):
    here = world(
        kind,
        3,
        steps=2,
        local_pruner=local_pruner,
        selector=selector,
        unfed_columns=unfed,
        seed=seed,
    )
    server = here.server(
        plan,
        keep,
        aggregate=AggregateSettings(rule=rule),
        clients_per_round=participants,
        rounds=2,
    )
    W = here.W
    for state, record in run(server, here.state(server), here.engine().execute):
        sampled = [plans_for(server, record.t)[i] for i in record.sampled]
        plans = deal_units(sampled, selector, participants)  # units are dealt to participants only
        W = ref.federated_round(here.fleet, W, plans, record.t, rule)
        assert not record.rejected and len(record.sampled) == participants
        for n in W:
            torch.testing.assert_close(state.W[n], W[n], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("selector", "local_pruner"),
    [("magnitude", "uniform"), ("neuron", "ordered_dropout"), ("rolling", "fixed")],
)
def test_rounds_of_the_papers_cnn_are_those_of_the_reference(selector, local_pruner):
    here = world("cnn", 2, steps=2, selector=selector, local_pruner=local_pruner)
    server = here.server(
        PlanSettings(layers="opu2", upload="retained"),
        aggregate=AggregateSettings(rule="weighted"),
        rounds=2,
    )
    W = here.W
    for state, record in run(server, here.state(server), here.engine().execute):
        W = ref.federated_round(here.fleet, W, plans_for(server, record.t), record.t, "weighted")
        for n in W:
            torch.testing.assert_close(state.W[n], W[n], rtol=1e-6, atol=1e-7)


@every_rule
@pytest.mark.parametrize("sets", [s for s in LAYER_SETS if not s.startswith("resnet")])
def test_under_every_layer_set_and_rule_what_nobody_trained_keeps_its_bits(sets, rule):
    here = world("mlp", 3)
    server = here.server(
        PlanSettings(layers=sets), aggregate=AggregateSettings(rule=rule), clients_per_round=2
    )
    state, record = run_round(server, here.state(server), here.engine().execute)
    trained = {l for i in record.accepted for l in plans_for(server, 0)[i].full_layers}
    assert record.accepted == record.sampled and not record.rejected and not record.void
    for l, names in here.layers.layers.items():
        for n in names:
            assert torch.equal(state.W[n], here.W[n]) == (l not in trained)


@pytest.mark.parametrize("sets", [s for s in LAYER_SETS if s.startswith("resnet")])
def test_the_plans_of_resnet_train_everything_between_them(sets):
    here = world("resnet", 2, steps=1)
    server = here.server(PlanSettings(layers=sets), 0.9)
    state, record = run_round(server, here.state(server), here.engine().execute)
    assert not record.rejected
    # a bias before the classes and every weight moved; statistics too
    assert all(not torch.equal(state.W[n], here.W[n]) for n in here.layers.shapes)


# --------------------------------------------------------------------------- limit cases


def batches_of(here: World, i: int, t: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    train = here.shards[i].train
    rows = ref.batches(len(train), here.local, stream(here.seed, Stream.BATCHES, t, i))
    return [(here.data.x[train[r]], here.data.y[train[r]]) for r in rows]


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("participants", [0, 2])
def test_all_layers_whole_and_weights_by_examples_are_fedavg_bit_for_bit(kind, participants):
    here = world(kind, sizes=(7, 10, 18))
    server = here.server(
        FULL, 1.0, aggregate=AggregateSettings(rule="examples"), clients_per_round=participants
    )
    W = here.W
    for state, record in run(server, here.state(server), here.engine().execute):
        assert len(record.accepted) == (participants or 3)
        data = {i: batches_of(here, i, record.t) for i in record.accepted}
        W = ref.fedavg(
            here.net, W, data, {i: len(here.shards[i].train) for i in data}, here.local.lr
        )
        assert same(state.W, W)


@every_rule
def test_one_client_alone_is_local_sgd(rule):
    here = world("mlp", 1)
    W = here.W
    server = here.server(FULL, aggregate=AggregateSettings(rule=rule))
    for state, record in run(server, here.state(server), here.engine().execute):
        W = ref.fedavg(here.net, W, {0: batches_of(here, 0, record.t)}, {0: 1}, here.local.lr)
        assert same(state.W, W)


@every_rule
@pytest.mark.parametrize("selector", SELECTORS)
def test_without_local_steps_the_model_does_not_move(rule, selector):
    here = world("cnn", 3, steps=0, selector=selector)
    for upload in ("none", "retained"):
        server = here.server(
            PlanSettings(layers="lowerb", upload=upload),
            aggregate=AggregateSettings(rule=rule),
            rounds=2,
        )
        assert same(last(server, here.state(server), here.engine().execute).W, here.W)


def test_zeros_pull_the_mean_down_and_retained_coordinates_do_not():
    """All weights are one and nobody trains.

    With zeros, a coordinate's mean is the share of clients that retained it; otherwise it is one.
    """
    here = world("mlp", 4, steps=0, selector="random")
    here = here.but(W={n: torch.ones_like(w) for n, w in here.W.items()})
    plans = here.plans("prune-all", 0.5)
    share = (
        sum(
            ref.pruned_masks(here.W, KINDS["mlp"].chain, p, "random", 0, 0)["fc2.weight"].float()
            for p in plans
        )
        / 4
    )
    for upload, want in (("zeros", share), ("retained", torch.ones(6, 6))):
        server = here.server(PlanSettings(layers="prune-all", upload=upload))
        state, _ = run_round(server, here.state(server), here.engine().execute)
        assert torch.equal(state.W["fc2.weight"], want)
    assert len(set(share.flatten().tolist())) > 2


def test_votes_of_unfed_columns_hold_the_others_back():
    """One of two clients could not train a column.

    Abstaining leaves the column to the other client, voting halves its step.
    """
    here = world("mlp", 2, selector="ordered", steps=1)
    plans = [replace(p) for p in here.plans("lowerb", 0.5)]
    moved = {}
    for unfed in ("abstain", "vote"):
        server = here.but(unfed_columns=unfed).server(PlanSettings(layers="lowerb"))
        server = replace(server, keep=(0.5, 1.0))
        state, _ = run_round(
            server, here.state(server), here.but(unfed_columns=unfed).engine().execute
        )
        moved[unfed] = (state.W["ffc.weight"] - here.W["ffc.weight"])[:, 3:]
    assert "fc3" in {l for l, p in plans[0].layers.items() if p.send == "pruned"}
    assert bool(moved["abstain"].any())
    torch.testing.assert_close(moved["vote"], moved["abstain"] / 2, rtol=1e-4, atol=1e-8)


def test_a_personal_head_never_moves_on_the_server_and_differs_between_clients():
    here = world("mlp", 3)
    engine = here.engine()
    server = here.server(PlanSettings(layers="opu2", head="personal"))
    state = last(server, here.state(server), engine.execute)
    for n in here.layers.layers["ffc"]:
        assert state.W[n] is here.W[n]
        own = [engine.states.by_client[i][2].tensors[n] for i in range(3)]
        assert not torch.equal(own[0], own[1]) and not torch.equal(own[1], own[2])


def test_a_personal_uploaded_head_is_averaged_on_the_server_and_not_taken_from_it():
    here = world("mlp", 3)
    engine = here.engine()
    server = here.server(PlanSettings(layers="opu2", head="personal_uploaded"), rounds=1)
    state = last(server, here.state(server), engine.execute)
    own = torch.stack([engine.states.by_client[i][0].tensors["ffc.weight"] for i in range(3)])
    torch.testing.assert_close(state.W["ffc.weight"], own.mean(0), rtol=1e-6, atol=1e-8)
    idle = here.but(steps=0).engine(engine.states)
    last(with_rounds(server, 2), state, idle.execute)
    assert torch.equal(idle.states.by_client[1][1].tensors["ffc.weight"], own[1])


def test_statistics_of_batchnorm_are_averaged_and_its_counter_is_not_there():
    here = world("batchnorm", 3)
    heard: list[Reply] = []
    server = here.server(FULL)
    state, _ = run_round(server, here.state(server), listening(here.engine().execute, heard))
    for n in ("norm.running_mean", "norm.running_var"):
        sent = torch.stack([r.tensors[n] for r in heard])
        assert not torch.equal(sent[0], sent[1])
        torch.testing.assert_close(state.W[n], sent.mean(0), rtol=1e-6, atol=1e-8)
    assert not any("num_batches_tracked" in n for n in state.W)


# --------------------------------------------------------------------------- engines that misbehave


def listening(execute: Execute, heard: list[Reply]) -> Execute:
    def answer(tasks: Sequence[Task]) -> Iterable[Reply]:
        for reply in execute(tasks):
            heard.append(reply)
            yield reply

    return answer


def changed(execute: Execute, change: Callable[[Task, Reply], Reply | None]) -> Execute:
    """An engine whose training replies are replaced, or dropped where the change is None."""

    def answer(tasks: Sequence[Task]) -> Iterable[Reply]:
        for task, reply in zip(tasks, execute(tasks), strict=True):
            new = change(task, reply) if task.kind == "train" else reply
            if new is not None:
                yield new

    return answer


def poisoned(task: Task, reply: Reply) -> Reply:
    """Every second client sends a NaN."""
    if reply.client % 2 or not isinstance(reply, ClientUpdate):
        return reply
    n = next(iter(reply.tensors))
    return replace(reply, tensors={**reply.tensors, n: torch.full_like(reply.tensors[n], math.nan)})


def absent(task: Task, reply: Reply) -> Reply | None:
    """Every second client does not answer."""
    return reply if reply.client % 2 else None


def failed(task: Task, reply: Reply) -> Reply:
    """Every second client reports a failure."""
    return (
        reply
        if reply.client % 2
        else Failure(client=reply.client, t=task.t, reason="out of memory")
    )


# --------------------------------------------------------------------------- same bits


@every_rule
@pytest.mark.parametrize("kind", ["mlp", "dropout", "batchnorm"])
def test_a_repeat_another_order_of_replies_and_of_work_give_the_same_bits(rule, kind):
    here = world(kind, 4, local_pruner="uniform")
    server = here.server(PlanSettings(layers="lowerb"), aggregate=AggregateSettings(rule=rule))

    def backwards(tasks: Sequence[Task]) -> Iterable[Reply]:
        return here.engine().execute(tasks[::-1])

    def shuffled(tasks: Sequence[Task]) -> Iterable[Reply]:
        replies = list(here.engine().execute(tasks))
        return [replies[j] for j in np.random.default_rng(len(tasks)).permutation(len(replies))]

    one, *others = (
        last(server, here.state(server), e)
        for e in (here.engine().execute, here.engine().execute, backwards, shuffled)
    )
    assert not same(one.W, here.W)
    for other in others:
        assert same(one.W, other.W) and same_state(one.aggregator, other.aggregator)


SCRIPT = """
import hashlib, worlds
from fedp3.server.aggregators import AggregateSettings
from fedp3.server.rounds import run
here = worlds.world("mlp", 3, selector="random", local_pruner="uniform")
server = here.server(aggregate=AggregateSettings(rule="attention"), clients_per_round=2)
*_, (end, _) = run(server, here.state(server), here.engine().execute)
bits = b"".join(n.encode() + w.numpy().tobytes() for n, w in end.W.items())
print(hashlib.sha256(bits).hexdigest())
"""


def test_the_seed_of_pythons_hashes_leaves_no_bit():
    printed = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=env,
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=True,
        )
        printed.add(done.stdout.strip())
    assert len(printed) == 1 and len(printed.pop()) == 64


@every_rule
@pytest.mark.parametrize("head", ["shared", "personal"])
def test_a_run_resumed_half_way_ends_at_the_same_bits(rule, head):
    here = world("mlp", 4)
    server = here.server(
        PlanSettings(layers="opu2", redraw=True, head=head),
        aggregate=AggregateSettings(rule=rule),
        clients_per_round=3,
        rounds=5,
    )
    straight_engine = here.engine()
    straight = last(server, here.state(server), straight_engine.execute)
    engine = here.engine()
    half = last(with_rounds(server, 2), here.state(server), engine.execute)
    saved, states = copy.deepcopy(half), States(copy.deepcopy(engine.states.by_client))
    resumed_engine = here.engine(states)
    resumed = last(server, saved, resumed_engine.execute)
    assert (
        same(straight.W, resumed.W)
        and straight.seen == resumed.seen
        and straight.t == resumed.t == 5
    )
    assert same_state(straight.aggregator, resumed.aggregator)
    for i, rounds in straight_engine.states.by_client.items():
        for t, state in rounds.items():
            assert same(state.tensors, states.by_client[i][t].tensors)


@every_rule
@pytest.mark.parametrize("bad", [poisoned, failed])
def test_a_rejected_client_leaves_a_round_as_if_it_had_not_been_there(rule, bad):
    """Over several rounds, so that neither a logit nor a client's own head can carry a trace."""
    here = world("mlp", 4)
    server = here.server(
        PlanSettings(layers="opu2", head="personal"), aggregate=AggregateSettings(rule=rule)
    )
    ends = []
    for change in (bad, absent):
        engine = here.engine()
        records = list(run(server, here.state(server), changed(engine.execute, change)))
        ends.append(records[-1][0])
        for _, record in records:
            assert record.accepted == (1, 3)
            assert set(record.rejected) == ({0, 2} if change is bad else set())
    assert same(ends[0].W, ends[1].W) and ends[0].seen == ends[1].seen
    assert same_state(ends[0].aggregator, ends[1].aggregator)


def test_a_client_rejected_once_begins_again_from_its_last_accepted_head():
    here = world("mlp", 2)
    server = here.server(PlanSettings(layers="opu2", head="personal"))
    engine = here.engine()
    state, _ = run_round(server, here.state(server), engine.execute)
    head = engine.states.by_client[0][0].tensors["ffc.weight"].clone()
    state, record = run_round(server, state, changed(engine.execute, poisoned))
    assert record.accepted == (1,) and state.seen == {0: 0, 1: 1}
    run_round(server, state, here.but(steps=0).engine(engine.states).execute)
    assert torch.equal(engine.states.by_client[0][2].tensors["ffc.weight"], head)


@every_rule
def test_a_round_changes_neither_the_model_it_began_from_nor_any_global_generator(rule):
    here = world("dropout", 3, local_pruner="uniform", selector="random")
    server = here.server(
        PlanSettings(layers="lowerb"), aggregate=AggregateSettings(rule=rule), eval_every=1
    )
    before = {n: w.clone() for n, w in here.W.items()}
    state = here.state(server)
    draws = torch.random.get_rng_state(), repr(np.random.get_state())  # noqa: NPY002
    new, _ = run_round(server, state, here.engine().execute)
    run_round(server, new, here.engine().execute)
    assert same(here.W, before) and state == ServerState(
        t=0, W=here.W, aggregator=server.aggregator.init()
    )
    assert torch.equal(draws[0], torch.random.get_rng_state())
    assert draws[1] == repr(np.random.get_state())  # noqa: NPY002


# -------------------------------------------------------------------- quorum, void rounds, sampling


@every_rule
def test_a_void_round_leaves_model_aggregator_and_heads_as_they_were(rule):
    here = world("mlp", 4)
    server = here.server(
        PlanSettings(layers="opu2", head="personal"),
        aggregate=AggregateSettings(rule=rule),
        quorum=3,
        rounds=3,
        eval_every=0,
    )
    engine = here.engine()
    steps = list(
        run(
            server,
            here.state(server),
            changed(engine.execute, lambda task, r: poisoned(task, r) if task.t == 1 else r),
        )
    )
    (first, _), (second, record), (third, after) = steps
    assert record.void and record.accepted == (1, 3) and set(record.rejected) == {0, 2}
    assert all(second.W[n] is first.W[n] for n in first.W)
    assert second.aggregator is first.aggregator and second.seen == first.seen
    assert (second.t, second.void, third.void, after.void) == (2, 1, 0, False)
    assert not same(third.W, second.W)


def test_a_quorum_just_met_is_met():
    here = world("mlp", 4)
    server = here.server(quorum=2)
    state, record = run_round(server, here.state(server), changed(here.engine().execute, absent))
    assert not record.void and record.accepted == (1, 3) and not same(state.W, here.W)


def test_void_rounds_in_a_row_end_the_run_with_their_reasons():
    here = world("mlp", 4)
    server = here.server(quorum=3, max_void=2, rounds=9)
    with pytest.raises(
        RunError,
        match=r"2 rounds in a row had fewer than 3 usable updates.*client 0: .*NaN.*client 2",
    ):
        list(run(server, here.state(server), changed(here.engine().execute, poisoned)))
    late = changed(
        here.engine().execute,
        lambda task, r: Failure(client=r.client, t=task.t, reason="slow", late=True),
    )
    with pytest.raises(RunError, match="4 late"):
        list(run(server, here.state(server), late))
    with pytest.raises(RunError, match="nobody answered"):
        list(run(server, here.state(server), lambda tasks: ()))


def test_a_round_that_worked_starts_the_count_of_void_rounds_again():
    here = world("mlp", 4)
    server = here.server(quorum=3, max_void=2, rounds=6)
    bad = {0, 2, 4}
    engine = changed(
        here.engine().execute, lambda task, r: poisoned(task, r) if task.t in bad else r
    )
    assert [r.void for _, r in run(server, here.state(server), engine)] == [True, False] * 3


def test_no_void_round_ends_no_run_however_few_are_allowed():
    here = world("mlp", 2)
    server = here.server(max_void=1)
    assert last(server, here.state(server), here.engine().execute).t == 3


def sample(server: ServerContext, t: int) -> list[int]:
    return sample_clients(eligible_clients(server.examples, t), server.run, t)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(0, 15),
    st.integers(0, 5),
    st.integers(0, 99),
)
def test_a_sample_holds_distinct_clients_that_have_something_to_train_on(sizes, m, t, seed):
    here = world("mlp", len(sizes))
    server = here.server(examples=dict(enumerate(sizes)), clients_per_round=m, seed=seed)
    eligible = [i for i, size in enumerate(sizes) if size]
    chosen = sample(server, t)
    assert chosen == sorted(set(chosen)) == sample(server, t)
    assert set(chosen) <= set(eligible) and len(chosen) == min(m or len(eligible), len(eligible))


def test_every_eligible_client_is_sampled_equally_often():
    here = world("mlp", 6)
    server = here.server(examples={0: 5, 1: 5, 2: 0, 3: 5, 4: 5}, clients_per_round=2)
    drawn = [i for t in range(1000) for i in sample(server, t)]
    counts = [drawn.count(i) for i in range(6)]
    assert counts[2] == counts[5] == 0
    assert all(counts[i] == pytest.approx(500, abs=70) for i in (0, 1, 3, 4))


def test_a_fleet_without_data_has_void_rounds():
    here = world("mlp", 2)
    server = here.server(examples={})
    state, record = run_round(server, here.state(server), here.engine().execute)
    assert record.void and record.sampled == () and same(state.W, here.W)


# --------------------------------------------------------------------------- the record


def test_the_record_describes_the_round():
    here = world("mlp", 4, local_pruner="uniform", q=0.5)
    server = here.server(PlanSettings(layers="prune-all"), eval_every=2, rounds=3)
    heard: list[Reply] = []
    engine = listening(changed(here.engine().execute, failed), heard)
    records = [r for _, r in run(server, here.state(server), engine)]
    first = [r for r in heard if isinstance(r, ClientUpdate) and r.t == 0 and r.tensors]
    out_of_memory = Rejection(RejectionCode.FAILED, "out of memory")
    assert records[0].loss == pytest.approx(np.mean([r.metrics["loss"] for r in first]))
    assert records[0].density == pytest.approx(np.mean([r.metrics["density"] for r in first]))
    assert records[0].rejected == dict.fromkeys((0, 2), out_of_memory)
    assert (
        [r.G is not None for r in records]
        == [r.P is not None for r in records]
        == [False, True, True]
    )
    assert set(records[1].G.clients) == set(records[1].D.clients) == {0, 1, 2, 3}
    assert set(records[1].P.clients) == {1, 3}
    assert records[0].bytes_down > records[0].bytes_up > 0


def test_a_round_without_local_steps_records_no_loss():
    here = world("mlp", 2, steps=0)
    server = here.server()
    _, record = run_round(server, here.state(server), here.engine().execute)
    assert record.loss is None and record.density is None


def test_finishing_scores_all_clients_and_probes_those_that_have_something_to_train_on():
    here = world("mlp", 3)
    server = here.server(examples={0: 10, 2: 12})
    final = finish(server, here.state(server), here.engine().execute)
    assert set(final.G.clients) == set(final.D.clients) == {0, 1, 2} and set(final.P.clients) == {
        0,
        2,
    }


def test_what_the_last_round_measured_is_not_measured_again_and_is_the_same():
    here = world("mlp", 3)
    server = here.server(rounds=1)
    state, record = run_round(server, here.state(server), here.engine().execute)
    kinds = []

    def watched(tasks):
        kinds.extend(task.kind for task in tasks)
        return here.engine().execute(tasks)

    again = finish(server, state, here.engine().execute)
    assert finish(server, state, watched, None, record) == again
    assert set(kinds) == {"probe"}
    older = replace(record, t=record.t - 1)  # of another model
    assert finish(server, state, watched, None, older) == again and set(kinds) == {
        "probe",
        "evaluate",
    }


@pytest.mark.parametrize("rule", ["simple", "weighted", "attention"])
def test_finite_updates_that_add_up_to_infinity_leave_the_model_as_it_was(rule):
    here = world(clients=2)
    how = AggregateSettings(rule=rule, server="momentum", beta1=0.9)
    server = here.server(FULL, 1.0, aggregate=how, clients_per_round=2, rounds=4)
    engine = here.engine()

    def huge(tasks: Sequence[Task]) -> Iterable[Reply]:
        for reply in engine.execute(tasks):
            assert isinstance(reply, ClientUpdate)
            size = 3.3e38 if reply.t % 2 else -3.3e38
            yield replace(
                reply, tensors={n: torch.full_like(w, size) for n, w in reply.tensors.items()}
            )

    rounds = list(run(server, here.state(server), huge))
    assert all(bool(w.isfinite().all()) for state, _ in rounds for w in state.W.values())
    assert any(record.void for _, record in rounds)
