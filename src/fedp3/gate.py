"""What a reply must satisfy to be aggregated.  Every refusal has a reason, and the round goes on without it.

A refused reply leaves no trace: the aggregate is bit-equal to that of a round in which the client was not asked.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedp3.compress import SCALE, dtype_of, scales_of
from fedp3.handful import handfuls
from fedp3.plan import per_layers
from fedp3.types import (
    AS_IS,
    ClientPlan,
    ClientUpdate,
    Compression,
    Contribution,
    Failure,
    LayerMap,
    Params,
    Reply,
    Task,
)

EXTRA_LIMIT = 1 << 20  # bytes of extras that are read before anybody knows which are expected
METRIC_LIMIT = 64
METRIC_MOST = torch.finfo(torch.float32).max  # what a net computes; larger ones could overflow a sum over clients
NUMBER = (int, float)  # made once: `int | float` is built at every look
NOT_FINITE = ("holds NaN or infinity", "is not a finite number")  # ends of the reasons for refusing what diverged
NAME_LIMIT = 80  # characters of a client's own words that a reason repeats


@dataclass(frozen=True, slots=True)
class Brought:
    """What updates of a run bring besides plain tensors."""

    extras: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # a method's own tensors: names and shapes
    compression: Compression = AS_IS


NOTHING = Brought()


@dataclass(frozen=True, slots=True)
class Expected:
    """What an update under one plan must hold."""

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    extras: Mapping[str, tuple[int, ...]]


def expected(plan: ClientPlan, layers: LayerMap, brought: Brought = NOTHING) -> Expected:
    """Names, shapes and types of all that an update brings."""
    names = [n for l in plan.uploaded for n in layers.layers[l]]
    tensors = {n: (layers.shapes[n], dtype_of(n, layers, brought.compression)) for n in names}
    return Expected(tensors, {**brought.extras, **scales_of(plan, layers, brought.compression)})


@dataclass(frozen=True, slots=True)
class Verdict:
    """The replies of one round, sorted into what counts and what does not."""

    accepted: tuple[Contribution, ...]  # in client order
    rejected: Mapping[int, str]  # client -> reason
    late: tuple[int, ...]


def sift(
    replies: Iterable[Reply],
    tasks: Sequence[Task],
    layers: LayerMap,
    examples: Mapping[int, int],
    rejected: dict[int, str],
    late: list[int],
    brought: Brought = NOTHING,
) -> Iterator[Contribution]:
    """What counts, in client order and as early as that order allows; the rest is noted in `rejected` and `late`.

    An engine's word that a client failed is final; a refused update is not, for it may be an older one that came late.
    """
    asked = {task.plan.client: task for task in tasks}
    settled: dict[int, Contribution | None] = {}
    order = deque(sorted(asked))
    for reply, reason in _looked_at(replies, asked, layers, examples, brought):
        i = reply.client
        if i in settled:
            rejected.setdefault(i, "answered twice; the first answer counts")
        elif isinstance(reply, Failure):
            settled[i] = None
            if reply.late:
                late.append(i)
            else:
                rejected.setdefault(i, reply.reason)
        elif reason:
            rejected.setdefault(i, reason)
        else:
            settled[i] = Contribution(reply, asked[i].plan, asked[i].masks)
        while order and order[0] in settled:
            if (ready := settled[order[0]]) is not None:
                yield ready
            settled[order.popleft()] = None  # not held any longer than needed
    yield from (ready for i in order if (ready := settled.get(i)) is not None)


def _looked_at(
    replies: Iterable[Reply], asked: Mapping[int, Task], layers: LayerMap, examples: Mapping[int, int], brought: Brought
) -> Iterator[tuple[Reply, str]]:
    """Each reply with its flaw; small updates are looked through together."""
    wanted = per_layers(lambda plan: expected(plan, layers, brought))

    def formal(reply: Reply) -> str:
        task = asked.get(reply.client)
        if isinstance(reply, Failure) or task is None:
            return "" if task else "was not asked this round"
        return _malformed(reply, task, wanted(task.plan), examples.get(reply.client, 0), layers)

    for some in handfuls(replies, layers):
        flaws = [formal(reply) for reply in some]
        sound = [r for r, why in zip(some, flaws, strict=True) if not why and isinstance(r, ClientUpdate)]
        fine = _finite(u.tensors for u in sound) and _finite(u.extra for u in sound)
        for reply, why in zip(some, flaws, strict=True):
            yield reply, why or ("" if fine or isinstance(reply, Failure) else _not_finite(reply))


def _malformed(update: ClientUpdate, task: Task, want: Expected, examples: int, layers: LayerMap) -> str:
    return (
        _stale(update, task)
        or _wrong_count(update.examples, examples)
        or _wrong_names(update, want, layers)
        or _wrong_tensors(update, want)
        or _wrong_extra(update, want.extras)
        or _wrong_metrics(update)
    )


def _stale(update: ClientUpdate, task: Task) -> str:
    return "" if update.t == task.t else f"stale: answers round {_shown(update.t)} in round {task.t}"


def _wrong_count(got: object, registered: int) -> str:
    if not isinstance(got, int) or isinstance(got, bool) or not 1 <= got <= registered:
        return f"claims {_shown(got)} as its number of examples, registered {registered}"
    return ""


def _shown(got: object) -> str:
    """What a client sent in place of a number, never at length."""
    if isinstance(got, int) and abs(got) >= 1 << 63:  # Python itself refuses to print the longest
        return "a huge number"
    return repr(got)[:NAME_LIMIT] if isinstance(got, int | float | str) else f"a {type(got).__name__}"


def _wrong_names(update: ClientUpdate, want: Expected, layers: LayerMap) -> str:
    if update.tensors.keys() == want.tensors.keys():
        return ""
    got = set(update.tensors)
    unknown = sorted(map(str, got - set(layers.shapes)))
    unplanned, missing = sorted(map(str, got - set(want.tensors))), sorted(set(want.tensors) - got)
    if unknown:
        return f"unknown tensor {_short(unknown)}"
    if unplanned:
        return f"tensor {_short(unplanned)} is not in its plan"
    return f"tensor {_short(missing)} is missing" if missing else ""


def _short(names: Sequence[str]) -> str:
    return repr(names[0][:NAME_LIMIT]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _wrong_tensors(update: ClientUpdate, want: Expected) -> str:
    for n, w in update.tensors.items():
        if flaw := _unlike(w, *want.tensors[n]):
            return f"tensor {n!r} {flaw}"
    return ""


def _unlike(w: object, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    if not isinstance(w, Tensor) or w.dtype != dtype:
        return f"has type {getattr(w, 'dtype', type(w).__name__)}, want {str(dtype).removeprefix('torch.')}"
    if not w.is_cpu or w.layout != torch.strided:
        return "is not a dense tensor in memory"
    return "" if w.shape == shape else f"has shape {str(tuple(w.shape))[:NAME_LIMIT]}, want {shape}"


def _finite(several: Iterable[Params]) -> bool:
    """Whether all numbers surely are finite: a sum of finite ones is, unless it overflows.  Who fails is looked at."""
    by_name: dict[str, list[Tensor]] = {}  # equal names, equal shapes
    for tensors in several:
        for n, w in tensors.items():
            by_name.setdefault(n, []).append(w)
    return all(
        math.isfinite(float((torch.stack(rows) if len(rows) > 1 else rows[0]).sum())) for rows in by_name.values()
    )


def _not_finite(update: ClientUpdate) -> str:
    for kind, named in (("tensor", update.tensors), ("extra", update.extra)):
        if bad := [n for n, w in named.items() if not bool(torch.isfinite(w).all())]:
            return f"{kind} {_short(bad)} {NOT_FINITE[0]}"
    return ""


def _wrong_extra(update: ClientUpdate, extras: Mapping[str, tuple[int, ...]]) -> str:
    if update.extra.keys() != extras.keys():
        unknown, missing = sorted(map(str, set(update.extra) - set(extras))), sorted(set(extras) - set(update.extra))
        return f"unknown extra {_short(unknown)}" if unknown else f"extra {_short(missing)} is missing"
    for n, w in update.extra.items():
        if flaw := _unlike(w, extras[n], torch.float32):
            return f"extra {n!r} {flaw}"
        if n.startswith(SCALE) and bool(w < 0):
            return f"extra {n!r} is negative"
    return ""


def _wrong_metrics(update: ClientUpdate) -> str:
    if len(update.metrics) > METRIC_LIMIT:
        return f"{len(update.metrics)} metrics, at most {METRIC_LIMIT} are taken"
    # NaN fails the comparison too.
    bad = [str(k) for k, v in update.metrics.items() if not (isinstance(v, NUMBER) and abs(v) <= METRIC_MOST)]
    return f"metric {_short(bad)} {NOT_FINITE[1]}" if bad else ""
