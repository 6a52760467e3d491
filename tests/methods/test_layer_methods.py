"""Methods that upload some layers in some rounds: against plain loops, and in limit cases."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedp3.core.errors import ConfigError
from fedp3.core.types import Reply, Task
from fedp3.engines.base import States
from fedp3.engines.in_process import sequential
from fedp3.experiment.experiment import Experiment
from fedp3.planning.client_plans import layer_sets
from fedp3.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedp3.server.intervals import rare_layers
from fedp3.server.recycling import recycled_count
from fedp3.server.round_plans import plans_for
from fedp3.server.rounds import run, run_round
from fedp3.server.scoring import finish
from fedp3.server.selection import select
from worlds import same

from . import layer_references as layers
from . import reference as ref
from .fleet import bench, experiment, trained, with_rounds
from .test_references import KEEP, KEEPS, close

ROUNDS = 5
PACED = ("plan.share=0.3", "plan.period=2")  # fc1 is small, and fc2 and fc3 take turns
WEAK = (KEEP, "plan.weak_below=0.6", "plan.weak_steps=1")
WEAK_STEPS = {i: 1 for i, keep in enumerate(KEEPS) if keep < 0.6}


def paced(t: int, i: int) -> list[str]:
    return ["fc1", "fc2" if t % 2 == 0 else "fc3", "ffc"]


def weak_paced(t: int, i: int) -> list[str]:
    """Weak clients train the upper half of the layers: fc3 and the head."""
    return [l for l in paced(t, i) if KEEPS[i] >= 0.6 or l in ("fc3", "ffc")]


def windows(e: Experiment) -> layers.Due:
    """The sets are the package's own draw; what is done with them is the reference's."""
    server = e.server
    return lambda t, i: layer_sets(server.plan, server.layers, 4, server.spec.seed, t)[i]


CYCLE = ("plan.warm=1", "plan.stretch=1")
# Schedules are held to references without codes, which tests/server/test_publication.py holds.
UNCODED = ("upload.compress=none", "download.compress=none")
MODEL: Mapping[str, tuple[str, tuple[str, ...], Callable[[Experiment], ref.Round]]] = {
    "fedpart": (
        "fedpart",
        CYCLE,
        lambda e: layers.partly(bench(e), layers.in_cycles(1, 1), freeze=True),
    ),
    "fedp3-paced": (
        "fedp3-paced",
        (*PACED, *UNCODED),
        lambda e: layers.partly(bench(e), paced, freeze=True, by_examples=False),
    ),
    "fedp3-paced with weak clients": (
        "fedp3-paced",
        (*PACED, *UNCODED, *WEAK, "plan.weak_depth=0.5"),
        lambda e: layers.partly(
            bench(e), weak_paced, freeze=True, by_examples=False, steps=WEAK_STEPS, keeps=KEEPS
        ),
    ),
    "fedlp": (
        "fedlp",
        (),
        lambda e: layers.partly(
            bench(e), layers.by_coins(e.server.spec.seed, 4, 0.5), freeze=False
        ),
    ),
    "fedluar": ("fedluar", (), lambda e: layers.recycled(bench(e), 2, "ratio")),
    "fedluar, random": (
        "fedluar",
        ("aggregate.recycle_by=random",),
        lambda e: layers.recycled(bench(e), 2, "random"),
    ),
    "fedluar, cyclic": (
        "fedluar",
        ("aggregate.recycle_by=cyclic", "aggregate.recycle=0.25"),
        lambda e: layers.recycled(bench(e), 1, "cyclic"),
    ),
    "fedlama": ("fedlama", ("aggregate.interval=2",), lambda e: layers.by_agreement(bench(e), 2)),
    "fedlama, rarer": (
        "fedlama",
        ("aggregate.interval=3",),
        lambda e: layers.by_agreement(bench(e), 3),
    ),
    "selective": ("selective", (), lambda e: layers.selective(bench(e), 2, 0.1)),
    "selective, each for itself": (
        "selective",
        ("aggregate.agreement=0", "aggregate.select=1"),
        lambda e: layers.selective(bench(e), 1, 0.0),
    ),
    "selective, all alike": (
        "selective",
        ("aggregate.agreement=1e6", "aggregate.select=3"),
        lambda e: layers.selective(bench(e), 3, 1e6),
    ),
    "cocofl": (
        "cocofl",
        (),
        lambda e: layers.partly(bench(e), windows(e), freeze=True, by_examples=False, damp=1.0),
    ),
    "cocofl, half damped": (
        "cocofl",
        ("aggregate.damp=0.5",),
        lambda e: layers.partly(bench(e), windows(e), freeze=True, by_examples=False, damp=0.5),
    ),
    "fiarse-threshold": (
        "fiarse-threshold",
        (KEEP,),
        lambda e: layers.fiarse_threshold(bench(e), KEEPS),
    ),
    "fedavg, fewer steps on weak clients": (
        "fedavg",
        WEAK,
        lambda e: layers.partly(
            bench(e), lambda t, i: layers.LAYERS, freeze=False, steps=WEAK_STEPS
        ),
    ),
}


@pytest.mark.parametrize("case", MODEL)
def test_the_model_is_that_of_the_reference(case: str) -> None:
    method, overrides, reference = MODEL[case]
    e = experiment(method, *overrides)
    state, _ = trained(e, ROUNDS)
    want, _ = ref.run(bench(e), ROUNDS, reference(e))
    close(state.W, want)
    assert max(float((state.W[n] - e.start.W[n]).abs().max()) for n in state.W) > 1e-3


# --------------------------------------------------------------------------- limit cases

FEDAVG = trained(experiment("fedavg"), 3)[0].W
UNWEIGHTED = trained(experiment("fedavg", "aggregate.rule=simple"), 3)[0].W
OFF = {
    "a cycle of warm rounds alone": ("fedpart", ["plan.warm=3"]),
    "a random schedule in which every layer is certain": ("fedlp", ["plan.probability=1.0"]),
    "an interval of one round": ("fedlama", ["aggregate.interval=1"]),
    "selecting all layers": ("selective", ["aggregate.select=4"]),
    "recycling no layer": ("fedluar", ["aggregate.recycle=0"]),
    "recycling less than one layer": ("fedluar", ["aggregate.recycle=0.2"]),
    "weak clients below a share that none is below": (
        "fedavg",
        ["plan.weak_below=0.5", "plan.weak_steps=1"],
    ),
    "damping where everybody uploads everything": ("fedavg", ["aggregate.damp=1.0"]),
}
OFF_UNWEIGHTED = {
    "a paced schedule in which all layers are small": ("fedp3-paced", ["plan.share=1.0", *UNCODED]),
    "a paced schedule whose period is one round": ("fedp3-paced", ["plan.period=1", *UNCODED]),
    "windows of all layers": ("cocofl", ["plan.layers=full"]),
    "a threshold below which nothing is": ("fiarse-threshold", ["prune.keep=1.0"]),
}


@pytest.mark.parametrize("case", OFF)
def test_without_its_idea_a_method_is_fedavg(case: str) -> None:
    method, overrides = OFF[case]
    assert same(trained(experiment(method, *overrides), 3)[0].W, FEDAVG)


@pytest.mark.parametrize("case", OFF_UNWEIGHTED)
def test_without_its_idea_a_method_is_unweighted_fedavg(case: str) -> None:
    method, overrides = OFF_UNWEIGHTED[case]
    assert same(trained(experiment(method, *overrides), 3)[0].W, UNWEIGHTED)


def test_without_damping_windows_are_averaged_over_their_senders_to_the_bit() -> None:
    plain = experiment("cocofl", "aggregate.damp=0")
    other = experiment(
        "fedp3", "plan.layers=opu1-2-3", "plan.redraw=true", "plan.others=freeze", "prune.keep=1.0"
    )
    assert same(trained(plain, 3)[0].W, trained(other, 3)[0].W)
    assert not same(trained(plain, 3)[0].W, trained(experiment("cocofl"), 3)[0].W)


def test_the_first_round_of_fedluar_uploads_everything() -> None:
    assert same(trained(experiment("fedluar"), 1)[0].W, trained(experiment("fedavg"), 1)[0].W)


# --------------------------------------------------------------------------- what changes, what not


def test_layers_that_are_not_due_keep_their_bits_with_their_running_statistics() -> None:
    """On a network with BatchNorm, one layer of the cycle moves at a time."""
    e = experiment("resist", "plan.layers=full", "plan.schedule=cycle", "plan.warm=0",
                   "plan.stretch=1", "plan.others=freeze", "run.rounds=20")  # fmt: skip
    state, names = e.start, e.server.layers.layers
    engine = sequential(e.client, e.shards)
    for t, due in zip(range(3), names, strict=False):
        new, _ = run_round(e.server, state, engine.execute)
        moved = {n for n in new.W if not torch.equal(new.W[n], state.W[n])}
        assert moved and moved <= set(names[due]), t
        assert any(n in e.server.layers.buffers for n in moved)
        state = new


def test_a_recycled_layer_repeats_its_change_and_costs_no_upload() -> None:
    e = experiment("fedluar", "run.rounds=6")
    engine, state, changes = sequential(e.client, e.shards), e.start, {}
    for _ in range(6):
        recycled = e.server.aggregator.next_round(state.aggregator).left_out
        new, record = run_round(e.server, state, engine.execute)
        dense = 4 * 4 * sum(
            w.numel()
            for l, names in e.server.layers.layers.items()
            if l not in recycled
            for n, w in new.W.items()
            if n in names
        )  # fmt: skip
        assert record.bytes_up == dense
        for l, names in e.server.layers.layers.items():
            for n in names:
                if l in recycled:
                    assert torch.equal(new.W[n], state.W[n] + changes[n])
                else:
                    changes[n] = new.W[n] - state.W[n]
        state = new
        assert len(e.server.aggregator.next_round(state.aggregator).left_out) == 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1, max_size=6).filter(
        lambda rows: any(map(any, rows))
    ),
    st.integers(1, 4),
    st.sampled_from((0.0, 0.05, 0.3, 2.0, 1e6)),
)
def test_selected_layers_are_those_of_an_exhaustive_search(
    rows: list[list[int]], count: int, strength: float
) -> None:
    # distinct values, so that no two choices are equally good
    norms = [[g + 0.013 * k * (i + 1) for k, g in enumerate(row)] for i, row in enumerate(rows)]
    chosen = [
        tuple(layers.LAYERS[l] for l in mine)
        for mine in select(torch.tensor(norms, dtype=torch.float64), count, strength)
    ]
    named = [dict(zip(layers.LAYERS, row, strict=True)) for row in norms]
    mean = sum(map(sum, norms)) / (4 * len(norms))
    scaled = [{l: g / mean for l, g in row.items()} for row in named]
    want = layers.agreed(named, count, strength)
    reached, wanted = (layers.objective(scaled, m, strength) for m in (chosen, want))
    assert reached == pytest.approx(wanted, rel=1e-9)
    assert all(len(mine) == count for mine in chosen)
    alone = [tuple(sorted(row, key=row.__getitem__)[-count:]) for row in named]
    if strength == 0:
        assert [set(mine) for mine in chosen] == [set(mine) for mine in alone]
    if strength == 1e6:
        assert len(set(chosen)) == 1
    own = [tuple(l for l in layers.LAYERS if l in mine) for mine in alone]
    assert reached >= layers.objective(scaled, own, strength) - 1e-9


def test_a_client_that_is_not_known_yet_selects_like_the_mean_of_the_others() -> None:
    e = experiment("selective", "aggregate.agreement=0", "aggregate.select=1")
    state = e.server.aggregator.init()
    assert e.server.aggregator.next_round(state).trained is None, "nothing is known: all layers"
    norms = {0: torch.tensor([9.0, 0, 0, 1]), 1: torch.tensor([0.0, 0, 8, 3])}
    choose = e.server.aggregator.next_round({**state, "norms": norms}).trained
    assert choose is not None
    assert choose([0, 1, 3]) == {0: {"fc1"}, 1: {"fc3"}, 3: {"fc1"}}


def test_selected_layers_are_all_that_a_client_trains_and_uploads() -> None:
    e = experiment("selective", "run.rounds=3")
    seen: list[Task] = []
    engine = sequential(e.client, e.shards)

    def watched(tasks: Sequence[Task]) -> list[Reply]:
        seen.extend(task for task in tasks if task.kind == "train")
        return list(engine.execute(tasks))

    for _ in run(e.server, e.start, watched):
        pass
    for task in seen:
        trained = {l for l, p in task.plan.layers.items() if p.train}
        assert len(trained) == (4 if task.t == 0 else 2)
        assert trained == set(task.plan.uploaded)
        assert all(p.send == "dense" for p in task.plan.layers.values())


def test_layers_that_change_least_are_recycled_most_often() -> None:
    from fedp3.core.randomness import Stream, stream
    from fedp3.server.aggregators import RECYCLED_BY

    scores = {"still": 1e-3, "slow": 1e-2, "fast": 1.0}
    counts = dict.fromkeys(scores, 0)
    for t in range(600):
        for l in RECYCLED_BY.pick("ratio")(scores, 1, t, stream(0, Stream.RECYCLE, t)):
            counts[l] += 1
    # The chances are 1000, 100 and 1 of 1101.
    assert counts["still"] > 500 and 20 < counts["slow"] < 90 and counts["fast"] < 10
    everything = RECYCLED_BY.pick("ratio")({"a": 0.0, "b": 1.0}, 2, 0, stream(0, Stream.RECYCLE, 0))
    assert sorted(everything) == ["a", "b"], "a layer that never changed is drawn like any other"


def test_a_void_round_repeats_no_change_and_draws_no_layers() -> None:
    e = experiment("fedluar")
    engine = sequential(e.client, e.shards)
    state, _ = run_round(e.server, e.start, engine.execute)
    after, record = run_round(e.server, state, lambda tasks: [])
    assert record.void and same(after.W, state.W)
    assert after.aggregator == state.aggregator


def test_recycling_composes_with_a_server_optimizer() -> None:
    e = experiment("fedluar", "aggregate.server=momentum", "aggregate.recycle=0.25")
    assert recycled_count(e.config.aggregate, e.server.layers) == 1
    engine = sequential(e.client, e.shards)
    state, _ = run_round(e.server, e.start, engine.execute)
    (recycled,) = e.server.aggregator.next_round(state.aggregator).left_out
    new, _ = run_round(e.server, state, engine.execute)
    for n in e.server.layers.layers[recycled]:
        assert torch.equal(new.W[n], state.W[n] + (state.W[n] - e.start.W[n]))


def test_rare_layers_are_sent_and_uploaded_once_in_an_interval() -> None:
    e = experiment("fedlama", "aggregate.interval=3", "run.rounds=9")
    engine, state, size = sequential(e.client, e.shards), e.start, {}
    for l, names in e.server.layers.layers.items():
        size[l] = 4 * 4 * sum(e.start.W[n].numel() for n in names)  # bytes of four clients
    for t in range(9):
        rare = set(state.aggregator["rare"])
        assert bool(rare) == (t >= 3), "the first interval averages everything"
        often = sum(size[l] for l in size if l not in rare)
        new, record = run_round(e.server, state, engine.execute)
        assert record.bytes_down == often + (t % 3 == 0) * sum(size[l] for l in rare)
        assert record.bytes_up == often + (t % 3 == 2) * sum(size[l] for l in rare)
        for l in rare:
            moved = any(not torch.equal(new.W[n], state.W[n]) for n in e.server.layers.layers[l])
            assert moved == (t % 3 == 2)
        state = new


def test_a_client_that_missed_a_round_is_sent_a_copy_of_rare_layers() -> None:
    e = experiment("fedlama", "aggregate.interval=3", "run.rounds=6")
    engine, state = sequential(e.client, e.shards), e.start
    sent: list[dict[int, set[str]]] = []

    def without_client_1(tasks: Sequence[Task]) -> list[Reply]:
        sent.append({task.plan.client: set(task.weights) for task in tasks})
        asked = [task for task in tasks if task.plan.client != 1 or task.t != 3]
        return list(engine.execute(asked))

    for _ in range(6):
        state, _ = run_round(e.server, state, without_client_1)
    everything = set(e.start.W)
    assert all(names == everything for names in sent[3].values())
    assert sent[4][1] == everything and sent[4][0] < everything, "client 1 has nothing to continue"
    assert sent[5][1] == sent[5][0] == sent[4][0]


@pytest.mark.parametrize(
    ("method", "override"),
    [("fedlama", "aggregate.interval=3"), ("fedluar", "aggregate.recycle=0.5")],
)
def test_a_run_that_stops_where_layers_are_left_out_resumes_to_the_same_bits(
    method: str, override: str, tmp_path: Path
) -> None:
    e = experiment(method, override)
    straight, _ = trained(e, 7)
    half, states = trained(e, 4)
    wanted = e.server.aggregator.next_round(half.aggregator)
    assert wanted.left_out, "stopped in the middle"
    assert wanted.continued == (wanted.left_out if method == "fedlama" else frozenset())
    (tmp_path / "checkpoint").mkdir()
    save_checkpoint(tmp_path, Checkpoint(half, states.by_client), "digest")
    checkpoint, broken = load_checkpoint(tmp_path, "digest")
    assert checkpoint is not None and not broken
    stored = States({i: dict(rounds) for i, rounds in checkpoint.clients.items()})
    engine = sequential(e.client, e.shards, stored)
    *_, (resumed, _) = run(with_rounds(e.server, 7), checkpoint.state, engine.execute)
    assert same(resumed.W, straight.W)


def test_participants_stay_for_an_interval() -> None:
    e = experiment("fedlama", "aggregate.interval=2", "run.rounds=6", "run.clients_per_round=2")
    engine = sequential(e.client, e.shards)
    sampled = [record.sampled for _, record in run(e.server, e.start, engine.execute)]
    assert sampled[0::2] == sampled[1::2] and len(set(sampled)) > 1


def test_layers_become_rare_in_the_order_of_their_discrepancy_per_weight() -> None:
    net = experiment("fedavg").server.layers
    size = {l: sum(math.prod(net.shapes[n]) for n in names) for l, names in net.layers.items()}
    calm = {"fc1": 1e-9, "fc2": 1.0, "fc3": 1.0, "ffc": 1.0}
    assert rare_layers({l: d * size[l] for l, d in calm.items()}, net)[0] == "fc1"
    assert rare_layers(dict.fromkeys(net.layers, 0.0), net) == list(net.layers)
    # One layer with all of the discrepancy: the others have none, so that they are all rare.
    assert set(rare_layers({**dict.fromkeys(net.layers, 0.0), "fc2": 1.0}, net)) >= {
        "fc1", "fc3", "ffc",
    }  # fmt: skip


def test_weak_clients_take_fewer_steps_and_leave_the_lowest_layers_alone() -> None:
    e = experiment("fedp3-paced", *PACED, *WEAK, "plan.weak_depth=0.5")
    full, costs = experiment("fedp3-paced", *PACED, KEEP).costs, e.costs
    for i, plan in enumerate(plans_for(e.server, 0)):
        weak = KEEPS[i] < 0.6
        assert plan.steps == (1 if weak else 0)
        assert plan.full_layers == (("ffc",) if weak else ("fc1", "fc2", "ffc"))
        assert (costs[i].gflop < 0.3 * full[i].gflop) == weak
        assert (costs[i].peak_mb < full[i].peak_mb) == weak


@pytest.mark.parametrize("rounds", [2, 3, 4])
def test_p_of_the_finished_model_is_measured_after_an_update_of_all_layers(rounds: int) -> None:
    """Wherever a cycle ends, P is that of FedAvg's probe of the same model."""
    part, full = (
        experiment(method, *more, f"run.rounds={rounds}")
        for method, more in (("fedpart", CYCLE), ("fedavg", ()))
    )
    state, states = trained(part, rounds)
    scored = finish(part.server, state, sequential(part.client, part.shards, states).execute)
    plain = finish(full.server, state, sequential(full.client, full.shards, states).execute)
    assert scored.P == plain.P and scored.G == plain.G


# --------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("method", "overrides", "text"),
    [
        ("fedpart", ["plan.stretch=0"], "plan] stretch"),
        ("fedpart", ["plan.schedule=weekly"], "unknown schedule of layers"),
        ("fedpart", ["plan.others=personal"], "personal layers must be the same"),
        ("fedp3-paced", ["plan.share=0"], "plan] share"),
        ("fedp3-paced", ["plan.upload=retained", "plan.others=train"], "uploaded in every round"),
        ("fedlp", ["plan.probability=1.5"], "plan] probability"),
        ("fedluar", ["aggregate.recycle=1.0"], "aggregate] recycle"),
        ("fedluar", ["aggregate.recycle_by=size"], "unknown choice of layers"),
        ("fiarse", ["aggregate.recycle=0.5"], "it would be uploaded nevertheless"),
        ("fedlama", ["plan.layers=opu2"], "need full models"),
        ("fedlama", ["upload.compress=int8"], "was sent earlier"),
        ("fedlama", ["aggregate.recycle=0.5"], "set recycle to 0"),
        ("fedavg", ["plan.weak_steps=1"], "no client is weak"),
        ("fedavg", ["plan.weak_below=0.5", "plan.weak_steps=3"], "not fewer"),
        ("fedavg", ["plan.weak_below=0.5", "plan.weak_depth=0.5"], "set [plan] others to 'freeze'"),
        ("fiarse-threshold", ["prune.selector=magnitude"], "one threshold on all weights"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    method: str, overrides: list[str], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        experiment(method, *overrides)
    assert text in str(caught.value)


def test_a_run_that_ends_before_every_layer_had_its_turn_is_refused() -> None:
    from fedp3.core.errors import PlanError

    with pytest.raises(PlanError, match=r"fc3, ffc .* run more than 2 rounds"):
        experiment("fedpart", "plan.warm=0", "plan.stretch=1", "run.rounds=2")


def test_a_threshold_at_zero_changes_no_gradient() -> None:
    """Retained weights that are zero give a threshold of zero, where the slope is zero too."""
    from fedp3.methods.fiarse import through_threshold

    w = torch.tensor([0.0, 0.5, -2.0])
    mask = torch.tensor([True, True, True])
    plain = lambda net, x, y, W, active: (1.0, [torch.tensor([3.0, 4.0, 5.0])])  # noqa: E731
    gradient = through_threshold(plain, {"w": w}, {"w": mask})
    _, (g,) = gradient(torch.nn.Identity(), w, w, {"w": w}, {})
    assert g.tolist() == [3.0, 4.0, 5.0]


def test_gradients_at_the_threshold_are_half_as_large_again_and_vanish_below_it() -> None:
    from fedp3.methods.fiarse import through_threshold

    start = torch.tensor([0.0, 0.5, -2.0, 1e6])
    mask = torch.tensor([False, True, True, True])
    seen: list[list[float]] = []

    def plain(net, x, y, W, active):  # type: ignore[no-untyped-def]
        seen.append(W["w"].tolist())
        return 1.0, [torch.ones(4)]

    gradient = through_threshold(plain, {"w": start}, {"w": mask})
    _, (g,) = gradient(torch.nn.Identity(), start, start, {"w": start.clone()}, {})
    torch.testing.assert_close(g, torch.tensor([0.0, 1.5, 1 + 2 * 0.5 * 2 / 2.5**2, 1.0]))
    fallen = torch.tensor([0.0, 0.4, -2.0, 1e6])
    _, (g,) = gradient(torch.nn.Identity(), start, start, {"w": fallen}, {})
    assert g[1] == 0 and seen[-1][1] == 0 and fallen[1] == torch.tensor(0.4)
