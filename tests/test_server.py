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
from fedp3.aggregate import RULES, Aggregation
from fedp3.engines.inprocess import States
from fedp3.errors import RunError
from fedp3.local_prune import LOCAL_PRUNERS
from fedp3.optimise import Server
from fedp3.plan import LAYER_SETS, PlanRules
from fedp3.prune import SELECTORS
from fedp3.rng import Use, stream
from fedp3.server import Problem, ServerState, finish, plans_for, run, run_round, sample
from fedp3.types import ClientUpdate, Execute, Failure, Reply, Task
from worlds import KINDS, World, same, world

every_rule = pytest.mark.parametrize("rule", RULES)
FULL = PlanRules("full")


def last(problem: Problem, state: ServerState, execute: Execute) -> ServerState:
    """The state after all rounds."""
    return [after for after, _ in run(problem, state, execute)][-1]


# --------------------------------------------------------------------------- the twin, and every table


@settings(max_examples=60)
@given(
    kind=st.sampled_from(("mlp", "batchnorm", "groupnorm")),
    selector=st.sampled_from(list(SELECTORS)),
    Q=st.sampled_from([q for q in LOCAL_PRUNERS if q != "ordered_matched"]),
    rules=st.builds(
        PlanRules,
        layers=st.sampled_from([name for name in LAYER_SETS if not name.startswith("resnet")]),
        redraw=st.booleans(),
        others=st.sampled_from(("train", "freeze")),
        upload=st.sampled_from(("none", "all", "kept", "zeros")),
    ),
    stale=st.sampled_from(("abstain", "vote")),
    rule=st.sampled_from([r for r in RULES if r != "attention"]),
    keep=st.integers(2, 10).map(lambda k: k / 10),
    participants=st.integers(1, 3),
    seed=st.integers(0, 50),
)
def test_rounds_are_those_of_the_twin(kind, selector, Q, rules, stale, rule, keep, participants, seed):
    here = world(kind, 3, steps=2, Q=Q, selector=selector, stale=stale, seed=seed)
    problem = here.problem(rules, keep, aggregation=Aggregation(rule), clients_per_round=participants, rounds=2)
    W = here.W
    for state, record in run(problem, here.state, here.engine().execute):
        plans = [plans_for(problem, record.t)[i] for i in record.sampled]
        W = ref.federated_round(here.fleet, W, plans, record.t, rule)
        assert not record.rejected and len(record.sampled) == participants
        for n in W:
            torch.testing.assert_close(state.W[n], W[n], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("selector", "Q"), [("magnitude", "uniform"), ("neuron", "ordered_dropout"), ("rolling", "fixed")]
)
def test_rounds_of_the_papers_cnn_are_those_of_the_twin(selector, Q):
    here = world("cnn", 2, steps=2, selector=selector, Q=Q)
    problem = here.problem(PlanRules("opu2", upload="kept"), aggregation=Aggregation("weighted"), rounds=2)
    W = here.W
    for state, record in run(problem, here.state, here.engine().execute):
        W = ref.federated_round(here.fleet, W, plans_for(problem, record.t), record.t, "weighted")
        for n in W:
            torch.testing.assert_close(state.W[n], W[n], rtol=1e-6, atol=1e-7)


@every_rule
@pytest.mark.parametrize("sets", [s for s in LAYER_SETS if not s.startswith("resnet")])
def test_under_every_layer_set_and_rule_what_nobody_trained_keeps_its_bits(sets, rule):
    here = world("mlp", 3)
    problem = here.problem(PlanRules(sets), aggregation=Aggregation(rule), clients_per_round=2)
    state, record = run_round(problem, here.state, here.engine().execute)
    trained = {l for i in record.accepted for l in plans_for(problem, 0)[i].whole}
    assert record.accepted == record.sampled and not record.rejected and not record.void
    for l, names in here.layers.layers.items():
        for n in names:
            assert torch.equal(state.W[n], here.W[n]) == (l not in trained)


@pytest.mark.parametrize("sets", [s for s in LAYER_SETS if s.startswith("resnet")])
def test_the_plans_of_resnet_train_everything_between_them(sets):
    here = world("resnet", 2, steps=1)
    state, record = run_round(here.problem(PlanRules(sets), 0.9), here.state, here.engine().execute)
    assert not record.rejected
    # a bias before the classes and every weight moved; statistics too
    assert all(not torch.equal(state.W[n], here.W[n]) for n in here.layers.shapes)


# --------------------------------------------------------------------------- limit cases


def batches_of(here: World, i: int, t: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    mine = here.shards[i].train
    rows = ref.batches(len(mine), here.local, stream(here.seed, Use.BATCHES, t, i))
    return [(here.data.x[mine[r]], here.data.y[mine[r]]) for r in rows]


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("participants", [0, 2])
def test_all_layers_whole_and_weights_by_examples_are_fedavg_bit_for_bit(kind, participants):
    here = world(kind, sizes=(7, 10, 18))
    problem = here.problem(FULL, 1.0, aggregation=Aggregation("examples"), clients_per_round=participants)
    W = here.W
    for state, record in run(problem, here.state, here.engine().execute):
        assert len(record.accepted) == (participants or 3)
        data = {i: batches_of(here, i, record.t) for i in record.accepted}
        W = ref.fedavg(here.net, W, data, {i: len(here.shards[i].train) for i in data}, here.local.lr)
        assert same(state.W, W)


@every_rule
def test_one_client_alone_is_local_sgd(rule):
    here = world("mlp", 1)
    W = here.W
    for state, record in run(here.problem(FULL, aggregation=Aggregation(rule)), here.state, here.engine().execute):
        W = ref.fedavg(here.net, W, {0: batches_of(here, 0, record.t)}, {0: 1}, here.local.lr)
        assert same(state.W, W)


@every_rule
@pytest.mark.parametrize("selector", SELECTORS)
def test_without_local_steps_the_model_does_not_move(rule, selector):
    here = world("cnn", 3, steps=0, selector=selector)
    for upload in ("none", "kept"):
        problem = here.problem(PlanRules("lowerb", upload=upload), aggregation=Aggregation(rule), rounds=2)
        assert same(last(problem, here.state, here.engine().execute).W, here.W)


def test_zeros_pull_the_mean_down_and_kept_coordinates_do_not():
    """All weights one, nobody trains: a coordinate's mean is the share of clients that held it, or one."""
    here = world("mlp", 4, steps=0, selector="random")
    here = here.but(W={n: torch.ones_like(w) for n, w in here.W.items()})
    plans = here.plans("prune-all", 0.5)
    share = (
        sum(ref.pruned_masks(here.W, KINDS["mlp"].chain, p, "random", 0, 0)["fc2.weight"].float() for p in plans) / 4
    )
    for upload, want in (("zeros", share), ("kept", torch.ones(6, 6))):
        problem = here.problem(PlanRules("prune-all", upload=upload))
        state, _ = run_round(problem, here.state, here.engine().execute)
        assert torch.equal(state.W["fc2.weight"], want)
    assert len(set(share.flatten().tolist())) > 2


def test_votes_of_unfed_columns_hold_the_others_back():
    """A column that one of two clients could not train: abstaining leaves it to the other, voting halves its step."""
    here = world("mlp", 2, selector="ordered", steps=1)
    plans = [replace(p) for p in here.plans("lowerb", 0.5)]
    moved = {}
    for stale in ("abstain", "vote"):
        problem = here.but(stale=stale).problem(PlanRules("lowerb"))
        problem = replace(problem, keep=(0.5, 1.0))
        state, _ = run_round(problem, here.state, here.but(stale=stale).engine().execute)
        moved[stale] = (state.W["ffc.weight"] - here.W["ffc.weight"])[:, 3:]
    assert "fc3" in {l for l, p in plans[0].layers.items() if p.send == "pruned"}
    assert bool(moved["abstain"].any())
    torch.testing.assert_close(moved["vote"], moved["abstain"] / 2, rtol=1e-4, atol=1e-8)


def test_a_personal_head_never_moves_on_the_server_and_differs_between_clients():
    here = world("mlp", 3)
    engine = here.engine()
    state = last(here.problem(PlanRules("opu2", head="personal")), here.state, engine.execute)
    for n in here.layers.layers["ffc"]:
        assert state.W[n] is here.W[n]
        own = [engine.states.of[i][2].tensors[n] for i in range(3)]
        assert not torch.equal(own[0], own[1]) and not torch.equal(own[1], own[2])


def test_a_personal_uploaded_head_is_averaged_on_the_server_and_not_taken_from_it():
    here = world("mlp", 3)
    engine = here.engine()
    problem = here.problem(PlanRules("opu2", head="personal_uploaded"), rounds=1)
    state = last(problem, here.state, engine.execute)
    own = torch.stack([engine.states.of[i][0].tensors["ffc.weight"] for i in range(3)])
    torch.testing.assert_close(state.W["ffc.weight"], own.mean(0), rtol=1e-6, atol=1e-8)
    idle = here.but(steps=0).engine(engine.states)
    last(replace(problem, rounds=2), state, idle.execute)
    assert torch.equal(idle.states.of[1][1].tensors["ffc.weight"], own[1])


def test_statistics_of_batchnorm_are_averaged_and_its_counter_is_not_there():
    here = world("batchnorm", 3)
    heard: list[Reply] = []
    state, _ = run_round(here.problem(FULL), here.state, listening(here.engine().execute, heard))
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
    """Every second client says that it could not."""
    return reply if reply.client % 2 else Failure(reply.client, task.t, "out of memory")


# --------------------------------------------------------------------------- same bits


@every_rule
@pytest.mark.parametrize("kind", ["mlp", "dropout", "batchnorm"])
def test_a_repeat_another_order_of_replies_and_of_work_give_the_same_bits(rule, kind):
    here = world(kind, 4, Q="uniform")
    problem = here.problem(PlanRules("lowerb"), aggregation=Aggregation(rule))

    def backwards(tasks: Sequence[Task]) -> Iterable[Reply]:
        return here.engine().execute(tasks[::-1])

    def shuffled(tasks: Sequence[Task]) -> Iterable[Reply]:
        replies = list(here.engine().execute(tasks))
        return [replies[j] for j in np.random.default_rng(len(tasks)).permutation(len(replies))]

    one, *others = (
        last(problem, here.state, e) for e in (here.engine().execute, here.engine().execute, backwards, shuffled)
    )
    assert not same(one.W, here.W)
    for other in others:
        assert same(one.W, other.W) and one.memory.logits == other.memory.logits


SCRIPT = """
import hashlib, worlds
from fedp3.aggregate import Aggregation
from fedp3.server import run
here = worlds.world("mlp", 3, selector="random", Q="uniform")
problem = here.problem(aggregation=Aggregation("attention"), clients_per_round=2)
*_, (end, _) = run(problem, here.state, here.engine().execute)
print(hashlib.sha256(b"".join(n.encode() + w.numpy().tobytes() for n, w in end.W.items())).hexdigest())
"""


def test_the_seed_of_pythons_hashes_leaves_no_bit():
    printed = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=env,
            cwd=Path(__file__).parent,
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
    problem = here.problem(
        PlanRules("opu2", redraw=True, head=head), aggregation=Aggregation(rule), clients_per_round=3, rounds=5
    )
    whole_engine = here.engine()
    whole = last(problem, here.state, whole_engine.execute)
    engine = here.engine()
    half = last(replace(problem, rounds=2), here.state, engine.execute)
    saved, states = copy.deepcopy(half), States(copy.deepcopy(engine.states.of))
    resumed_engine = here.engine(states)
    resumed = last(problem, saved, resumed_engine.execute)
    assert same(whole.W, resumed.W) and whole.seen == resumed.seen and whole.t == resumed.t == 5
    assert whole.memory.logits == resumed.memory.logits
    for i, mine in whole_engine.states.of.items():
        for t, state in mine.items():
            assert same(state.tensors, states.of[i][t].tensors)


@every_rule
@pytest.mark.parametrize("bad", [poisoned, failed])
def test_a_rejected_client_leaves_a_round_as_if_it_had_not_been_there(rule, bad):
    """Over several rounds, so that neither a logit nor a client's own head can carry a trace."""
    here = world("mlp", 4)
    problem = here.problem(PlanRules("opu2", head="personal"), aggregation=Aggregation(rule))
    ends = []
    for change in (bad, absent):
        engine = here.engine()
        records = list(run(problem, here.state, changed(engine.execute, change)))
        ends.append(records[-1][0])
        for _, record in records:
            assert record.accepted == (1, 3)
            assert set(record.rejected) == ({0, 2} if change is bad else set())
    assert same(ends[0].W, ends[1].W) and ends[0].seen == ends[1].seen
    assert ends[0].memory.logits == ends[1].memory.logits


def test_a_client_rejected_once_begins_again_from_its_last_accepted_head():
    here = world("mlp", 2)
    problem = here.problem(PlanRules("opu2", head="personal"))
    engine = here.engine()
    state, _ = run_round(problem, here.state, engine.execute)
    head = engine.states.of[0][0].tensors["ffc.weight"].clone()
    state, record = run_round(problem, state, changed(engine.execute, poisoned))
    assert record.accepted == (1,) and state.seen == {0: 0, 1: 1}
    run_round(problem, state, here.but(steps=0).engine(engine.states).execute)
    assert torch.equal(engine.states.of[0][2].tensors["ffc.weight"], head)


@every_rule
def test_a_round_changes_neither_the_model_it_began_from_nor_any_global_generator(rule):
    here = world("dropout", 3, Q="uniform", selector="random")
    problem = here.problem(PlanRules("lowerb"), aggregation=Aggregation(rule), eval_every=1)
    before = {n: w.clone() for n, w in here.W.items()}
    state = here.state
    draws = torch.random.get_rng_state(), repr(np.random.get_state())  # noqa: NPY002
    new, _ = run_round(problem, state, here.engine().execute)
    run_round(problem, new, here.engine().execute)
    assert same(here.W, before) and state == ServerState(0, here.W)
    assert torch.equal(draws[0], torch.random.get_rng_state())
    assert draws[1] == repr(np.random.get_state())  # noqa: NPY002


# --------------------------------------------------------------------------- quorum, void rounds, sampling


@every_rule
def test_a_void_round_leaves_model_memory_and_heads_as_they_were(rule):
    here = world("mlp", 4)
    problem = here.problem(
        PlanRules("opu2", head="personal"), aggregation=Aggregation(rule), quorum=3, rounds=3, eval_every=0
    )
    engine = here.engine()
    steps = list(
        run(problem, here.state, changed(engine.execute, lambda task, r: poisoned(task, r) if task.t == 1 else r))
    )
    (first, _), (second, record), (third, after) = steps
    assert record.void and record.accepted == (1, 3) and set(record.rejected) == {0, 2}
    assert all(second.W[n] is first.W[n] for n in first.W)
    assert second.memory == first.memory and second.seen == first.seen
    assert (second.t, second.void, third.void, after.void) == (2, 1, 0, False)
    assert not same(third.W, second.W)


def test_a_quorum_just_met_is_met():
    here = world("mlp", 4)
    state, record = run_round(here.problem(quorum=2), here.state, changed(here.engine().execute, absent))
    assert not record.void and record.accepted == (1, 3) and not same(state.W, here.W)


def test_void_rounds_in_a_row_end_the_run_with_their_reasons():
    here = world("mlp", 4)
    problem = here.problem(quorum=3, max_void=2, rounds=9)
    with pytest.raises(RunError, match=r"2 rounds in a row had fewer than 3 usable updates.*client 0: .*NaN.*client 2"):
        list(run(problem, here.state, changed(here.engine().execute, poisoned)))
    late = changed(here.engine().execute, lambda task, r: Failure(r.client, task.t, "slow", late=True))
    with pytest.raises(RunError, match="4 late"):
        list(run(problem, here.state, late))
    with pytest.raises(RunError, match="nobody answered"):
        list(run(problem, here.state, lambda tasks: ()))


def test_a_round_that_worked_starts_the_count_of_void_rounds_again():
    here = world("mlp", 4)
    problem = here.problem(quorum=3, max_void=2, rounds=6)
    bad = {0, 2, 4}
    engine = changed(here.engine().execute, lambda task, r: poisoned(task, r) if task.t in bad else r)
    assert [r.void for _, r in run(problem, here.state, engine)] == [True, False] * 3


def test_no_void_round_ends_no_run_however_few_are_allowed():
    here = world("mlp", 2)
    assert last(here.problem(max_void=0), here.state, here.engine().execute).t == 3


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 15), st.integers(0, 5), st.integers(0, 99))
def test_a_sample_holds_distinct_clients_that_have_something_to_train_on(sizes, m, t, seed):
    here = world("mlp", len(sizes))
    problem = here.problem(examples=dict(enumerate(sizes)), clients_per_round=m, seed=seed)
    able = [i for i, size in enumerate(sizes) if size]
    chosen = sample(problem, t)
    assert chosen == sorted(set(chosen)) == sample(problem, t)
    assert set(chosen) <= set(able) and len(chosen) == min(m or len(able), len(able))


def test_every_able_client_is_sampled_equally_often():
    here = world("mlp", 6)
    problem = here.problem(examples={0: 5, 1: 5, 2: 0, 3: 5, 4: 5}, clients_per_round=2)
    drawn = [i for t in range(1000) for i in sample(problem, t)]
    counts = [drawn.count(i) for i in range(6)]
    assert counts[2] == counts[5] == 0
    assert all(counts[i] == pytest.approx(500, abs=70) for i in (0, 1, 3, 4))


def test_a_fleet_without_data_has_void_rounds():
    here = world("mlp", 2)
    state, record = run_round(here.problem(examples={}), here.state, here.engine().execute)
    assert record.void and record.sampled == () and same(state.W, here.W)


# --------------------------------------------------------------------------- the record


def test_the_record_says_what_happened():
    here = world("mlp", 4, Q="uniform", q=0.5)
    problem = here.problem(PlanRules("prune-all"), eval_every=2, rounds=3)
    heard: list[Reply] = []
    engine = listening(changed(here.engine().execute, failed), heard)
    records = [r for _, r in run(problem, here.state, engine)]
    first = [r for r in heard if isinstance(r, ClientUpdate) and r.t == 0 and r.tensors]
    assert records[0].loss == pytest.approx(np.mean([r.metrics["loss"] for r in first]))
    assert records[0].density == pytest.approx(np.mean([r.metrics["density"] for r in first]))
    assert records[0].rejected == {0: "out of memory", 2: "out of memory"}
    assert [r.G is not None for r in records] == [r.P is not None for r in records] == [False, True, True]
    assert set(records[1].G.clients) == set(records[1].D.clients) == {0, 1, 2, 3}
    assert set(records[1].P.clients) == {1, 3}
    assert records[0].bytes_down > records[0].bytes_up > 0


def test_a_round_without_local_steps_records_no_loss():
    here = world("mlp", 2, steps=0)
    _, record = run_round(here.problem(), here.state, here.engine().execute)
    assert record.loss is None and record.density is None


def test_finishing_scores_all_clients_and_probes_those_that_have_something_to_train_on():
    here = world("mlp", 3)
    problem = here.problem(examples={0: 10, 2: 12})
    final = finish(problem, here.state, here.engine().execute)
    assert set(final.G.clients) == set(final.D.clients) == {0, 1, 2} and set(final.P.clients) == {0, 2}


def test_what_the_last_round_measured_is_not_measured_again_and_is_the_same():
    here = world("mlp", 3)
    problem = here.problem(rounds=1)
    state, record = run_round(problem, here.state, here.engine().execute)
    kinds = []

    def watched(tasks):
        kinds.extend(task.kind for task in tasks)
        return here.engine().execute(tasks)

    again = finish(problem, state, here.engine().execute)
    assert finish(problem, state, watched, None, record) == again
    assert set(kinds) == {"probe"}
    older = replace(record, t=record.t - 1)  # of another model
    assert finish(problem, state, watched, None, older) == again and set(kinds) == {"probe", "evaluate"}


@pytest.mark.parametrize("rule", ["simple", "weighted", "attention"])
def test_finite_updates_that_add_up_to_infinity_leave_the_model_as_it_was(rule):
    here = world(clients=2)
    how = Aggregation(rule, server=Server("momentum", beta1=0.9))
    problem = here.problem(FULL, 1.0, aggregation=how, clients_per_round=2, rounds=4)
    engine = here.engine()

    def huge(tasks: Sequence[Task]) -> Iterable[Reply]:
        for reply in engine.execute(tasks):
            assert isinstance(reply, ClientUpdate)
            size = 3.3e38 if reply.t % 2 else -3.3e38
            yield replace(reply, tensors={n: torch.full_like(w, size) for n, w in reply.tensors.items()})

    rounds = list(run(problem, here.state, huge))
    assert all(bool(w.isfinite().all()) for state, _ in rounds for w in state.W.values())
    assert any(record.void for _, record in rounds)
