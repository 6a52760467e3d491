"""G, D and P: on a case small enough to do by hand, against numpy, and without traces."""

import copy
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedp3.client.objectives import CLASSIFICATION
from fedp3.core.types import ClientState, ClientUpdate, Failure, Reply
from fedp3.data import from_tensors
from fedp3.data.shards import Shard
from fedp3.engines.base import States
from fedp3.models.layer_map import layer_map
from fedp3.planning.client_plans import PlanSettings
from fedp3.planning.dispatch import dispatched_tasks, global_tasks
from fedp3.server import evaluation
from fedp3.server.round_plans import plans_for
from fedp3.server.rounds import run, run_round
from fedp3.server.scoring import finish
from worlds import World, same, world


def scored(i: int, correct: float, tested: float, loss: float = 1.0) -> ClientUpdate:
    return ClientUpdate(
        client=i,
        t=0,
        tensors={},
        examples=1,
        metrics={"correct": correct, "tested": tested, "test_loss": loss},
    )


def accuracy(replies: Iterable[Reply]) -> evaluation.Scores | None:
    return evaluation.scores(replies, CLASSIFICATION)


# --------------------------------------------------------------------------- the summary


@given(
    st.lists(
        st.integers(1, 30).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
        min_size=1,
        max_size=40,
    )
)
def test_the_summary_is_that_of_numpy_with_every_client_counting_once(scores):
    got = accuracy(scored(i, c, n, float(i * n)) for i, (c, n) in enumerate(scores))
    shares = np.array([c / n for c, n in scores])
    assert got.clients == dict(enumerate(shares))
    assert got.mean == pytest.approx(shares.mean()) and got.std == pytest.approx(
        shares.std(), abs=1e-12
    )
    assert got.p10 == pytest.approx(np.percentile(shares, 10)) and got.worst == shares.min()
    assert got.loss == pytest.approx(np.mean(np.arange(len(scores))))


@given(st.permutations(list(range(8))))
def test_the_order_of_replies_leaves_no_bit_in_the_summary(order):
    replies = [scored(i, i, 9, 0.1 * i) for i in range(8)]
    assert accuracy(replies) == accuracy([replies[i] for i in order])


def test_failures_and_clients_without_tests_are_not_counted():
    replies: list[Reply] = [
        scored(0, 1, 2),
        Failure(client=1, t=0, reason="away"),
        scored(2, 0, 0),
        ClientUpdate(client=3, t=0, tensors={}, examples=1),
    ]
    assert accuracy(replies).clients == {0: 0.5}
    assert accuracy(replies[1:]) is None
    assert accuracy([]) is None


def test_a_node_that_adds_noise_returns_no_loss_and_counts_all_the_same():
    noisy = ClientUpdate(client=0, t=0, tensors={}, examples=1, metrics={"correct": 1, "tested": 2})
    both = accuracy([noisy, scored(1, 1, 4)])
    assert both.clients == {0: 0.5, 1: 0.25}
    assert both.loss == accuracy([scored(1, 1, 4)]).loss
    assert math.isnan(accuracy([noisy]).loss)


@pytest.mark.parametrize(
    "metrics",
    [
        {"correct": 3, "tested": 2, "test_loss": 1.0},
        {"correct": -1, "tested": 2, "test_loss": 1.0},
        {"correct": math.nan, "tested": 2, "test_loss": 1.0},
        {"correct": 1, "tested": math.nan, "test_loss": 1.0},
        {"tested": 2, "test_loss": 1.0},
        {"correct": 1, "tested": 2, "test_loss": "low"},
        {"correct": "1", "tested": 2, "test_loss": 1.0},
    ],
)
def test_a_score_that_cannot_be_one_is_left_out(metrics):
    assert accuracy(
        [ClientUpdate(client=0, t=0, tensors={}, examples=1, metrics=metrics), scored(1, 1, 4)]
    ).clients == {1: 0.25}


@pytest.mark.parametrize(
    "losses", [(1.7e308, 1.7e308), (math.inf, -math.inf), (math.nan, 1.0), (3e38, -3e38)]
)
@pytest.mark.parametrize("tested", [4, 1e-300])
def test_losses_that_no_sum_can_hold_spoil_the_mean_loss_alone(losses, tested):
    updates = [
        ClientUpdate(
            client=i,
            t=0,
            tensors={},
            examples=1,
            metrics={"correct": 0, "tested": tested, "test_loss": x},
        )
        for i, x in enumerate(losses)
    ]
    summary = accuracy([*updates, scored(2, 4, 4)])
    assert summary.mean == pytest.approx(1 / 3)
    assert math.isnan(summary.loss) or (losses, tested) == ((3e38, -3e38), 4)


# --------------------------------------------------------------------------- by hand


def by_hand() -> World:
    """Inputs are unit vectors e_0..e_3; the body scales them by 4 to 1; the head is the identity.

    The dense network answers class j on e_j.  Retaining 2 of the body's 16 weights leaves 4 and 3:
    on e_2 and e_3 all logits are then zero, and the answer is class 0.  Client 0 has every class,
    client 1 only e_2 and e_3, and client 2 has its two classes swapped.
    """
    body, head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    net = nn.Sequential(OrderedDict(body=body, relu=nn.ReLU(), head=head))
    W = {"body.weight": torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0])), "head.weight": torch.eye(4)}
    inputs = [[0, 1, 2, 3], [2, 3, 3, 2], [0, 1]]
    labels = [[0, 1, 2, 3], [2, 3, 3, 2], [1, 0]]
    x = torch.eye(4)[[j for js in inputs for j in js]]
    y = torch.tensor([j for js in labels for j in js])
    ends = np.cumsum([0, 4, 4, 2]).tolist()
    rows = [torch.arange(a, b) for a, b in itertools.pairwise(ends)]
    shards = {i: Shard(indices, indices) for i, indices in enumerate(rows)}
    data = from_tensors(x, y, classes=4)
    return world("mlp", 3).but(
        net=net, layers=layer_map(net), W=W, data=data, shards=shards, steps=0
    )


def test_G_and_D_and_P_by_hand():
    here = by_hand()
    server = here.server(PlanSettings(layers="prune-all"), 2 / 16)
    final = finish(server, here.state(server), here.engine().execute)
    assert final.G.clients == {0: 1.0, 1: 1.0, 2: 0.0}
    assert final.D.clients == {0: 0.5, 1: 0.0, 2: 0.0}
    assert final.P.clients == final.D.clients  # no local steps
    assert final.G.mean == pytest.approx(2 / 3) and final.G.std == pytest.approx(math.sqrt(2) / 3)
    assert final.G.worst == 0 and final.G.p10 == pytest.approx(
        0.2
    )  # 0, 1, 1: a fifth of the way to the second
    assert final.D.p10 == pytest.approx(0.0) and final.D.mean == pytest.approx(1 / 6)
    right = math.log(1 + 3 * math.exp(-4))  # logit 4 against three zeros
    losses = [right, math.log(1 + 3 * math.exp(-3)), math.log(4), math.log(4)]
    assert final.D.loss == pytest.approx((sum(losses) / 4 + math.log(4) + _swapped()) / 3, rel=1e-5)


def _swapped() -> float:
    """The loss of client 2: logits 4 and 3 for the wrong class, zero for the right one."""
    return sum(math.log(math.exp(top) + 3) for top in (4, 3)) / 2


def test_P_has_learned_the_clients_labels():
    here = by_hand().but(steps=60, lr=0.5)
    server = here.server(PlanSettings(layers="prune-all"), 2 / 16)
    assert finish(server, here.state(server), here.engine().execute).P.clients[2] == 1.0


def test_G_and_D_use_a_personal_head_where_there_is_one():
    """Client 2's own head swaps its classes back, client 1's sends everything to class 3."""
    here = by_hand()
    swap = torch.eye(4)[[1, 0, 2, 3]]
    third = torch.zeros(4, 4)
    third[3] = 1
    states = States(
        {i: {5: ClientState(5, {"head.weight": head})} for i, head in ((1, third), (2, swap))}
    )
    execute = here.engine(states).execute
    plans = here.plans("prune-all", 2 / 16, head="personal")
    seen = {1: 5, 2: 5}
    G = accuracy(execute(global_tasks(here.W, plans, 6, seen)))
    assert G.clients == {
        0: 1.0,
        1: 0.5,
        2: 1.0,
    }  # client 0 has not trained yet: it has the initial head
    D = accuracy(
        execute(dispatched_tasks(here.W, plans, here.layers, here.pruning, 6, 0, seen, probe=False))
    )
    assert D.clients == {0: 0.5, 1: 0.0, 2: 1.0}


def test_G_uses_the_servers_head_where_heads_are_personal_but_uploaded():
    here = by_hand()
    states = States({0: {0: ClientState(0, {"head.weight": torch.zeros(4, 4)})}})
    plans = here.plans("prune-all", head="personal_uploaded")
    G = accuracy(here.engine(states).execute(global_tasks(here.W, plans, 1, {0: 0})))
    assert G.clients[0] == 1.0


def test_evaluation_tasks_request_scores_and_no_upload():
    here = world()
    plans = here.plans(upload="retained")
    for task in global_tasks(here.W, plans, 3, {}):
        assert (
            task.kind == "evaluate"
            and task.evaluate
            and not task.plan.uploaded
            and task.weights is here.W
        )
    for reply in here.engine().execute(here.tasks(plans, kind="probe", evaluate=True)):
        assert isinstance(reply, ClientUpdate) and not reply.tensors


# --------------------------------------------------------------------------- no traces


@pytest.mark.parametrize("head", ["shared", "personal"])
@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "dropout"])
def test_scoring_and_probing_leave_the_run_as_it_was(kind, head):
    here = world(kind, 3)
    plan = PlanSettings(layers="lowerb", head=head)
    quiet, curious = here.engine(), here.engine()
    server = here.server(plan, rounds=4)
    alone = [s for s, _ in run(server, here.state(server), quiet.execute)]
    server = here.server(plan, rounds=4, eval_every=1)
    for (state, record), other in zip(
        run(server, here.state(server), curious.execute), alone, strict=True
    ):
        before = copy.deepcopy(curious.states.by_client)
        finish(server, state, curious.execute)
        assert curious.states.by_client.keys() == before.keys()
        for i, rounds in before.items():
            assert rounds.keys() == curious.states.by_client[i].keys()
            assert all(
                same(rounds[t].tensors, curious.states.by_client[i][t].tensors) for t in rounds
            )
        assert same(state.W, other.W) and record.G is not None


def test_D_is_the_accuracy_of_what_a_round_sends():
    """Scored by hand on the very tensors of the dispatch."""
    here = world("cnn", 2)
    tasks = here.tasks(here.plans("prune-all", 0.3), kind="evaluate", evaluate=True)
    D = accuracy(here.engine().execute(tasks))
    for task in tasks:
        test = here.shards[task.plan.client].test
        with torch.no_grad():
            logits = torch.func.functional_call(here.net, dict(task.weights), (here.data.x[test],))
        right = (logits.argmax(1) == here.data.y[test]).double().mean()
        assert D.clients[task.plan.client] == pytest.approx(float(right))


@pytest.mark.parametrize(
    ("layers", "head", "passes"),
    [("full", "shared", 1), ("full", "personal_uploaded", 2), ("lowerb", "shared", 2)],
)
def test_D_is_measured_apart_only_where_a_device_holds_another_model(layers, head, passes):
    """FedAvg's devices hold the server's model, so one pass over the test parts gives both."""
    here = world("mlp", 3)
    server = here.server(PlanSettings(layers=layers, head=head), 0.5, rounds=2, eval_every=1)
    engine, kinds = here.engine(), []

    def watched(tasks):
        kinds.append({task.kind for task in tasks})
        return engine.execute(tasks)

    state, record = run_round(server, here.state(server), watched)
    assert kinds.count({"evaluate"}) == passes
    tasks = dispatched_tasks(
        state.W, plans_for(server, 1), here.layers, here.pruning, 1, 0, state.seen, probe=False
    )
    assert accuracy(engine.execute(tasks)) == record.D
