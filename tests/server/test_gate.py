"""Every malformed reply is refused with its reason, and leaves no bit in the round."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedp3.client.context import RunSpec
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.core.settings import RunSettings
from fedp3.core.trees import flatten
from fedp3.core.types import (
    AcceptedUpdate,
    ClientUpdate,
    Failure,
    Params,
    Rejection,
    RejectionCode,
    Reply,
    Task,
)
from fedp3.models.layer_map import layer_map
from fedp3.planning.client_plans import PlanSettings
from fedp3.server import grouping
from fedp3.server.aggregators import AGGREGATORS, AggregateSettings
from fedp3.server.context import ServerContext, ServerState
from fedp3.server.gate import METRIC_LIMIT, GateResult
from fedp3.server.round_plans import plans_for
from fedp3.server.rounds import run_round
from worlds import judge, make_aggregator

T = 3  # the round all of this happens in
EXAMPLES = {0: 10, 1: 20, 2: 30, 3: 40}
VILLAIN = 1
NOTHING: Params = {}
EXTRAS: Params = {"statistics": torch.zeros(2)}  # the tensors of a method on the server


def _net() -> nn.Module:
    with layers_draw_from(stream(0, Stream.INIT)):
        return nn.Sequential(
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.ReLU(),
            nn.Linear(6, 5),
            nn.ReLU(),
            nn.Linear(5, 3),
        )


NET = _net()
LAYERS = layer_map(NET)
W: Params = {n: NET.state_dict()[n].clone() for n in LAYERS.shapes}


SPEC = RunSpec(layers=LAYERS, seed=3, rounds=50)


def server(rule: str = "simple") -> ServerContext:
    return ServerContext(
        spec=SPEC,
        plan=PlanSettings(layers="lowerb"),
        run=RunSettings(rounds=50, eval_every=0, seed=3, clients_per_round=0),
        aggregator=make_aggregator(AggregateSettings(rule=rule), SPEC),
        keep=(0.5,) * 4,
        examples=EXAMPLES,
    )


def honest(task: Task) -> ClientUpdate:
    """An upload near what was sent, different for every client."""
    rng = torch.Generator().manual_seed(task.plan.client)
    names = [n for l in task.plan.uploaded for n in LAYERS.layers[l]]
    tensors = {n: W[n] + 0.1 * torch.randn(W[n].shape, generator=rng) for n in names}
    i = task.plan.client
    return ClientUpdate(
        client=i,
        t=task.t,
        tensors=tensors,
        examples=EXAMPLES[i],
        metrics={"loss": 1.0 + i, "density": 1.0},
    )


def tasks() -> list[Task]:
    return [Task(t=T, plan=plan, weights=W) for plan in plans_for(server(), T)]


Judged = tuple[list[AcceptedUpdate], GateResult]


def judged(change: Callable[[ClientUpdate], Reply], extra: Params = NOTHING) -> Judged:
    sound = {t.plan.client: replace(honest(t), extra=extra) for t in tasks()}
    replies = [change(u) if i == VILLAIN else u for i, u in sound.items()]
    return judge(replies, tasks(), SPEC, EXAMPLES, extra)


# ------------------------------------------------------------------- the table of malformed replies


def tensor(
    change: Callable[[Tensor], Any], name: str = "5.weight"
) -> Callable[[ClientUpdate], ClientUpdate]:
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
    plan = next(task.plan for task in tasks() if task.plan.client == VILLAIN)
    name = LAYERS.layers[next(l for l in LAYERS.layers if l not in plan.uploaded)][0]
    return replace(u, tensors={**u.tensors, name: W[name]})


@dataclass(frozen=True)
class Malformed:
    change: Callable[[ClientUpdate], Reply]
    reason: str  # a regular expression
    extra: Params = field(default_factory=dict)  # the tensors of a method on the server


HOSTILE = (
    "</script><script>alert(1)</script>",
    "../../etc/passwd",
    "a\x00b\n\x1b[31m",
    "x" * 10_000_000,
    "",
    "ﷺ",
)
MALFORMED: dict[str, Malformed] = {
    # faults 13 to 18: tensors
    "NaN": Malformed(tensor(at_one_place(math.nan)), "tensor '5.weight' holds NaN or infinity"),
    "infinity": Malformed(
        tensor(at_one_place(math.inf)), "tensor '5.weight' holds NaN or infinity"
    ),
    "infinities that cancel": Malformed(
        tensor(
            lambda w: at_one_place(math.inf)(w) + torch.where(torch.eye(3, 5) > 0, -math.inf, 0.0)
        ),
        "holds NaN or infinity",
    ),
    "NaN where a sum overflows": Malformed(
        tensor(lambda w: at_one_place(math.nan)(torch.full_like(w, 3e38))), "holds NaN or infinity"
    ),
    "transposed": Malformed(
        tensor(lambda w: w.T), r"tensor '5.weight' has shape \(5, 3\), want \(3, 5\)"
    ),
    "flat": Malformed(tensor(torch.flatten), r"has shape \(15,\), want \(3, 5\)"),
    "a scalar": Malformed(tensor(lambda w: w.sum()), r"has shape \(\), want"),
    "empty": Malformed(tensor(lambda w: w[:0]), r"has shape \(0, 5\), want"),
    "broadcastable": Malformed(tensor(lambda w: w[:1]), r"has shape \(1, 5\), want"),
    "endless sides": Malformed(
        tensor(lambda w: w.view(3, 5, *[1] * 60)), r"has shape \(3, 5, .{1,80}, want \(3, 5\)"
    ),
    "float64": Malformed(tensor(lambda w: w.double()), "has type torch.float64, want float32"),
    "float16": Malformed(tensor(lambda w: w.half()), "has type torch.float16, want float32"),
    "integers": Malformed(tensor(lambda w: w.long()), "has type torch.int64, want float32"),
    "complex": Malformed(
        tensor(lambda w: w.to(torch.complex64)), "has type torch.complex64, want float32"
    ),
    "booleans": Malformed(tensor(lambda w: w > 0), "has type torch.bool, want float32"),
    "an array": Malformed(tensor(lambda w: w.numpy()), "has type float32, want float32"),
    "a list": Malformed(tensor(lambda w: w.tolist()), "has type list, want float32"),
    "nothing": Malformed(tensor(lambda w: None), "has type NoneType, want float32"),
    "sparse": Malformed(tensor(lambda w: w.to_sparse()), "is not a dense tensor in memory"),
    "without memory": Malformed(tensor(lambda w: w.to("meta")), "is not a dense tensor in memory"),
    "unknown tensor": Malformed(
        with_tensor("7.weight", torch.ones(2)), "unknown tensor '7.weight'"
    ),
    "a name that is no text": Malformed(with_tensor(7, torch.ones(2)), "unknown tensor '7'"),
    "not in its plan": Malformed(somebody_elses_layer, r"tensor '.*' is not in its plan"),
    "a missing tensor": Malformed(without("5.bias"), "tensor '5.bias' is missing"),
    "no tensors": Malformed(
        lambda u: replace(u, tensors={}), r"tensor '.*' and \d more is missing"
    ),
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
    "the last round": Malformed(
        lambda u: replace(u, t=T - 1), f"stale: answers round {T - 1} in round {T}"
    ),
    "the next round": Malformed(
        lambda u: replace(u, t=T + 1), f"stale: answers round {T + 1} in round {T}"
    ),
    "no round": Malformed(lambda u: replace(u, t=None), "stale: answers round a NoneType"),
    "a huge round": Malformed(
        lambda u: replace(u, t=10**9000), "stale: answers round a huge number"
    ),
    # a method's own tensors
    "unknown extra": Malformed(with_extra({"backdoor": torch.ones(1)}), "unknown extra 'backdoor'"),
    "extra nobody expects": Malformed(with_extra({"statistics": torch.ones(1)}), "unknown extra"),
    "one extra too many": Malformed(
        lambda u: replace(u, extra={**u.extra, "backdoor": torch.ones(1)}),
        "unknown extra 'backdoor'",
        EXTRAS,
    ),
    "a missing extra": Malformed(with_extra({}), "extra 'statistics' is missing", EXTRAS),
    "oversized extra": Malformed(
        with_extra({"statistics": torch.zeros(3)}),
        r"extra 'statistics' has shape \(3,\), want \(2,\)",
        EXTRAS,
    ),
    "NaN extra": Malformed(
        with_extra({"statistics": torch.tensor([1, math.nan])}),
        "extra 'statistics' holds NaN",
        EXTRAS,
    ),
    "wide extra": Malformed(
        with_extra({"statistics": torch.ones(2).double()}),
        "extra 'statistics' has type torch.float64",
        EXTRAS,
    ),
    "extra that is no tensor": Malformed(
        with_extra({"statistics": [1.0]}), "extra 'statistics' has type list", EXTRAS
    ),
    **{
        f"hostile extra name {i}": Malformed(with_extra({n: torch.ones(1)}), "unknown extra ")
        for i, n in enumerate(HOSTILE)
    },
    # fault 30: metrics
    "a million metrics": Malformed(a_million_metrics, "1000000 metrics, at most"),
    "a metric too many": Malformed(
        with_metrics(dict.fromkeys(map(str, range(METRIC_LIMIT + 1)), 1.0)), "metrics, at most"
    ),
    "text as metric": Malformed(
        with_metrics({"loss": "</script>"}), "metric 'loss' is not a finite number"
    ),
    "nested metric": Malformed(
        with_metrics({"loss": {"loss": 1.0}}), "metric 'loss' is not a finite number"
    ),
    "no metric": Malformed(with_metrics({"loss": None}), "metric 'loss' is not a finite number"),
    "tensor as metric": Malformed(
        with_metrics({"loss": torch.ones(1)}), "metric 'loss' is not a finite number"
    ),
    "NaN metric": Malformed(
        with_metrics({"loss": math.nan}), "metric 'loss' is not a finite number"
    ),
    "infinite metric": Malformed(
        with_metrics({"loss": -math.inf}), "metric 'loss' is not a finite number"
    ),
    "metric whose sum would overflow": Malformed(
        with_metrics({"loss": 1.7e308}), "metric 'loss' is not a finite number"
    ),
    "huge metric": Malformed(
        with_metrics({"loss": 10**9000}), "metric 'loss' is not a finite number"
    ),
    **{
        f"hostile metric name {i}": Malformed(with_metrics({n: math.nan}), "metric ")
        for i, n in enumerate(HOSTILE)
    },
    # faults 1 and 4, as an engine reports them
    "a failure": Malformed(
        lambda u: Failure(client=u.client, t=T, reason="MemoryError: (_train, line 9)"),
        "MemoryError",
    ),
}
every_malformed = pytest.mark.parametrize("bad", MALFORMED.values(), ids=MALFORMED.keys())


@pytest.mark.parametrize("numbers", [grouping.GROUP_SIZE, 1], ids=["in groups", "one by one"])
@every_malformed
def test_a_malformed_reply_is_refused_with_its_reason(
    bad: Malformed, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouping, "GROUP_SIZE", numbers)
    accepted, result = judged(bad.change, bad.extra)
    assert [u.client for u in accepted] == [u.client for u in result.accepted] == [0, 2, 3]
    assert list(result.rejected) == [VILLAIN] and result.late == []
    rejection = result.rejected[VILLAIN]
    assert re.search(bad.reason, rejection.text), rejection.text
    assert len(rejection.text) < 200 and rejection.text.isprintable(), (
        "a client's text is cut short and escaped"
    )
    assert rejection.code is code_of(rejection.text)


def code_of(text: str) -> RejectionCode:
    """The code that goes with a text."""
    if text.startswith("stale"):
        return RejectionCode.STALE
    if "NaN or infinity" in text or "is not a finite number" in text:
        return RejectionCode.NOT_FINITE
    return RejectionCode.FAILED if "MemoryError" in text else RejectionCode.MALFORMED


def same(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[n].view(torch.int32), b[n].view(torch.int32)) for n in a
    )


@pytest.mark.parametrize("rule", AGGREGATORS)
@pytest.mark.parametrize(
    "bad",
    [bad for bad in MALFORMED.values() if not bad.extra],
    ids=lambda bad: bad.reason[:24],
)
def test_the_round_is_bit_equal_to_the_one_without_that_client(bad: Malformed, rule: str) -> None:
    """Under every rule, through a complete round of the server."""
    context = server(rule)
    start = ServerState(t=T, W=W, aggregator=context.aggregator.init())

    def hostile(tasks: Sequence[Task]) -> list[Reply]:
        return [bad.change(honest(t)) if t.plan.client == VILLAIN else honest(t) for t in tasks]

    def silent(tasks: Sequence[Task]) -> list[Reply]:
        return [honest(t) for t in tasks if t.plan.client != VILLAIN]

    new, record = run_round(context, start, hostile)
    want, clean = run_round(context, start, silent)
    assert same(new.W, want.W) and not same(new.W, W)
    plain, tensors = flatten(new.aggregator, "")
    wanted_plain, wanted_tensors = flatten(want.aggregator, "")
    assert plain == wanted_plain and same(tensors, wanted_tensors) and new.seen == want.seen
    assert list(record.rejected) == [VILLAIN] and record.accepted == clean.accepted == (0, 2, 3)
    assert (record.loss, record.density, record.bytes_up) == (
        clean.loss,
        clean.density,
        clean.bytes_up,
    )


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
def test_a_sound_reply_is_accepted(change: Callable[[ClientUpdate], ClientUpdate]) -> None:
    for extra in (NOTHING, EXTRAS):
        accepted, result = judged(change, extra)
        assert [u.client for u in accepted] == [0, 1, 2, 3] and not result.rejected


# --------------------------------------------------------------------------- who replies, how often


def test_a_client_that_answers_twice_counts_once() -> None:
    first, again = honest(tasks()[VILLAIN]), replace(honest(tasks()[VILLAIN]), examples=1)
    accepted, result = judge([*map(honest, tasks()), again], tasks(), SPEC, EXAMPLES)
    assert [u.client for u in accepted] == [0, 1, 2, 3]
    assert accepted[VILLAIN].update.examples == first.examples
    duplicate = Rejection(RejectionCode.DUPLICATE, "answered twice; the first answer counts")
    assert result.rejected == {VILLAIN: duplicate}


def test_a_refused_answer_does_not_bar_a_sound_one() -> None:
    late = replace(honest(tasks()[VILLAIN]), t=T - 1)
    accepted, result = judge([late, *map(honest, tasks())], tasks(), SPEC, EXAMPLES)
    assert [u.client for u in accepted] == [0, 1, 2, 3]
    assert result.rejected[VILLAIN].code is RejectionCode.STALE


def test_a_reply_of_a_client_without_a_task_is_refused() -> None:
    stranger = replace(honest(tasks()[VILLAIN]), client=9)
    examples = {**EXAMPLES, 9: 20}
    accepted, result = judge([stranger, *map(honest, tasks())], tasks(), SPEC, examples)
    assert [u.client for u in accepted] == [0, 1, 2, 3]
    assert [r.code for r in result.rejected.values()] == [RejectionCode.UNASKED]
    assert list(result.rejected) == [9]


def test_a_client_known_for_no_examples_is_refused() -> None:
    _, result = judge(map(honest, tasks()), tasks(), SPEC, {0: 10, 2: 30, 3: 40})
    text = "claims 20 as its number of examples, registered 0"
    assert result.rejected == {VILLAIN: Rejection(RejectionCode.MALFORMED, text)}


def test_late_clients_are_counted_apart_from_refused_ones() -> None:
    replies: list[Reply] = [
        Failure(client=3, t=T, reason="over the deadline", late=True),
        Failure(client=0, t=T, reason="over it", late=True),
    ]
    accepted, result = judge([*replies, honest(tasks()[2])], tasks(), SPEC, EXAMPLES)
    assert sorted(result.late) == [0, 3] and not result.rejected
    assert [u.client for u in accepted] == [2]


def test_accepted_updates_come_in_client_order_whatever_the_order_of_replies() -> None:
    for order in ([3, 1, 0, 2], [0, 1, 2, 3], [2, 0, 3, 1]):
        accepted, _ = judge([honest(tasks()[i]) for i in order], tasks(), SPEC, EXAMPLES)
        assert [u.client for u in accepted] == [0, 1, 2, 3]
        assert all(u.plan.client == u.update.client for u in accepted)


def test_an_accepted_update_is_recorded_without_its_tensors() -> None:
    accepted, result = judge(map(honest, tasks()), tasks(), SPEC, EXAMPLES)
    assert all(u.update.tensors for u in accepted)
    assert not any(u.update.tensors for u in result.accepted), "they would fill the memory"
