"""Algorithm 3: every rule of `AGGREGATORS` must satisfy the same claims, a new one included."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

import reference as ref
from fedp3.client.context import RunSpec
from fedp3.core import masks as M
from fedp3.core.errors import InputError, RunError
from fedp3.core.types import (
    AcceptedUpdate,
    ClientPlan,
    ClientUpdate,
    LayerMap,
    LayerPlan,
    Masks,
    Params,
    Task,
)
from fedp3.planning.prune_settings import PruneSettings
from fedp3.server import averaging
from fedp3.server.aggregators import AGGREGATORS, AggregateSettings
from worlds import judge, make_aggregator, masked_mean, same, world

SHAPES = ((), (1,), (3,), (2, 3), (2, 1, 2), (2, 2, 1, 2))
every_rule = pytest.mark.parametrize("rule", AGGREGATORS)


def spec_of(layers: LayerMap, unfed: str = "abstain") -> RunSpec:
    return RunSpec(layers=layers, pruning=PruneSettings(unfed_columns=unfed))


def aggregate(
    W: Params, updates: Sequence[AcceptedUpdate], spec: RunSpec, rule: str, **how: float
) -> Params:
    """One round of a rule, from its initial state."""
    aggregator = make_aggregator(AggregateSettings(rule=rule, **how), spec)
    return aggregator.apply(W, updates, aggregator.init())[0]


@dataclass(frozen=True)
class Round:
    """The server's side of one round, drawn at random."""

    W: Params
    layers: LayerMap
    who: tuple[AcceptedUpdate, ...]
    unfed: str  # what columns without a retained input do: abstain or vote

    def new(
        self, rule: str = "simple", who: Sequence[AcceptedUpdate] | None = None, **how: float
    ) -> Params:
        updates = self.who if who is None else who
        return aggregate(self.W, updates, spec_of(self.layers, self.unfed), rule, **how)

    def counts(self, c: AcceptedUpdate, l: str, n: str) -> Tensor:
        """The coordinates of tensor n that client c uploads."""
        mask = c.masks.weights.get(n)
        upload = c.plan.layers[l].upload
        dense = upload == "zeros" or (upload == "all" and self.unfed == "vote")
        return torch.ones(self.W[n].shape, dtype=torch.bool) if dense or mask is None else mask

    def spoken(self) -> list[tuple[str, Tensor, list[Tensor]]]:
        """(tensor, the uploads of it, their counts), the two stacked over clients."""
        out = []
        for l, names in self.layers.layers.items():
            senders = [c for c in self.who if l in c.plan.uploaded]
            for n in names:
                none = torch.zeros((0, *self.W[n].shape))
                values = torch.stack([c.update.tensors[n] for c in senders]) if senders else none
                counts = (
                    torch.stack([self.counts(c, l, n) for c in senders]) if senders else none.bool()
                )
                out.append((n, values, counts))
        return out

    def sent(self) -> list[ref.Sent]:
        """The same uploads for the reference implementation."""
        out = []
        for c in self.who:
            counts = {
                n: self.counts(c, l, n) for l in c.plan.uploaded for n in self.layers.layers[l]
            }
            full = sum(p.upload == "all" for p in c.plan.layers.values())  # |L_i|
            out.append(ref.Sent(c.client, c.update.tensors, counts, full or 1, c.update.examples))
        return out


def toy_map(shapes: dict[str, tuple[tuple[int, ...], ...]]) -> LayerMap:
    layers = {l: tuple(f"{l}.{j}" for j in range(len(of_layer))) for l, of_layer in shapes.items()}
    flat = {f"{l}.{j}": s for l, of_layer in shapes.items() for j, s in enumerate(of_layer)}
    return LayerMap(layers, flat, {}, {}, frozenset(flat), frozenset())


def contribution(
    i: int, W: Params, layers: LayerMap, plan: dict[str, LayerPlan], masks: Masks, m: int = 1
) -> AcceptedUpdate:
    tensors = {n: W[n] for l, p in plan.items() if p.upload != "none" for n in layers.layers[l]}
    return AcceptedUpdate(
        ClientUpdate(client=i, t=0, tensors=tensors, examples=m), ClientPlan(i, plan), masks
    )


@st.composite
def rounds(
    draw: st.DrawFn, uploads: Sequence[str] = ("all", "retained", "zeros", "none"), clients: int = 4
) -> Round:
    """Any layers, shapes, layer subsets, masks and uploads; nobody and one client included."""
    shapes = draw(
        st.lists(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=2), min_size=1, max_size=4)
    )
    layers = toy_map({f"l{j}": tuple(of_layer) for j, of_layer in enumerate(shapes)})
    rng = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))

    def values() -> dict[str, Tensor]:
        size = 10.0 ** draw(st.integers(-3, 3))
        return {n: size * torch.randn(s, generator=rng) for n, s in layers.shapes.items()}

    who = []
    for i in draw(st.lists(st.integers(0, 50), max_size=clients, unique=True)):
        plan = {
            l: LayerPlan(send=send, keep=0.5, train=True, upload=upload)
            for l in layers.layers
            for send, upload in [
                draw(st.tuples(st.sampled_from(("dense", "pruned")), st.sampled_from(uploads)))
            ]
        }
        masks = {
            n: torch.rand(layers.shapes[n], generator=rng) < 0.6
            for l, p in plan.items()
            if p.send == "pruned"
            for n in layers.layers[l]
        }
        who.append(
            contribution(
                i, values(), layers, plan, Masks(weights=masks), draw(st.integers(1, 1000))
            )
        )
    return Round(values(), layers, tuple(who), draw(st.sampled_from(("abstain", "vote"))))


def test_every_rule_of_the_package_has_a_reference():
    assert set(AGGREGATORS) == ref.WEIGH.keys()


@every_rule
@given(rounds())
def test_the_mean_is_that_of_the_reference(rule, drawn):
    want = ref.aggregate(drawn.W, drawn.layers.layers, drawn.sent(), ref.WEIGH[rule])
    got = drawn.new(rule)
    assert got.keys() == want.keys()
    for n in want:
        torch.testing.assert_close(got[n], want[n], rtol=3e-7, atol=1e-9)


@every_rule
@given(rounds(), st.sampled_from([0.0, 0.25, 1.0]))
def test_damping_is_that_of_the_reference(rule, drawn, damp):
    """Coordinate by coordinate: f = 1 - d (1 - r), with r the share of clients that uploaded it."""
    mean, got = drawn.new(rule), drawn.new(rule, damp=damp)
    if damp == 0:
        assert same(got, mean), "without damping to the bit"
    for n, _, counts in drawn.spoken():
        for at in ref.coordinates(drawn.W[n].shape):
            r = sum(bool(count[at]) for count in counts) / max(1, len(drawn.who))
            f = 1 - damp * (1 - r)
            w, m = float(drawn.W[n][at]), float(mean[n][at])
            assert float(got[n][at]) == pytest.approx(f * m + (1 - f) * w, rel=1e-6, abs=1e-7)
            if r == 1:
                assert torch.equal(got[n][at], mean[n][at])
            if r == 0:
                assert torch.equal(got[n][at], drawn.W[n][at])


@every_rule
@given(rounds(uploads=("all", "retained", "none")))
def test_equal_uploads_come_back_bit_for_bit(rule, drawn):
    V = {
        n: torch.randn(s, generator=torch.Generator().manual_seed(3))
        for n, s in drawn.layers.shapes.items()
    }
    who = [
        replace(c, update=replace(c.update, tensors={n: V[n] for n in c.update.tensors}))
        for c in drawn.who
    ]
    want = {n: torch.where(counts.any(0), V[n], drawn.W[n]) for n, _, counts in drawn.spoken()}
    assert same(drawn.new(rule, who), want)


@every_rule
@given(rounds(), st.randoms(use_true_random=False))
def test_the_order_of_replies_leaves_no_bit(rule, drawn, random):
    shuffled = random.sample(drawn.who, len(drawn.who))
    assert same(drawn.new(rule), drawn.new(rule, shuffled))


@every_rule
@given(rounds())
def test_the_mean_lies_between_the_uploads(rule, drawn):
    got = drawn.new(rule)
    for n, values, counts in drawn.spoken():
        uploaded = counts.any(0)
        low = values.masked_fill(~counts, math.inf).amin(0) if len(values) else drawn.W[n]
        high = values.masked_fill(~counts, -math.inf).amax(0) if len(values) else drawn.W[n]
        assert bool((~uploaded | ((low <= got[n]) & (got[n] <= high))).all())


@every_rule
@given(rounds())
def test_what_nobody_sent_keeps_its_bits(rule, drawn):
    got = drawn.new(rule)
    for n, values, counts in drawn.spoken():
        if not len(values):
            assert got[n] is drawn.W[n]
        dark = ~counts.any(0)
        assert torch.equal(got[n][dark], drawn.W[n][dark])


@every_rule
@given(rounds(clients=1))
def test_one_client_alone_is_copied(rule, drawn):
    got = drawn.new(rule)
    for n, values, counts in drawn.spoken():
        for w, mask in zip(values, counts, strict=True):
            assert torch.equal(got[n], torch.where(mask, w, drawn.W[n]))


@every_rule
@given(rounds())
def test_neither_weights_nor_uploads_are_written_to(rule, drawn):
    inputs = [*drawn.W.values(), *(w for c in drawn.who for w in c.update.tensors.values())]
    before = [w.clone() for w in inputs]
    drawn.new(rule)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@every_rule
def test_an_empty_round_returns_the_model(rule):
    layers = toy_map({"a": ((2,),), "b": ((),)})
    W = {"a.0": torch.ones(2), "b.0": torch.tensor(-0.0)}
    aggregator = make_aggregator(AggregateSettings(rule=rule), spec_of(layers))
    new, state = aggregator.apply(W, [], aggregator.init())
    assert all(new[n] is W[n] for n in W) and state == aggregator.init()


# ------------------------------------------------------------------------- the weights of the rules


@given(rounds(), st.integers(2, 1000))
def test_the_scale_of_the_weights_leaves_no_bit(drawn, scale):
    scaled = [
        replace(c, update=replace(c.update, examples=scale * c.update.examples)) for c in drawn.who
    ]
    assert same(drawn.new("examples"), drawn.new("examples", scaled))


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=5), st.floats(1e-6, 1e6))
def test_any_scale_changes_the_mean_by_rounding_at_most(a, scale):
    rng = torch.Generator().manual_seed(0)
    values = [torch.randn(4, 3, generator=rng) for _ in a]
    rows = [M.Block(torch.tensor([j % 4, (j + 1) % 4]), None) for j in range(len(a))]
    for kept in (rows, [None] * len(a)):
        sent = list(zip(values, kept, strict=True))
        one, other = (masked_mean(torch.zeros(4, 3), sent, b) for b in (a, [scale * x for x in a]))
        torch.testing.assert_close(one, other, rtol=2e-7, atol=1e-9)


@given(st.integers(1, 40), st.integers(1, 60), st.booleans())
def test_small_uploads_added_together_are_those_added_one_by_one(clients, size, weighed):
    rng = torch.Generator().manual_seed(clients)
    sent = [(torch.randn(size, generator=rng), None) for _ in range(clients)]
    a = torch.rand(clients, generator=rng).add(0.1).tolist() if weighed else [1.0] * clients
    sums = []
    for group in (1, 7 * size, averaging.GROUP_SIZE):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(averaging, "GROUP_SIZE", group)
            sums.append(masked_mean(torch.zeros(size), sent, a))
    torch.testing.assert_close(sums[1], sums[0], rtol=2e-7, atol=1e-9)
    torch.testing.assert_close(sums[2], sums[0], rtol=2e-7, atol=1e-9)


def test_small_uploads_before_one_with_a_mask_are_in_the_sum():
    w = [torch.full((4,), float(v)) for v in (1, 2, 6)]
    masked = torch.tensor([True, True, False, False])
    got = masked_mean(torch.zeros(4), zip(w, (None, None, masked), strict=True), [1.0] * 3)
    assert got.tolist() == [3, 3, 1.5, 1.5]


@every_rule
@given(rounds(), st.integers(1, 40))
def test_how_many_are_added_up_together_changes_no_bit(rule, drawn, numbers):
    several = drawn.new(rule)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedp3.server.grouping.GROUP_SIZE", numbers)
        assert same(drawn.new(rule), several)


@given(rounds())
def test_weighted_is_simple_where_all_train_equally_many_layers(drawn):
    # The same set for all, so that |L_i| is equal; masks may still differ.
    if drawn.who:
        plan = dict(drawn.who[0].plan.layers)
        sent = [{**drawn.W, **c.update.tensors} for c in drawn.who]
        who = [
            contribution(c.client, V, drawn.layers, plan, c.masks)
            for c, V in zip(drawn.who, sent, strict=True)
        ]
        assert same(drawn.new("weighted", who), drawn.new("simple", who))


LAYERS = toy_map({"a": ((1,),), "b": ((1,),), "c": ((1,),), "head": ((1,),)})
ZERO = {n: torch.zeros(1) for n in LAYERS.shapes}


def uploads(
    sizes: Sequence[int], values: Sequence[float], m: Sequence[int] | None = None
) -> list[AcceptedUpdate]:
    """Client i uploads the last `sizes[i]` of four layers, all filled with `values[i]`."""
    out = []
    for i, (k, v) in enumerate(zip(sizes, values, strict=True)):
        plan = {
            l: LayerPlan(upload="all" if j >= 4 - k else "none")
            for j, l in enumerate(LAYERS.layers)
        }
        V = {n: torch.full((1,), v) for n in LAYERS.shapes}
        out.append(contribution(i, V, LAYERS, plan, Masks(), m[i] if m else 1))
    return out


def head_of(rule: str, who: Sequence[AcceptedUpdate], **how: float) -> float:
    return float(aggregate(ZERO, who, spec_of(LAYERS), rule, **how)["head.0"])


def test_weighted_counts_lowerb_opu2_opu3_as_two_three_four():
    who = uploads([2, 3, 4], [1.0, 10.0, 100.0])
    assert head_of("weighted", who) == pytest.approx((2 * 1 + 3 * 10 + 4 * 100) / 9)
    # "c" was sent by all three, "b" by two, "a" by one: each is normalised over its own senders
    new = aggregate(ZERO, who, spec_of(LAYERS), "weighted")
    assert [float(new[f"{l}.0"]) for l in "abc"] == pytest.approx([100.0, 430 / 7, 432 / 9])


def test_the_printed_normaliser_would_shrink_the_model_and_ours_does_not():
    """Erratum A9: |L_i| over the sum of all n clients, whether they sent the layer or not."""
    who = uploads([2, 2, 3, 4], [1.0, 1.0, 1.0, 1.0])
    printed = sum(len(c.plan.uploaded) for c in who if "b" in c.plan.uploaded) / sum(
        len(c.plan.uploaded) for c in who
    )
    assert printed < 0.7
    assert float(aggregate(ZERO, who, spec_of(LAYERS), "weighted")["b.0"]) == 1.0


def test_examples_weighs_by_the_number_of_samples():
    assert head_of("examples", uploads([4, 4], [0.0, 1.0], [30, 10])) == 0.25


def test_distance_trusts_the_near_more_and_large_tau_makes_all_equal():
    who = uploads([1, 1], [0.1, 1.0])
    near = math.exp(0.9)  # e^{-0.1} / e^{-1}
    assert head_of("distance", who, tau=1.0) == pytest.approx(
        (0.1 * near + 1.0) / (near + 1), rel=1e-6
    )
    assert head_of("distance", who, tau=1e9) == pytest.approx(0.55, rel=1e-6)
    assert head_of("distance", who, tau=1e-3) == pytest.approx(0.1, rel=1e-6)


def test_distance_counts_only_the_coordinates_that_a_client_was_sent():
    """Both moved by one where they could; the second retains half of the tensor only."""
    layers = toy_map({"head": ((2,),)})
    W = {"head.0": torch.full((2,), 100.0)}
    half, pruned = (
        Masks(weights={"head.0": torch.tensor([True, False])}),
        LayerPlan(send="pruned", keep=0.5, train=True, upload="retained"),
    )
    sent = [
        contribution(
            0, {"head.0": torch.tensor([101.0, 100.0])}, layers, {"head": LayerPlan()}, Masks()
        ),
        contribution(1, {"head.0": torch.tensor([99.0, 0.0])}, layers, {"head": pruned}, half),
    ]
    new = aggregate(W, sent, spec_of(layers), "distance")
    assert new["head.0"].tolist() == [100.0, 100.0]


@pytest.mark.parametrize("rule", ["distance", "attention"])
def test_a_client_gone_far_away_neither_ends_the_run_nor_moves_the_others(rule):
    who = uploads([1, 1], [0.5, 3e38])
    assert math.isfinite(head_of(rule, who))
    assert head_of("distance", who) == pytest.approx(0.5)
    assert head_of(rule, who[1:]) == pytest.approx(3e38, rel=1e-6)


def test_a_coordinate_that_only_a_far_client_sent_is_taken_from_it():
    layers = toy_map({"head": ((2,),)})
    left, right = (
        Masks(weights={"head.0": torch.tensor(m)}) for m in ([True, False], [False, True])
    )
    plan = {"head": LayerPlan(send="pruned", keep=0.5, train=True, upload="retained")}
    sent = [
        contribution(0, {"head.0": torch.tensor([0.1, 0.0])}, layers, plan, left),
        contribution(1, {"head.0": torch.tensor([0.0, 745.3])}, layers, plan, right),
    ]
    new = aggregate({"head.0": torch.zeros(2)}, sent, spec_of(layers), "distance")
    assert torch.equal(new["head.0"], torch.tensor([0.1, 745.3]))


def test_the_sum_of_large_uploads_does_not_overflow():
    assert head_of("simple", uploads([1, 1, 1], [3e38, 3e38, 3e38])) == pytest.approx(
        3e38, rel=1e-6
    )


@every_rule
def test_sums_that_would_depend_on_their_order_run_in_the_order_of_clients(rule):
    who = uploads([1, 1, 1], [1e25, 1.0, -1e25])
    tasks = [Task(t=0, plan=c.plan, weights={}) for c in who]
    orders = ([c.update for c in order] for order in itertools.permutations(who))
    examples = {0: 9, 1: 9, 2: 9}
    accepted = [judge(replies, tasks, spec_of(LAYERS), examples)[0] for replies in orders]
    assert len({head_of(rule, updates, tau=1e30) for updates in accepted}) == 1
    # the order matters: the same numbers sent by other clients do not add up to the same
    assert head_of("simple", uploads([1, 1, 1], [1e25, -1e25, 1.0])) != head_of("simple", who)


@every_rule
def test_the_number_of_threads_leaves_no_bit(rule):
    layers = toy_map({"head": ((400, 1000),)})
    rng = torch.Generator().manual_seed(0)
    ends = []
    W, *sent = ({"head.0": torch.randn(400, 1000, generator=rng)} for _ in range(7))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            aggregator = make_aggregator(AggregateSettings(rule=rule, tau=100), spec_of(layers))
            new, state = W, aggregator.init()
            for senders in (sent[:3], sent[3:]):
                who = [
                    contribution(i, V, layers, {"head": LayerPlan()}, Masks(), 1 + i)
                    for i, V in enumerate(senders)
                ]
                new, state = aggregator.apply(new, who, state)
            ends.append((new, aggregator.report(state)))
    finally:
        torch.set_num_threads(before)
    assert same(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]


def test_weights_that_are_no_weights_are_refused_with_layer_and_client():
    with pytest.raises(
        RunError, match=r"layer 'head', client 0: want a finite weight > 0, got 0.0"
    ):
        head_of("examples", uploads([1, 1], [1.0, 2.0], [0, 0]))


def test_an_unknown_rule_is_refused_with_a_suggestion():
    with pytest.raises(InputError, match="did you mean 'weighted'"):
        AGGREGATORS.pick("weigthed")
    with pytest.raises(ValidationError, match="did you mean 'weighted'"):
        AggregateSettings(rule="weigthed")


# --------------------------------------------------------------------------- structured masks


@given(
    st.integers(0, 1 << 20), st.sampled_from(("cnn", "batchnorm", "groupnorm")), st.integers(0, 4)
)
def test_blocks_of_units_are_averaged_like_the_masks_they_stand_for(seed, kind, clients):
    """Unit masks, rows and columns, against the same masks spelled out coordinate by coordinate."""
    here = world(kind)
    rng = torch.Generator().manual_seed(seed)
    W = {n: torch.randn(s, generator=rng) for n, s in here.layers.shapes.items()}
    plan = {
        l: LayerPlan(send="pruned", keep=0.5, train=True, upload="retained")
        for l in here.layers.layers
    }
    blocks, spelled = [], []
    for i in range(clients):
        units = {
            g: (torch.rand(u.units, generator=rng) < 0.7).nonzero().flatten()
            for g, u in here.layers.groups.items()
            if not u.fixed and torch.rand((), generator=rng) < 0.8
        }
        V = {n: torch.randn(s, generator=rng) for n, s in here.layers.shapes.items()}
        blocks.append(contribution(i, V, here.layers, plan, Masks(units=units)))
        masks = {
            n: M.as_bool(M.active(n, Masks(units=units), here.layers), s)
            for n, s in here.layers.shapes.items()
        }
        spelled.append(contribution(i, V, here.layers, plan, Masks(weights=masks)))
    one, other = (aggregate(W, who, spec_of(here.layers), "simple") for who in (blocks, spelled))
    assert all(torch.equal(one[n], other[n]) for n in W)
