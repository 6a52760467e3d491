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
from fedp3.types import AS_IS, ClientUpdate, Compression, Contribution, Failure, LayerMap, Reply, Task

EXTRA_LIMIT = 1 << 20  # bytes of extras that are read before anybody knows which are expected
METRIC_LIMIT = 64
METRIC_MOST = torch.finfo(torch.float32).max  # what a net computes; larger ones could overflow a sum over clients
NAME_LIMIT = 80  # characters of a client's own words that a reason repeats


@dataclass(frozen=True, slots=True)
class Brought:
    """What updates of a run bring besides plain tensors."""

    extras: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # a method's own tensors: names and shapes
    compression: Compression = AS_IS


NOTHING = Brought()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The replies of one round, sorted into what counts and what does not."""

    accepted: tuple[Contribution, ...]  # in client order
    rejected: Mapping[int, str]  # client -> reason
    late: tuple[int, ...]


def judge(
    replies: Iterable[Reply],
    tasks: Sequence[Task],
    layers: LayerMap,
    examples: Mapping[int, int],
    brought: Brought = NOTHING,
) -> Verdict:
    """Sort replies; `examples` is how many training samples each client registered."""
    rejected: dict[int, str] = {}
    late: list[int] = []
    accepted = tuple(sift(replies, tasks, layers, examples, rejected, late, brought))
    return Verdict(accepted, rejected, tuple(sorted(late)))


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
    for reply in replies:
        i = reply.client
        if i in settled:
            rejected.setdefault(i, "answered twice; the first answer counts")
        elif isinstance(reply, Failure):
            settled[i] = None
            if reply.late:
                late.append(i)
            else:
                rejected.setdefault(i, reply.reason)
        elif i not in asked:
            rejected.setdefault(i, "was not asked this round")
        elif reason := flaw(reply, asked[i], layers, examples.get(i, 0), brought):
            rejected.setdefault(i, reason)
        else:
            settled[i] = Contribution(reply, asked[i].plan, asked[i].masks)
        while order and order[0] in settled:
            if (ready := settled[order[0]]) is not None:
                yield ready
            settled[order.popleft()] = None  # not held any longer than needed
    yield from (ready for i in order if (ready := settled.get(i)) is not None)


def flaw(update: ClientUpdate, task: Task, layers: LayerMap, examples: int, brought: Brought) -> str:
    """The first reason not to use this update; empty if there is none."""
    return (
        _stale(update, task)
        or _wrong_count(update.examples, examples)
        or _wrong_names(update, task, layers)
        or _wrong_tensors(update, layers, brought.compression)
        or _wrong_extra(update, {**brought.extras, **scales_of(task.plan, layers, brought.compression)})
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


def _wrong_names(update: ClientUpdate, task: Task, layers: LayerMap) -> str:
    want = {n for l in task.plan.uploaded for n in layers.layers[l]}
    if update.tensors.keys() == want:
        return ""
    got = set(update.tensors)
    unknown = sorted(map(str, got - set(layers.shapes)))
    unplanned, missing = sorted(map(str, got - want)), sorted(want - got)
    if unknown:
        return f"unknown tensor {_short(unknown)}"
    if unplanned:
        return f"tensor {_short(unplanned)} is not in its plan"
    return f"tensor {_short(missing)} is missing" if missing else ""


def _short(names: Sequence[str]) -> str:
    return repr(names[0][:NAME_LIMIT]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _wrong_tensors(update: ClientUpdate, layers: LayerMap, compression: Compression) -> str:
    for n, w in update.tensors.items():
        if reason := _not_plain(w, dtype_of(n, layers, compression)):
            return f"tensor {n!r} {reason}"
        if tuple(w.shape) != layers.shapes[n]:
            return f"tensor {n!r} has shape {tuple(w.shape)}, want {layers.shapes[n]}"
        if not _finite(w):
            return f"tensor {n!r} holds NaN or infinity"
    return ""


def _not_plain(w: object, want: torch.dtype = torch.float32) -> str:
    if not isinstance(w, Tensor) or w.dtype != want:
        return f"has type {getattr(w, 'dtype', type(w).__name__)}, want {str(want).removeprefix('torch.')}"
    return "" if w.layout == torch.strided and w.device.type == "cpu" else "is not a dense tensor in memory"


def _finite(w: Tensor) -> bool:
    # The sum of finite numbers is finite unless it overflows: look closer only then.
    return math.isfinite(float(w.sum())) or bool(torch.isfinite(w).all())


def _wrong_extra(update: ClientUpdate, extras: Mapping[str, tuple[int, ...]]) -> str:
    unknown, missing = sorted(map(str, set(update.extra) - set(extras))), sorted(set(extras) - set(update.extra))
    if unknown:
        return f"unknown extra {_short(unknown)}"
    if missing:
        return f"extra {_short(missing)} is missing"
    for n, w in update.extra.items():
        if reason := _not_plain(w):
            return f"extra {n!r} {reason}"
        if tuple(w.shape) != extras[n]:
            return f"extra {n!r} has shape {tuple(w.shape)}, want {extras[n]}"
        if n.startswith(SCALE) and bool(w < 0):
            return f"extra {n!r} is negative"
    bad = [n for n, w in update.extra.items() if not _finite(w)]
    return f"extra {_short(bad)} holds NaN or infinity" if bad else ""


def _wrong_metrics(update: ClientUpdate) -> str:
    if len(update.metrics) > METRIC_LIMIT:
        return f"{len(update.metrics)} metrics, at most {METRIC_LIMIT} are taken"
    # NaN fails the comparison too.
    bad = [str(k) for k, v in update.metrics.items() if not (isinstance(v, int | float) and abs(v) <= METRIC_MOST)]
    return f"metric {_short(bad)} is not a finite number" if bad else ""
