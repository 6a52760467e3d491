"""What a reply must satisfy to be aggregated.

Every rejection has a code and a text, and the round continues without that client.  A rejected
reply leaves no trace: the aggregate equals that of a round in which the client had no task.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedp3.client.context import RunSpec
from fedp3.core.errors import type_of
from fedp3.core.memo import once_per_plan
from fedp3.core.types import (
    AcceptedUpdate,
    ClientPlan,
    ClientUpdate,
    Failure,
    LayerMap,
    Params,
    Rejection,
    RejectionCode,
    Reply,
    Task,
)
from fedp3.messages.compression import SCALE, coding_of, dtype_of, scales_of, unpack
from fedp3.server.grouping import group_updates

METRIC_LIMIT = 64  # metrics in one update
# the largest metric: no network computes a larger one, and a sum over clients could overflow
METRIC_MOST = torch.finfo(torch.float32).max
NUMBER = (int, float)  # a constant, since `int | float` would be built for every metric
NAME_LIMIT = 80  # characters of a client's text that a rejection repeats
NOT_FINITE = "holds NaN or infinity"


@dataclass(frozen=True, slots=True)
class ExpectedUpdate:
    """What an update under one plan must hold."""

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    extras: Mapping[str, tuple[int, ...]]


def expected_update(plan: ClientPlan, spec: RunSpec, extra: Params) -> ExpectedUpdate:
    """Names, shapes and types of the tensors in an update.

    Args:
        plan: the client's plan.
        spec: the run.
        extra: the tensors of the method's exchange on the server.
    """
    names = [n for l in plan.uploaded for n in spec.layers.layers[l]]
    coding = coding_of(plan, spec.compression)
    tensors = {n: (spec.layers.shapes[n], dtype_of(n, spec.layers, coding)) for n in names}
    exchanged = {n: tuple(w.shape) for n, w in extra.items()}
    scales = scales_of(plan, spec.layers, spec.compression)
    return ExpectedUpdate(tensors, {**exchanged, **scales})


@dataclass(slots=True)
class GateResult:
    """What became of the replies of one round; the gate fills it while updates pass through."""

    # in client order, without their tensors
    accepted: list[AcceptedUpdate] = field(default_factory=list)
    rejected: dict[int, Rejection] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)


def admit(
    replies: Iterable[Reply],
    tasks: Sequence[Task],
    spec: RunSpec,
    examples: Mapping[int, int],
    extra: Params,
    result: GateResult,
    started_from: Params | None = None,
) -> Iterator[AcceptedUpdate]:
    """The updates that count, unpacked, in client order and as early as that order allows.

    Args:
        replies: from the engine, in any order.
        tasks: the tasks of the round.
        spec: the run.
        examples: the number of training samples that each client registered.
        extra: the tensors of the method's exchange on the server.
        result: is filled with who was accepted, rejected and late.
        started_from: weights to which coded changes are added instead of those that were sent.
    """
    tasks_by_client = {task.plan.client: task for task in tasks}
    for accepted in _in_client_order(replies, tasks_by_client, spec, examples, extra, result):
        update = accepted.update
        task = tasks_by_client[accepted.client]
        unfed = spec.pruning.unfed_columns
        tensors = unpack(
            *(update.tensors, update.extra, task, spec.layers, unfed, spec.compression),
            started_from,
        )
        # a finite integer times a finite scale can be infinite
        if tensors is not update.tensors and not all_finite(tensors):
            text = f"what its compressed upload stands for {NOT_FINITE}"
            result.rejected[accepted.client] = Rejection(RejectionCode.NOT_FINITE, text)
            continue
        without_tensors = ClientUpdate(
            client=update.client,
            t=update.t,
            tensors={},
            examples=update.examples,
            metrics=update.metrics,
            extra={n: update.extra[n] for n in extra},
            bytes=update.bytes,
        )
        result.accepted.append(AcceptedUpdate(without_tensors, accepted.plan, accepted.masks))
        if tensors is update.tensors:
            yield accepted
        else:
            yield replace(accepted, update=replace(update, tensors=tensors))


def _in_client_order(
    replies: Iterable[Reply],
    tasks: Mapping[int, Task],
    spec: RunSpec,
    examples: Mapping[int, int],
    extra: Params,
    result: GateResult,
) -> Iterator[AcceptedUpdate]:
    """Yield each client's first valid update, in ascending order of clients.

    A failure that the engine reports is final.  After an invalid update, a later one of the same
    client can still be accepted, because the first may be a late reply to an earlier round.  The
    rejection stays in `result.rejected`, so that a client can be both accepted and rejected.
    """
    settled: dict[int, AcceptedUpdate | None] = {}
    order = deque(sorted(tasks))
    for reply, flaw in _examined(replies, tasks, spec, examples, extra):
        i = reply.client
        if i in settled:
            duplicate = Rejection(
                RejectionCode.DUPLICATE, "answered twice; the first answer counts"
            )
            result.rejected.setdefault(i, duplicate)
        elif isinstance(reply, Failure):
            settled[i] = None
            if reply.late:
                result.late.append(i)
            else:
                result.rejected.setdefault(i, Rejection(reply.code, reply.reason))
        elif flaw is not None:
            result.rejected.setdefault(i, flaw)
        else:
            settled[i] = AcceptedUpdate(reply, tasks[i].plan, tasks[i].masks)
        while order and order[0] in settled:
            ready = settled[order[0]]
            if ready is not None:
                yield ready
            settled[order.popleft()] = None  # frees the memory of the update
    for i in order:
        ready = settled.get(i)
        if ready is not None:
            yield ready


def _examined(
    replies: Iterable[Reply],
    tasks: Mapping[int, Task],
    spec: RunSpec,
    examples: Mapping[int, int],
    extra: Params,
) -> Iterator[tuple[Reply, Rejection | None]]:
    """Each reply with its flaw; small updates are examined in groups."""
    expected = once_per_plan(lambda plan: expected_update(plan, spec, extra))

    def formal_flaw(reply: Reply) -> Rejection | None:
        task = tasks.get(reply.client)
        if task is None:
            return Rejection(RejectionCode.UNASKED, "has no task in this round")
        if isinstance(reply, Failure):
            return None
        return _malformed(
            reply, task, expected(task.plan), examples.get(reply.client, 0), spec.layers
        )

    for group in group_updates(replies, spec.layers):
        flaws = [formal_flaw(reply) for reply in group]
        sound = [
            r
            for r, flaw in zip(group, flaws, strict=True)
            if flaw is None and isinstance(r, ClientUpdate)
        ]
        finite = _surely_finite(u.tensors for u in sound) and _surely_finite(u.extra for u in sound)
        for reply, flaw in zip(group, flaws, strict=True):
            if flaw is None and not finite and isinstance(reply, ClientUpdate):
                flaw = _not_finite(reply)
            yield reply, flaw


# --------------------------------------------------------------------------- form


def _malformed(
    update: ClientUpdate, task: Task, expected: ExpectedUpdate, examples: int, layers: LayerMap
) -> Rejection | None:
    if update.t != task.t:
        text = f"stale: answers round {_shown(update.t)} in round {task.t}"
        return Rejection(RejectionCode.STALE, text)
    text = _wrong_form(update, expected, examples, layers)
    return Rejection(RejectionCode.MALFORMED, text) if text else _wrong_metrics(update)


def _wrong_form(
    update: ClientUpdate, expected: ExpectedUpdate, examples: int, layers: LayerMap
) -> str:
    return (
        _wrong_count(update.examples, examples)
        or _wrong_names(update, expected, layers)
        or _wrong_tensors(update, expected)
        or _wrong_extra(update, expected.extras)
    )


def _wrong_count(claimed: object, registered: int) -> str:
    if not isinstance(claimed, int) or isinstance(claimed, bool) or not 1 <= claimed <= registered:
        return f"claims {_shown(claimed)} as its number of examples, registered {registered}"
    return ""


def _shown(value: object) -> str:
    """What a client sent in place of a number, cut short."""
    if isinstance(value, int) and abs(value) >= 1 << 63:  # Python refuses to print the longest ones
        return "a huge number"
    if isinstance(value, int | float | str):
        return repr(value)[:NAME_LIMIT]
    return type_of(value)


def _wrong_names(update: ClientUpdate, expected: ExpectedUpdate, layers: LayerMap) -> str:
    if update.tensors.keys() == expected.tensors.keys():
        return ""
    names = set(update.tensors)
    unknown = sorted(map(str, names - set(layers.shapes)))
    unplanned = sorted(map(str, names - set(expected.tensors)))
    missing = sorted(set(expected.tensors) - names)
    if unknown:
        return f"unknown tensor {_short(unknown)}"
    if unplanned:
        return f"tensor {_short(unplanned)} is not in its plan"
    return f"tensor {_short(missing)} is missing" if missing else ""


def _short(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return repr(names[0][:NAME_LIMIT]) + more


def _wrong_tensors(update: ClientUpdate, expected: ExpectedUpdate) -> str:
    for n, w in update.tensors.items():
        flaw = _unlike(w, *expected.tensors[n])
        if flaw:
            return f"tensor {n!r} {flaw}"
    return ""


def _unlike(w: object, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    if not isinstance(w, Tensor) or w.dtype != dtype:
        got, want = getattr(w, "dtype", type(w).__name__), str(dtype).removeprefix("torch.")
        return f"has type {got}, want {want}"
    if not w.is_cpu or w.layout != torch.strided:
        return "is not a dense tensor in memory"
    return "" if w.shape == shape else f"has shape {str(tuple(w.shape))[:NAME_LIMIT]}, want {shape}"


def _wrong_extra(update: ClientUpdate, extras: Mapping[str, tuple[int, ...]]) -> str:
    if update.extra.keys() != extras.keys():
        unknown = sorted(map(str, set(update.extra) - set(extras)))
        missing = sorted(set(extras) - set(update.extra))
        if unknown:
            return f"unknown extra {_short(unknown)}"
        return f"extra {_short(missing)} is missing"
    for n, w in update.extra.items():
        flaw = _unlike(w, extras[n], torch.float32)
        if flaw:
            return f"extra {n!r} {flaw}"
        if n.startswith(SCALE) and bool((w < 0).any()):
            return f"extra {n!r} is negative"
    return ""


def _wrong_metrics(update: ClientUpdate) -> Rejection | None:
    if len(update.metrics) > METRIC_LIMIT:
        text = f"{len(update.metrics)} metrics, at most {METRIC_LIMIT} are allowed"
        return Rejection(RejectionCode.MALFORMED, text)
    # NaN fails the comparison too.
    invalid = [
        str(k)
        for k, v in update.metrics.items()
        if not (isinstance(v, NUMBER) and abs(v) <= METRIC_MOST)
    ]
    if not invalid:
        return None
    return Rejection(RejectionCode.NOT_FINITE, f"metric {_short(invalid)} is not a finite number")


# --------------------------------------------------------------------------- values


def all_finite(tensors: Params) -> bool:
    """Whether no tensor holds NaN or infinity."""
    # A sum is faster; it is not finite only if a number is not, or if it overflows.
    return all(math.isfinite(float(w.sum())) or bool(w.isfinite().all()) for w in tensors.values())


def _surely_finite(updates: Iterable[Params]) -> bool:
    """Whether all numbers are finite, judged by their sums; False if a sum only overflows."""
    alike: dict[tuple[object, ...], list[Tensor]] = {}  # codes of equal tensors may differ
    for tensors in updates:
        for n, w in tensors.items():
            if w.is_floating_point():  # integers are finite
                alike.setdefault((n, w.shape, w.dtype), []).append(w)
    for rows in alike.values():
        stacked = torch.stack(rows) if len(rows) > 1 else rows[0]
        if not math.isfinite(float(stacked.sum())):
            return False
    return True


def _not_finite(update: ClientUpdate) -> Rejection | None:
    for kind, named in (("tensor", update.tensors), ("extra", update.extra)):
        invalid = [n for n, w in named.items() if not bool(torch.isfinite(w).all())]
        if invalid:
            return Rejection(RejectionCode.NOT_FINITE, f"{kind} {_short(invalid)} {NOT_FINITE}")
    return None
