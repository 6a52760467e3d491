"""Predicted costs of training a few layers against measurements on this machine.

A window is a run of successive layers.  Only its layers and the head train; all others are frozen.
Each row predicts a step for the windows of one network, from the plan alone, and measures it:

- C1: bytes of tensors that torch's profiler saw allocated at once;
- C2: growth of the peak memory (RSS) of a new process.  glibc keeps and splits freed blocks, so the
  limit is held with an allocator that returns blocks of 64 KB and more at once; what the usual
  allocator adds is shown beside it, for every fourth window;
- C3: CPU time on one thread, after one constant per network, which is the geometric mean.
"""

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.networks import MobileNet, VisionTransformer, by_block
from benchmarks.private import plain_step
from benchmarks.ratio import Work
from fedp3.client.sgd import prepare
from fedp3.core.types import ClientPlan, LayerMap, LayerPlan
from fedp3.costs.compute import flops, measure, peak_bytes, step_bytes, time_flops
from fedp3.models.layer_map import layer_map
from fedp3.models.zoo import ModelSettings, ModelSpec, build, channels_last
from fedp3.planning.prune_settings import PruneSettings

SHAPE = (3, 32, 32)
DENSE = PruneSettings()
RETURNED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # read by glibc


# --------------------------------------------------------------------------- networks and windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network whose windows are measured.

    Args:
        net: creates it, in the memory layout of a run.
        small: creates a small network of the same operations.
        layers: its layers; None means those that tracing finds.
        windows: how many windows are measured, evenly spread over all.
        batch: the number of examples for tensors and time.
        process_batch: the number of examples for a process, such that each window takes 100 MB;
            0 means that no process is measured.
    """

    net: Callable[[], nn.Module]
    small: Callable[[], nn.Module]
    layers: Callable[[nn.Module], Mapping[str, Sequence[str]]] | None = None
    windows: int = 40
    batch: int = 16
    process_batch: int = 0


def zoo(name: str, width: float = 1.0) -> nn.Module:
    """A network of the zoo."""
    return channels_last(build(ModelSpec(SHAPE, 10, ModelSettings(name=name, width=width)), 0))


CASES: Mapping[str, Case] = {
    "CNN": Case(
        net=partial(zoo, "cnn"),
        small=partial(zoo, "cnn", 1 / 16),
        windows=15,
        batch=64,
        process_batch=256,
    ),
    "ResNet18": Case(
        net=partial(zoo, "resnet18"), small=partial(zoo, "resnet18", 1 / 16), process_batch=64
    ),
    "transformer": Case(
        net=lambda: VisionTransformer(width=128, heads=4, depth=10),
        small=lambda: VisionTransformer(width=16, heads=2, depth=1),
        layers=by_block,
        batch=32,
        process_batch=256,
    ),
    "MobileNet": Case(
        net=lambda: channels_last(MobileNet()), small=MobileNet, layers=by_block, batch=16
    ),
}


def map_of(case: Case, net: nn.Module) -> LayerMap:
    """The layers of a case's network."""
    return layer_map(net, case.layers(net) if case.layers else None)


def windows(layers: int, count: int) -> list[tuple[int, int]]:
    """Contiguous windows [start, end) of layers, at most `count`, evenly spread over all."""
    every = [(a, b) for a in range(layers) for b in range(a + 1, layers + 1)]
    if len(every) <= count:
        return every
    return [every[round(k * (len(every) - 1) / (count - 1))] for k in range(count)]


def window_plan(layers: LayerMap, start: int, end: int) -> ClientPlan:
    """Train the window and the head, freeze the rest."""
    order = list(layers.layers)
    trained = {*order[start:end], order[-1]}
    return ClientPlan(0, {l: LayerPlan(train=l in trained) for l in order})


def plans_of(case: Case, layers: LayerMap) -> list[ClientPlan]:
    """The plans of a case's windows."""
    return [window_plan(layers, *w) for w in windows(len(layers.layers), case.windows)]


def examples(batch: int) -> tuple[Tensor, Tensor]:
    """A batch and its labels."""
    rng = torch.Generator().manual_seed(0)
    return torch.randn(batch, *SHAPE, generator=rng), torch.randint(10, (batch,), generator=rng)


# --------------------------------------------------------------------------- statistics


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value; equal values share the mean of their ranks."""
    return [
        sum(other < v for other in values) + (sum(other == v for other in values) - 1) / 2
        for v in values
    ]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's coefficient."""
    return statistics.correlation(ranks(a), ranks(b))


def fit(measured: Sequence[float], predicted: Sequence[float]) -> tuple[float, float]:
    """Geometric mean of measured / predicted, and the largest relative distance from it."""
    logs = [math.log(m / p) for m, p in zip(measured, predicted, strict=True)]
    mean = statistics.fmean(logs)
    return math.exp(mean), max(math.expm1(abs(x - mean)) for x in logs)


def spread(ratios: Sequence[float]) -> str:
    """Smallest and largest ratio as text."""
    return f"{min(ratios):.3f}-{max(ratios):.3f}"


# --------------------------------------------------------------------------- tensors


def allocated(work: Work) -> int:
    """The most bytes that were allocated at once, by torch's profiler."""
    work()  # what is made once is not a step's
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    current = peak = 0
    for e in sorted(events, key=lambda e: e.start_ns()):
        current += e.nbytes()
        peak = max(peak, current)
    return peak


def tensors(name: str, pairs: int) -> str:
    """Allocated by a real step, and stored, of what is predicted."""
    case = CASES[name]
    net = case.net()
    layers, known = map_of(case, net), measure(net, SHAPE)
    stored = sum(w.nbytes for w in net.state_dict().values() if w.dtype == torch.float32)

    def step_with_batch() -> None:
        plain_step(net, *examples(case.batch))()

    ratios = []
    for plan in plans_of(case, layers):
        predicted = peak_bytes(known, plan, layers, DENSE, case.batch, slots=0)
        prepare(net, plan, layers)
        ratios.append((stored + allocated(step_with_batch)) / predicted)
    return (
        f"{spread(ratios)} of the prediction over {len(ratios)} windows, batch {case.batch} "
        "(limit 0.95-1.05)"
    )


# --------------------------------------------------------------------------- processes


def processes(name: str, pairs: int) -> str:
    """Growth of a process of what is predicted, with both allocators."""
    case = CASES[name]
    net = case.net()
    layers, known = map_of(case, net), measure(net, SHAPE)
    predicted = [
        peak_bytes(known, plan, layers, DENSE, case.process_batch, slots=0)
        for plan in plans_of(case, layers)
    ]
    returned = growth(name, 1, RETURNED_AT_ONCE)
    usual = growth(name, 4, {})
    ratios = [g / p for g, p in zip(returned, predicted, strict=True)]
    more = [g / p for g, p in zip(usual, predicted[::4], strict=True)]
    return (
        f"{spread(ratios)} of the prediction (limit 0.85-1.15) if freed blocks are returned, "
        f"{spread(more)} as usual; {min(predicted) / 1e6:.0f}-{max(predicted) / 1e6:.0f} MB, "
        f"batch {case.process_batch}"
    )


def growth(name: str, every: int, environment: Mapping[str, str]) -> list[int]:
    """Bytes by which a process grows, for every n-th window."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.resident", name, str(every)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return [int(line) for line in done.stdout.splitlines()]


# --------------------------------------------------------------------------- time


def seconds(name: str, pairs: int) -> str:
    """CPU time of steps against FLOPs, and against FLOPs and bytes moved."""
    case = CASES[name]
    net = case.net()
    layers, known = map_of(case, net), measure(net, SHAPE)
    plans = plans_of(case, layers)
    repeats = max(3, 14 * pairs // len(plans))  # about as many steps of each network
    measured = step_seconds(net, layers, plans, case.batch, repeats)
    by_flops = [case.batch * flops(known, plan, layers, DENSE) for plan in plans]
    with_bytes = [
        time_flops(count, step_bytes(known, plan, layers, DENSE, case.batch, slots=0).moved)
        for count, plan in zip(by_flops, plans, strict=True)
    ]
    parts = []
    for text, predicted in (("FLOPs", by_flops), ("FLOPs and bytes", with_bytes)):
        constant, worst = fit(measured, predicted)
        rank = rank_correlation(measured, predicted)
        parts.append(
            f"{text}: within {100 * worst:.0f} %, rank {rank:.3f}, {1e-9 / constant:.0f} G/s"
        )
    return "; ".join(parts) + f" (limits 25 %, 0.95), batch {case.batch}"


def step_seconds(
    net: nn.Module, layers: LayerMap, plans: Sequence[ClientPlan], batch: int, repeats: int
) -> list[float]:
    """The median CPU seconds of each plan's step; plans are measured in turn."""
    x, y = examples(batch)
    taken: list[list[float]] = [[] for _ in plans]
    for k in range(repeats + 1):
        for times, plan in zip(taken, plans, strict=True):
            prepare(net, plan, layers)
            step = plain_step(net, x, y)
            began = time.process_time()
            step()
            if k:  # the first round warms up
                times.append(time.process_time() - began)
    return [statistics.median(times) for times in taken]


ROWS: Mapping[str, Callable[[int], str]] = {
    **{f"C1 tensors, {name}": partial(tensors, name) for name in CASES},
    **{
        f"C2 process, {name}": partial(processes, name)
        for name in CASES
        if CASES[name].process_batch
    },
    **{f"C3 time, {name}": partial(seconds, name) for name in CASES},
}
