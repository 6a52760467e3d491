"""Every malformed reply is refused with its reason, and the round is bit-equal to the one without that client."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedp3 import handful
from fedp3.aggregate import RULES, Aggregation
from fedp3.gate import METRIC_LIMIT, NOTHING, Brought, Verdict
from fedp3.layermap import layer_map
from fedp3.plan import PlanRules
from fedp3.rng import Use, layers_draw_from, stream
from fedp3.server import Problem, ServerState, plans_for, run_round
from fedp3.types import ClientUpdate, Failure, Params, Pruning, Reply, Task
from worlds import judge

T = 3  # the round all of this happens in
EXAMPLES = {0: 10, 1: 20, 2: 30, 3: 40}
VILLAIN = 1
EXTRAS = Brought({"statistics": (2,)})


def _net() -> nn.Module:
    with layers_draw_from(stream(0, Use.INIT)):
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


NET = _net()
LAYERS = layer_map(NET)
W: Params = {n: NET.state_dict()[n].clone() for n in LAYERS.shapes}


def problem(rule: str = "simple") -> Problem:
    return Problem(
        LAYERS, PlanRules("lowerb"), Pruning(), Aggregation(rule), (0.5,) * 4, EXAMPLES, rounds=50, eval_every=0, seed=3
    )


def honest(task: Task) -> ClientUpdate:
    """An upload near what was sent, different for every client."""
    rng = torch.Generator().manual_seed(task.plan.client)
    names = [n for l in task.plan.uploaded for n in LAYERS.layers[l]]
    tensors = {n: W[n] + 0.1 * torch.randn(W[n].shape, generator=rng) for n in names}
    i = task.plan.client
    return ClientUpdate(i, task.t, tensors, EXAMPLES[i], {"loss": 1.0 + i, "density": 1.0})


def tasks() -> list[Task]:
    return [Task(T, plan, W) for plan in plans_for(problem(), T)]


def judged(change: Callable[[ClientUpdate], Reply], brought: Brought = NOTHING) -> Verdict:
    extra = {n: torch.zeros(shape) for n, shape in brought.extras.items()}
    sound = {t.plan.client: replace(honest(t), extra=extra) for t in tasks()}
    replies = [change(u) if i == VILLAIN else u for i, u in sound.items()]
    return judge(replies, tasks(), LAYERS, EXAMPLES, brought)


# --------------------------------------------------------------------------- the table of malformed replies


def tensor(change: Callable[[Tensor], Any], name: str = "5.weight") -> Callable[[ClientUpdate], ClientUpdate]:
    return lambda u: replace(u, tensors={**u.tensors, name: change(u.tensors[name])})


def at_one_place(value: float) -> Callable[[Tensor], Tensor]:
    def put(w: Tensor) -> Tensor:
        w = w.clone()
        w[-1, -1] = value
        return w

    return put


def with_tensor(name: Any, w: Tensor) -> Callable[[ClientUpdate], ClientUpdate]:
    return lambda u: replace(u, tensors={**u.tensors, name: w})


def without(name: str) -> Callable[[ClientUpdate], ClientUpdate]:
    return lambda u: replace(u, tensors={n: w for n, w in u.tensors.items() if n != name})


def claiming(examples: Any) -> Callable[[ClientUpdate], ClientUpdate]:
    return lambda u: replace(u, examples=examples)


def with_extra(extra: Mapping[Any, Any]) -> Callable[[ClientUpdate], ClientUpdate]:
    return lambda u: replace(u, extra=extra)


def with_metrics(metrics: Mapping[Any, Any]) -> Callable[[ClientUpdate], ClientUpdate]:
    return lambda u: replace(u, metrics=metrics)


def a_million_metrics(u: ClientUpdate) -> ClientUpdate:
    return replace(u, metrics=dict.fromkeys(range(1_000_000), 1.0))


def somebody_elses_layer(u: ClientUpdate) -> ClientUpdate:
    own = next(task.plan for task in tasks() if task.plan.client == VILLAIN)
    name = LAYERS.layers[next(l for l in LAYERS.layers if l not in own.uploaded)][0]
    return replace(u, tensors={**u.tensors, name: W[name]})


@dataclass(frozen=True)
class Malformed:
    change: Callable[[ClientUpdate], Reply]
    reason: str  # a regular expression
    brought: Brought = NOTHING


HOSTILE = ("</script><script>alert(1)</script>", "../../etc/passwd", "a\x00b\n\x1b[31m", "x" * 10_000_000, "", "ﷺ")
MALFORMED: dict[str, Malformed] = {
    # faults 13 to 18: tensors
    "NaN": Malformed(tensor(at_one_place(math.nan)), "tensor '5.weight' holds NaN or infinity"),
    "infinity": Malformed(tensor(at_one_place(math.inf)), "tensor '5.weight' holds NaN or infinity"),
    "infinities that cancel": Malformed(
        tensor(lambda w: at_one_place(math.inf)(w) + torch.where(torch.eye(3, 5) > 0, -math.inf, 0.0)),
        "holds NaN or infinity",
    ),
    "NaN where a sum overflows": Malformed(
        tensor(lambda w: at_one_place(math.nan)(torch.full_like(w, 3e38))), "holds NaN or infinity"
    ),
    "transposed": Malformed(tensor(lambda w: w.T), r"tensor '5.weight' has shape \(5, 3\), want \(3, 5\)"),
    "flat": Malformed(tensor(torch.flatten), r"has shape \(15,\), want \(3, 5\)"),
    "a scalar": Malformed(tensor(lambda w: w.sum()), r"has shape \(\), want"),
    "empty": Malformed(tensor(lambda w: w[:0]), r"has shape \(0, 5\), want"),
    "broadcastable": Malformed(tensor(lambda w: w[:1]), r"has shape \(1, 5\), want"),
    "endless sides": Malformed(tensor(lambda w: w.view(3, 5, *[1] * 60)), r"has shape \(3, 5, .{1,80}, want \(3, 5\)"),
    "float64": Malformed(tensor(lambda w: w.double()), "has type torch.float64, want float32"),
    "float16": Malformed(tensor(lambda w: w.half()), "has type torch.float16, want float32"),
    "integers": Malformed(tensor(lambda w: w.long()), "has type torch.int64, want float32"),
    "complex": Malformed(tensor(lambda w: w.to(torch.complex64)), "has type torch.complex64, want float32"),
    "booleans": Malformed(tensor(lambda w: w > 0), "has type torch.bool, want float32"),
    "an array": Malformed(tensor(lambda w: w.numpy()), "has type float32, want float32"),
    "a list": Malformed(tensor(lambda w: w.tolist()), "has type list, want float32"),
    "nothing": Malformed(tensor(lambda w: None), "has type NoneType, want float32"),
    "sparse": Malformed(tensor(lambda w: w.to_sparse()), "is not a dense tensor in memory"),
    "without memory": Malformed(tensor(lambda w: w.to("meta")), "is not a dense tensor in memory"),
    "unknown tensor": Malformed(with_tensor("7.weight", torch.ones(2)), "unknown tensor '7.weight'"),
    "a name that is no text": Malformed(with_tensor(7, torch.ones(2)), "unknown tensor '7'"),
    "not in its plan": Malformed(somebody_elses_layer, r"tensor '.*' is not in its plan"),
    "a missing tensor": Malformed(without("5.bias"), "tensor '5.bias' is missing"),
    "no tensors": Malformed(lambda u: replace(u, tensors={}), r"tensor '.*' and \d more is missing"),
    **{
        f"hostile tensor name {i}": Malformed(with_tensor(n, torch.ones(2)), "unknown tensor ")
        for i, n in enumerate(HOSTILE)
    },
    # fault 20: examples
    "negative": Malformed(claiming(-1), "claims -1 as its number of examples, registered 20"),
    "zero": Malformed(claiming(0), "claims 0 as its"),
    "one too many": Malformed(claiming(21), "claims 21 as its"),
    "1e18": Malformed(claiming(10**18), "claims 1000000000000000000 as its"),
    "too long to print": Malformed(claiming(10**9000), "claims a huge number as its"),
    "NaN examples": Malformed(claiming(math.nan), "claims nan as its"),
    "a fraction": Malformed(claiming(19.5), "claims 19.5 as its"),
    "a float": Malformed(claiming(20.0), "claims 20.0 as its"),
    "text": Malformed(claiming("20"), "claims '20' as its"),
    "long text": Malformed(claiming("9" * 10_000_000), "claims '9+"),
    "a truth": Malformed(claiming(True), "claims True as its"),
    "no number": Malformed(claiming(None), "claims a NoneType as its"),
    "numbers": Malformed(claiming([[[20]]]), "claims a list as its"),
    # faults 5 and 25: rounds
    "the last round": Malformed(lambda u: replace(u, t=T - 1), f"stale: answers round {T - 1} in round {T}"),
    "the next round": Malformed(lambda u: replace(u, t=T + 1), f"stale: answers round {T + 1} in round {T}"),
    "no round": Malformed(lambda u: replace(u, t=None), "stale: answers round a NoneType"),
    "a huge round": Malformed(lambda u: replace(u, t=10**9000), "stale: answers round a huge number"),
    # a method's own tensors
    "unknown extra": Malformed(with_extra({"backdoor": torch.ones(1)}), "unknown extra 'backdoor'"),
    "extra nobody expects": Malformed(with_extra({"statistics": torch.ones(1)}), "unknown extra"),
    "one extra too many": Malformed(
        lambda u: replace(u, extra={**u.extra, "backdoor": torch.ones(1)}), "unknown extra 'backdoor'", EXTRAS
    ),
    "a missing extra": Malformed(with_extra({}), "extra 'statistics' is missing", EXTRAS),
    "oversized extra": Malformed(
        with_extra({"statistics": torch.zeros(3)}), r"extra 'statistics' has shape \(3,\), want \(2,\)", EXTRAS
    ),
    "NaN extra": Malformed(
        with_extra({"statistics": torch.tensor([1, math.nan])}), "extra 'statistics' holds NaN", EXTRAS
    ),
    "wide extra": Malformed(
        with_extra({"statistics": torch.ones(2).double()}), "extra 'statistics' has type torch.float64", EXTRAS
    ),
    "extra that is no tensor": Malformed(with_extra({"statistics": [1.0]}), "extra 'statistics' has type list", EXTRAS),
    **{
        f"hostile extra name {i}": Malformed(with_extra({n: torch.ones(1)}), "unknown extra ")
        for i, n in enumerate(HOSTILE)
    },
    # fault 30: metrics
    "a million metrics": Malformed(a_million_metrics, "1000000 metrics, at most"),
    "a metric too many": Malformed(
        with_metrics(dict.fromkeys(map(str, range(METRIC_LIMIT + 1)), 1.0)), "metrics, at most"
    ),
    "text as metric": Malformed(with_metrics({"loss": "</script>"}), "metric 'loss' is not a finite number"),
    "nested metric": Malformed(with_metrics({"loss": {"loss": 1.0}}), "metric 'loss' is not a finite number"),
    "no metric": Malformed(with_metrics({"loss": None}), "metric 'loss' is not a finite number"),
    "tensor as metric": Malformed(with_metrics({"loss": torch.ones(1)}), "metric 'loss' is not a finite number"),
    "NaN metric": Malformed(with_metrics({"loss": math.nan}), "metric 'loss' is not a finite number"),
    "infinite metric": Malformed(with_metrics({"loss": -math.inf}), "metric 'loss' is not a finite number"),
    "metric whose sum would overflow": Malformed(
        with_metrics({"loss": 1.7e308}), "metric 'loss' is not a finite number"
    ),
    "huge metric": Malformed(with_metrics({"loss": 10**9000}), "metric 'loss' is not a finite number"),
    **{f"hostile metric name {i}": Malformed(with_metrics({n: math.nan}), "metric ") for i, n in enumerate(HOSTILE)},
    # faults 1 and 4, as an engine reports them
    "a failure": Malformed(lambda u: Failure(u.client, T, "MemoryError: (_train, line 9)"), "MemoryError"),
}
every_malformed = pytest.mark.parametrize("bad", MALFORMED.values(), ids=MALFORMED.keys())


@pytest.mark.parametrize("numbers", [handful.HANDFUL, 1], ids=["looked through together", "each alone"])
@every_malformed
def test_a_malformed_reply_is_refused_with_its_reason(
    bad: Malformed, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handful, "HANDFUL", numbers)
    verdict = judged(bad.change, bad.brought)
    assert [c.client for c in verdict.accepted] == [0, 2, 3]
    assert list(verdict.rejected) == [VILLAIN] and verdict.late == ()
    reason = verdict.rejected[VILLAIN]
    assert re.search(bad.reason, reason), reason
    assert len(reason) < 200 and reason.isprintable(), "a client's words are cut short and escaped"


def same(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n].view(torch.int32), b[n].view(torch.int32)) for n in a)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "bad", [bad for bad in MALFORMED.values() if bad.brought == NOTHING], ids=lambda bad: bad.reason[:24]
)
def test_the_round_is_bit_equal_to_the_one_without_that_client(bad: Malformed, rule: str) -> None:
    """Under every rule, through the whole of the server's round."""
    begun = ServerState(T, W)

    def hostile(asked: Sequence[Task]) -> list[Reply]:
        return [bad.change(honest(t)) if t.plan.client == VILLAIN else honest(t) for t in asked]

    def silent(asked: Sequence[Task]) -> list[Reply]:
        return [honest(t) for t in asked if t.plan.client != VILLAIN]

    new, record = run_round(problem(rule), begun, hostile)
    want, clean = run_round(problem(rule), begun, silent)
    assert same(new.W, want.W) and not same(new.W, W)
    assert new.memory.logits == want.memory.logits and new.seen == want.seen
    assert list(record.rejected) == [VILLAIN] and record.accepted == clean.accepted == (0, 2, 3)
    assert (record.loss, record.density, record.bytes_up) == (clean.loss, clean.density, clean.bytes_up)


# --------------------------------------------------------------------------- what is taken

TAKEN: dict[str, Callable[[ClientUpdate], ClientUpdate]] = {
    "an honest reply": lambda u: u,
    "finite numbers whose sum overflows": tensor(lambda w: torch.full_like(w, 3e38)),
    "finite numbers whose partial sums cancel to NaN": tensor(
        lambda w: torch.full_like(w, 3e38) * torch.tensor([1.0, -1, 1, 1, -1])
    ),
    "negative zero and the smallest number": tensor(lambda w: torch.full_like(w, -0.0) + 1e-45),
    "a tensor that is not contiguous": tensor(lambda w: w.T.contiguous().T),
    "one example": claiming(1),
    "all it registered": claiming(EXAMPLES[VILLAIN]),
    "no metrics": with_metrics({}),
    "as many metrics as are taken": with_metrics(dict.fromkeys(map(str, range(METRIC_LIMIT)), 1)),
}


@pytest.mark.parametrize("change", TAKEN.values(), ids=TAKEN.keys())
def test_a_sound_reply_is_taken(change: Callable[[ClientUpdate], ClientUpdate]) -> None:
    for brought in (NOTHING, EXTRAS):
        verdict = judged(change, brought)
        assert [c.client for c in verdict.accepted] == [0, 1, 2, 3] and not verdict.rejected


# --------------------------------------------------------------------------- who answers, and how often


def test_a_client_that_answers_twice_counts_once() -> None:
    first, again = honest(tasks()[VILLAIN]), replace(honest(tasks()[VILLAIN]), examples=1)
    verdict = judge([*map(honest, tasks()), again], tasks(), LAYERS, EXAMPLES)
    assert [c.client for c in verdict.accepted] == [0, 1, 2, 3]
    assert verdict.accepted[VILLAIN].update.examples == first.examples
    assert verdict.rejected == {VILLAIN: "answered twice; the first answer counts"}


def test_a_refused_answer_does_not_bar_a_sound_one() -> None:
    late = replace(honest(tasks()[VILLAIN]), t=T - 1)
    verdict = judge([late, *map(honest, tasks())], tasks(), LAYERS, EXAMPLES)
    assert [c.client for c in verdict.accepted] == [0, 1, 2, 3]
    assert verdict.rejected[VILLAIN].startswith("stale")


def test_who_was_not_asked_is_not_heard() -> None:
    stranger = replace(honest(tasks()[VILLAIN]), client=9)
    verdict = judge([stranger, *map(honest, tasks())], tasks(), LAYERS, {**EXAMPLES, 9: 20})
    assert [c.client for c in verdict.accepted] == [0, 1, 2, 3]
    assert verdict.rejected == {9: "was not asked this round"}


def test_a_client_known_for_no_examples_is_refused() -> None:
    verdict = judge(map(honest, tasks()), tasks(), LAYERS, {0: 10, 2: 30, 3: 40})
    assert verdict.rejected == {VILLAIN: "claims 20 as its number of examples, registered 0"}


def test_late_clients_are_counted_apart_from_refused_ones() -> None:
    replies: list[Reply] = [Failure(3, T, "over the deadline", late=True), Failure(0, T, "over it", late=True)]
    verdict = judge([*replies, honest(tasks()[2])], tasks(), LAYERS, EXAMPLES)
    assert verdict.late == (0, 3) and not verdict.rejected and [c.client for c in verdict.accepted] == [2]


def test_accepted_updates_come_in_client_order_whatever_the_order_of_replies() -> None:
    for order in ([3, 1, 0, 2], [0, 1, 2, 3], [2, 0, 3, 1]):
        verdict = judge([honest(tasks()[i]) for i in order], tasks(), LAYERS, EXAMPLES)
        assert [c.client for c in verdict.accepted] == [0, 1, 2, 3]
        assert all(c.plan.client == c.update.client for c in verdict.accepted)
