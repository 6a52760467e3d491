"""Attention equals its formula, judges by direction alone, and separates noise from data.

Run as a program this file prints the study behind the defaults of `AggregateSettings`:

    PYTHONPATH=tests python tests/server/test_attention.py --seeds 4 --step 0.0625 0.25 1
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference as ref
from fedp3.client.batching import LocalSettings
from fedp3.client.context import ClientContext, RunSpec
from fedp3.core.settings import RunSettings
from fedp3.core.types import (
    AcceptedUpdate,
    ClientPlan,
    ClientUpdate,
    LayerMap,
    LayerPlan,
    Masks,
    Params,
)
from fedp3.data import load
from fedp3.data.partition import partition, split
from fedp3.data.shards import Shard
from fedp3.engines.in_process import sequential
from fedp3.models.layer_map import layer_map
from fedp3.models.zoo import ModelSettings, ModelSpec, build
from fedp3.planning.client_plans import PlanSettings
from fedp3.server.aggregators import AggregateSettings
from fedp3.server.attention import AttentionState
from fedp3.server.context import ServerContext, ServerState
from fedp3.server.rounds import run
from worlds import make_aggregator, same

# --------------------------------------------------------------------------- the formula

SHAPES = {"a.w": (3, 2), "a.b": (3,), "b.w": (2, 3), "b.s": (), "head.w": (4,)}
LAYERS = LayerMap(
    {"a": ("a.w", "a.b"), "b": ("b.w", "b.s"), "head": ("head.w",)},
    SHAPES,
    {},
    {},
    frozenset(),
    frozenset(),
)
ATTENTION = AggregateSettings(rule="attention", sketch=0)
DENSE = Masks()
Uploads = Sequence[AcceptedUpdate]
End = tuple[Params, AttentionState]


def values(
    rng: torch.Generator, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> dict[str, torch.Tensor]:
    return {n: torch.randn(s, generator=rng) for n, s in shapes.items()}


def upload(
    i: int, V: Params, sets: Sequence[str], masks: Masks = DENSE, layers: LayerMap = LAYERS
) -> AcceptedUpdate:
    """Client i uploads its layers of V."""
    plan = {l: LayerPlan(upload="all" if l in sets else "none") for l in layers.layers}
    tensors = {n: V[n] for l in sets for n in layers.layers[l]}
    return AcceptedUpdate(
        ClientUpdate(client=i, t=0, tensors=tensors, examples=1), ClientPlan(i, plan), masks
    )


def initial() -> AttentionState:
    """The state before the first round."""
    return {"logits": {}, "shares": {}, "sketches": {}}


def step(
    W: Params,
    updates: Uploads,
    state: AttentionState | None = None,
    how: AggregateSettings = ATTENTION,
    layers: LayerMap = LAYERS,
) -> End:
    """One round of the server."""
    aggregator = make_aggregator(how, RunSpec(layers=layers))
    return aggregator.apply(W, updates, aggregator.init() if state is None else state)


@st.composite
def runs(draw: st.DrawFn) -> list[list[tuple[int, tuple[str, ...]]]]:
    """Some rounds of (client, its layers): nobody, one client and forgotten layers included."""
    subset = st.lists(st.sampled_from(("a", "b", "head")), min_size=1, max_size=3, unique=True).map(
        tuple
    )
    one = st.dictionaries(st.integers(0, 4), subset, max_size=4).map(lambda d: list(d.items()))
    return draw(st.lists(one, min_size=1, max_size=5))


@given(
    rounds=runs(),
    seed=st.integers(0, 9999),
    size=st.sampled_from((0.1, 1.0)),
    limit=st.sampled_from((0.05, 9.0)),
    weighted=st.booleans(),
    masked=st.booleans(),
)
def test_logits_and_means_are_those_of_the_formula(rounds, seed, size, limit, weighted, masked):
    rng = torch.Generator().manual_seed(seed)
    how = replace(ATTENTION, step=size, limit=limit, start="weighted" if weighted else "simple")
    reference = ref.Attention(size, limit, lambda s: math.log(s.layers) if weighted else 0.0)
    W, state = values(rng), initial()
    V_ref = W
    for clients in rounds:
        who, sent = [], []
        for i, sets in clients:
            V = values(rng)
            retained = {
                n: torch.rand(SHAPES[n], generator=rng) < 0.7
                for l in sets
                for n in LAYERS.layers[l]
                if masked
            }
            who.append(upload(i, V, sets, Masks(weights=retained)))
            sent.append(ref.Sent(i, who[-1].update.tensors, retained, len(sets), 1))
        W, state = step(W, who, state, how)
        V_ref = reference(V_ref, LAYERS.layers, sent)
        assert state["logits"] == pytest.approx(reference.logits, abs=1e-5)
        for n in W:
            torch.testing.assert_close(W[n], V_ref[n], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("start", ["simple", "weighted"])
def test_the_first_round_is_that_of_the_rule_it_starts_from(start):
    rng = torch.Generator().manual_seed(1)
    who = [
        upload(i, values(rng), sets)
        for i, sets in enumerate([("a", "head"), ("a", "b", "head"), ("head",)])
    ]
    W = values(rng)
    got, state = step(W, who, how=replace(ATTENTION, start=start))
    want, _ = step(W, who, how=AggregateSettings(rule=start))
    for n in W:
        torch.testing.assert_close(got[n], want[n], rtol=2e-7, atol=1e-8)
    assert state["logits"] == {
        i: math.log(k) if start == "weighted" else 0.0 for i, k in enumerate((2, 3, 1))
    }


def test_one_client_alone_learns_nothing():
    rng = torch.Generator().manual_seed(2)
    W, state = values(rng), initial()
    for _ in range(4):
        W, state = step(W, [upload(3, values(rng), ("a", "head"))], state)
    assert state["logits"] == {3: 0.0}


def test_who_moved_where_the_next_round_goes_gains_and_moving_further_earns_nothing():
    """In one plane: client 0 went up, client 1 went right; then both go up."""
    W = {n: torch.zeros(s) for n, s in SHAPES.items()}
    up, right = torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 0.0, 0.0])
    how = replace(ATTENTION, step=0.1, limit=9.0)
    W1, first = step(
        W, [upload(0, {"head.w": up}, ("head",)), upload(1, {"head.w": right}, ("head",))], how=how
    )
    for length in (1.0, 50.0):
        near, far = W1["head.w"] + up, W1["head.w"] + length * up
        both = [upload(0, {"head.w": far}, ("head",)), upload(1, {"head.w": near}, ("head",))]
        _, state = step(W1, both, first, how)
        # W_0 - W_1 = (-1/2, 1/2) has cosine 1/sqrt 2 with "up"; both shares are equal
        assert state["logits"] == pytest.approx(
            {0: 0.1 / math.sqrt(2), 1: -0.1 / math.sqrt(2)}, rel=1e-5
        )


def test_a_logit_changes_by_its_limit_at_most():
    rng = torch.Generator().manual_seed(3)
    W, state, how = values(rng), initial(), replace(ATTENTION, step=100.0, limit=0.3)
    for _ in range(5):
        before = state["logits"]
        W, state = step(W, [upload(i, values(rng), ("a", "head")) for i in range(4)], state, how)
        changes = [abs(s - before.get(i, 0.0)) for i, s in state["logits"].items()]
        assert max(changes) <= 0.3 + 1e-12
    assert any(c > 0.29 for c in changes)


def test_a_layer_nobody_sends_keeps_its_sketches_until_it_is_sent_again():
    rng = torch.Generator().manual_seed(4)
    W, state = step(values(rng), [upload(i, values(rng), ("a", "head")) for i in (0, 1)])
    first = state["sketches"]["a"]
    W, state = step(W, [upload(i, values(rng), ("head",)) for i in (0, 2)], state)
    assert same(dict(state["sketches"]["a"]), dict(first)) and set(state["sketches"]["head"]) == {
        0,
        2,
    }
    _, state = step(W, [upload(2, values(rng), ("a", "head"))], state)
    assert set(state["sketches"]["a"]) == {2} == set(state["shares"]["a"])


def test_uploads_at_the_edge_of_float32_are_judged_by_direction_like_any_other():
    rng = torch.Generator().manual_seed(5)
    W, state = values(rng), initial()
    reference = ref.Attention(ATTENTION.step, ATTENTION.limit, lambda s: 0.0)
    for _ in range(4):
        far = {
            n: torch.full(s, 3e38) * torch.randn(s, generator=rng).sign() for n, s in SHAPES.items()
        }
        who = [
            upload(0, far, ("a", "b", "head")),
            *(upload(i, values(rng), ("a", "b", "head")) for i in (1, 2)),
        ]
        reference(W, LAYERS.layers, [ref.Sent(c.client, c.update.tensors, {}, 3, 1) for c in who])
        W, state = step(W, who, state)
        assert state["logits"] == pytest.approx(reference.logits, abs=1e-5)
        assert all(bool(torch.isfinite(w).all()) for w in W.values())
    assert state["logits"][1] != 0


# --------------------------------------------------------------------------- sketches


WIDE = LayerMap(
    {"head": ("w", "b")}, {"w": (300, 100), "b": (300,)}, {}, {}, frozenset(), frozenset()
)


def test_a_sketch_is_short_and_keeps_angles():
    """1,024 numbers for 30,300: inner products of unit vectors to about 1/32."""
    rng = torch.Generator().manual_seed(6)
    W = {n: torch.zeros(s) for n, s in WIDE.shapes.items()}
    common = values(rng, dict(WIDE.shapes))
    who = []
    for i in range(6):
        own = values(rng, dict(WIDE.shapes))
        who.append(upload(i, {n: i / 5 * common[n] + own[n] for n in own}, ("head",), layers=WIDE))
    exact, short = (
        step(W, who, how=AggregateSettings(rule="attention", sketch=k), layers=WIDE)[1]["sketches"][
            "head"
        ]
        for k in (0, 1024)
    )
    error = [
        float(exact[i] @ exact[j]) - float(short[i] @ short[j]) for i in range(6) for j in range(i)
    ]
    assert len(exact[0]) == 30_300 and len(short[0]) == 1024
    assert max(map(abs, error)) < 4 / 32 and np.std(error) < 1.5 / 32
    assert max(abs(float(exact[i] @ exact[j])) for i in range(6) for j in range(i)) > 0.2


def test_a_layer_shorter_than_the_sketch_is_kept_as_it_is():
    rng = torch.Generator().manual_seed(7)
    W, who = values(rng), [upload(i, values(rng), ("a",)) for i in (0, 1)]
    one, other = (
        step(W, who, how=replace(ATTENTION, sketch=k))[1]["sketches"]["a"] for k in (0, 9)
    )
    assert same(dict(one), dict(other)) and len(one[0]) == 9


# --------------------------------------------------------------------------- planted noise


@dataclass(frozen=True)
class Planted:
    """A fleet on digits in which some clients train on random labels and test on true ones."""

    server: ServerContext
    context: ClientContext
    shards: dict[int, Shard]
    noisy: frozenset[int]


def planted(
    seed: int,
    noisy: float = 0.3,
    clients: int = 40,
    rounds: int = 100,
    kind: str = "classes",
    layers: str = "full",
    participants: int = 10,
    lr: float = 0.1,
) -> Planted:
    data = load("digits")
    rng = torch.Generator().manual_seed(seed)
    parts = partition(kind, data.y.numpy(), clients, seed=seed)
    cuts = [split(part, seed=seed, client=i) for i, part in enumerate(parts)]
    shards = {
        i: Shard(torch.as_tensor(train), torch.as_tensor(test))
        for i, (train, test) in enumerate(cuts)
    }
    bad = frozenset(torch.randperm(clients, generator=rng)[: round(noisy * clients)].tolist())
    y = data.y.clone()
    for i in sorted(bad):
        y[shards[i].train] = torch.randint(data.classes, (len(shards[i].train),), generator=rng)
    net = build(
        ModelSpec(tuple(data.x.shape[1:]), data.classes, ModelSettings(name="mlp", width=0.05)),
        seed,
    )
    W = {n: w.detach().clone() for n, w in net.state_dict().items()}
    spec = RunSpec(layers=layer_map(net), seed=seed, rounds=rounds)
    context = ClientContext(
        spec=spec,
        net=net,
        data=replace(data, y=y),
        local=LocalSettings(steps=10, batch=16, lr=lr, augment=False),
        initial=W,
    )
    server = ServerContext(
        spec=spec,
        plan=PlanSettings(layers=layers),
        run=RunSettings(rounds=rounds, clients_per_round=participants, eval_every=5, seed=seed),
        aggregator=make_aggregator(AggregateSettings(), spec),
        keep=(0.9,) * clients,
        examples={i: len(s.train) for i, s in shards.items()},
    )
    return Planted(server, context, shards, bad)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: G over its last fifth, and the logits of the two groups.

    The accuracy of one round alone varies too much.
    """

    accuracy: float
    logits: dict[int, float]
    noisy: frozenset[int]

    @property
    def groups(self) -> tuple[list[float], list[float]]:
        """Logits of clean and of noisy clients."""
        return (
            [s for i, s in self.logits.items() if i not in self.noisy],
            [s for i, s in self.logits.items() if i in self.noisy],
        )

    @property
    def separated(self) -> float:
        """The share of (clean, noisy) pairs in which the clean client has the larger logit."""
        clean, noisy = self.groups
        pairs = [c > n for c in clean for n in noisy]
        return sum(pairs) / len(pairs) if pairs else math.nan


def outcome(fleet: Planted, how: AggregateSettings) -> Outcome:
    engine = sequential(fleet.context, fleet.shards)
    server = replace(fleet.server, aggregator=make_aggregator(how, fleet.server.spec))
    start = ServerState(t=0, W=fleet.context.initial, aggregator=server.aggregator.init())
    steps = list(run(server, start, engine.execute))
    begin = 0.8 * server.run.rounds
    late = [record.G.mean for _, record in steps if record.G and record.t >= begin]
    return Outcome(statistics.fmean(late), dict(steps[-1][1].aggregator), fleet.noisy)


SEEDS = (0, 1, 2)
RUNS = {
    "simple": AggregateSettings(rule="simple"),
    "sketched": AggregateSettings(rule="attention"),
    "exact": AggregateSettings(rule="attention", sketch=0),
}


@lru_cache(maxsize=1)
def study() -> dict[str, list[Outcome]]:
    """20 clients of 63 training samples, 6 of them noisy, half of them in each of 25 rounds."""
    fleets = [planted(seed, clients=20, rounds=25, kind="iid", lr=0.2) for seed in SEEDS]
    return {name: [outcome(fleet, how) for fleet in fleets] for name, how in RUNS.items()}


@pytest.mark.parametrize("name", ["sketched", "exact"])
@pytest.mark.parametrize("seed", SEEDS)
def test_clients_with_random_labels_end_with_smaller_logits(name, seed):
    got = study()[name][seed]
    clean, noisy = got.groups
    assert statistics.fmean(clean) > 0 > statistics.fmean(noisy)
    assert got.separated > 0.95


@pytest.mark.parametrize("seed", SEEDS)
def test_sketches_learn_what_whole_uploads_would(seed):
    exact, sketched = (study()[name][seed].logits for name in ("exact", "sketched"))
    assert exact.keys() == sketched.keys()
    both = np.array([[exact[i], sketched[i]] for i in exact])
    assert np.corrcoef(both.T)[0, 1] > 0.95


def test_with_random_labels_among_them_attention_is_not_below_simple():
    mean = {
        name: statistics.fmean(o.accuracy for o in outcomes) for name, outcomes in study().items()
    }
    assert mean["sketched"] > mean["simple"] and mean["exact"] > mean["simple"]


@pytest.mark.slow
def test_without_random_labels_attention_costs_little():
    """Over 3 seeds of 100 rounds: single seeds lose up to half a point, the mean must not."""
    fleets = [planted(seed, noisy=0.0) for seed in SEEDS]
    simple, attention = (
        statistics.fmean(outcome(f, RUNS[name]).accuracy for f in fleets)
        for name in ("simple", "sketched")
    )
    assert attention > simple - 0.003


def main() -> None:
    """Print accuracy and separation of attention against simple, seed by seed."""
    default = AggregateSettings()
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--participants", type=int, default=10, help="per round; 0: all")
    parser.add_argument("--partition", default="classes")
    parser.add_argument("--layers", default="full")
    parser.add_argument(
        "--noisy", type=float, default=0.3, help="share of clients with random labels"
    )
    parser.add_argument("--step", type=float, nargs="+", default=[default.step])
    parser.add_argument("--limit", type=float, default=default.limit)
    parser.add_argument("--sketch", type=int, default=default.sketch)
    a = parser.parse_args()
    torch.set_num_threads(1)
    fleets = [
        planted(s, a.noisy, a.clients, a.rounds, a.partition, a.layers, a.participants)
        for s in range(a.seeds)
    ]
    simple = [outcome(f, RUNS["simple"]).accuracy for f in fleets]
    print(f"simple: mean accuracy {100 * statistics.fmean(simple):.2f} %")
    for size in a.step:
        got = [
            outcome(
                f, AggregateSettings(rule="attention", step=size, limit=a.limit, sketch=a.sketch)
            )
            for f in fleets
        ]
        gains = [100 * (o.accuracy - s) for o, s in zip(got, simple, strict=True)]
        by_seed = " ".join(f"{g:+.2f}" for g in gains)
        separated = " ".join(f"{o.separated:.3f}" for o in got)
        print(
            f"attention, step {size:g}: gain {statistics.fmean(gains):+.2f} points, "
            f"by seed {by_seed}; separated {separated}",
            flush=True,
        )


if __name__ == "__main__":
    main()
