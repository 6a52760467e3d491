"""What a device can do in a round: each window of layers, with as much work as its limits allow.

A candidate is a window of adjacent hidden layers, which are trained in full and uploaded with the
head, and a share `keep` of all other layers, which are frozen unless the config says otherwise.
For a device, a candidate becomes an option with the fewest parts per batch that fit into its memory
and the most local steps that fit into its time.  Of the codes that uploads may have, it gets the
one with the most bits that allows as many steps as any.  The search is exhaustive: every window
with every share is a candidate.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from fedp3.client.batching import step_count
from fedp3.client.context import ClientContext
from fedp3.core.types import ClientPlan, Layer, LayerMap, LayerPlan, Params
from fedp3.costs.compute import ComputeProfile
from fedp3.costs.device_time import round_gflop
from fedp3.costs.memory import client_bytes
from fedp3.costs.traffic import exchange_bytes, retained_parameters, traffic
from fedp3.devices.table import Device
from fedp3.planning.client_plans import HEADS, PlanSettings, outside

KEEPS = (1.0, 0.5, 0.25, 0.125)  # shares of the layers outside the window that are tried
EMPTY = (math.inf, -math.inf)  # the window without a layer, which every window contains

Window = tuple[float, float]  # positions of the first and the last hidden layer


@dataclass(frozen=True, slots=True)
class Limits:
    """What a round may take of a device."""

    memory: float  # bytes
    seconds: float  # infinite if there is no limit

    @classmethod
    def of(cls, device: Device, memory_share: float, round_seconds: float) -> "Limits":
        """The limits of a device under a run's settings."""
        return cls(memory_share * device.memory_mb * 1e6, round_seconds or math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that every device may get, and what it costs.

    Args:
        window: the hidden layers that are trained in full.
        layers: the plan of each layer.
        down: bytes that are sent to the client.
        up: bytes that it uploads, for each code that its plan may name; empty is the run's own.
        step_gflop: GFLOP of one local step.
        share: the share of the network's parameters that the client has.
    """

    window: Window
    layers: Mapping[Layer, LayerPlan]
    down: int
    up: Mapping[str, int]
    step_gflop: float
    share: float

    @property
    def least_up(self) -> int:
        """Bytes of the shortest upload."""
        return min(self.up.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A candidate on one device."""

    candidate: Candidate
    steps: int
    split: int
    code: str
    seconds: float

    @property
    def plan(self) -> ClientPlan:
        """The plan, for a client that is yet to be named."""
        layers = self.candidate.layers
        return ClientPlan(-1, layers, steps=self.steps, split=self.split, code=self.code)


@dataclass(frozen=True)
class Menu:
    """All candidates of a run for clients with batches of this size.

    Args:
        context: what all clients share.
        profile: the FLOPs and memory of the network.
        rows: the samples in a batch.
        steps: the local steps of the run's settings.
        varies_steps: whether a device may take fewer steps.
        splits: whether a batch may be computed in parts.
        candidates: all of them; the first trains everything, the last only the head.
    """

    context: ClientContext
    profile: ComputeProfile
    rows: int
    steps: int
    varies_steps: bool
    splits: bool
    candidates: tuple[Candidate, ...]
    _peaks: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    @cached_property
    def most(self) -> int:
        """The peak memory of training everything: no candidate needs more."""
        layers = dict.fromkeys(self.context.layers.layers, LayerPlan())
        return self._bytes(ClientPlan(0, layers))

    def peak(self, candidate: Candidate, split: int) -> int:
        """The peak memory of a candidate whose batches are computed in this many parts."""
        key = id(candidate.layers), split
        if key not in self._peaks:
            self._peaks[key] = self._bytes(ClientPlan(0, candidate.layers, split=split))
        return self._peaks[key]

    def _bytes(self, plan: ClientPlan) -> int:
        return client_bytes(self.context, self.profile, plan, self.rows)


def make_menu(
    context: ClientContext,
    profile: ComputeProfile,
    settings: PlanSettings,
    samples: int,
    extra: Params,
    *,
    codes: Sequence[str] = (),
    all_steps: bool = False,
) -> Menu:
    """All candidates of a run, and how they may be varied.

    Args:
        context: what all clients share.
        profile: the FLOPs and memory of the network.
        settings: the run's `[plan]`, which says what becomes of layers outside a window.
        samples: the training samples of the clients that the menu is for.
        extra: the method's tensors.
        codes: the codes that uploads may have instead of the run's.
        all_steps: every device takes all local steps; under LDP they are what is accounted for.
    """
    local, hooks = context.local, context.hooks
    steps = step_count(local, samples)
    candidates = tuple(_candidates(context, profile, settings, samples, steps, extra, codes))
    one_pass = len(hooks.passes) == 1 and hooks.step is None
    return Menu(
        context=context,
        profile=profile,
        rows=max(1, min(local.batch, samples)),
        steps=steps,
        varies_steps=one_pass and not local.epochs and not all_steps,
        splits=hooks.loss is None and hooks.step is None and not context.layers.buffers,
        candidates=candidates,
    )


def _candidates(
    context: ClientContext,
    profile: ComputeProfile,
    settings: PlanSettings,
    samples: int,
    steps: int,
    extra: Params,
    codes: Sequence[str],
) -> list[Candidate]:
    layers, pruning = context.layers, context.pruning
    H = len(layers.hidden)
    everything = sum(math.prod(s) for n, s in layers.shapes.items() if n not in layers.buffers)
    exchanged = exchange_bytes(extra)
    windows = [(a, a + size - 1) for size in range(H, 0, -1) for a in range(H - size + 1)]
    found = []
    for window in [*windows, EMPTY]:
        is_full = window == (0, H - 1)
        for keep in KEEPS[:1] if is_full else KEEPS:
            plan = ClientPlan(0, window_plans(layers, settings, window, keep))
            spec = context.spec
            bytes_of = {
                code: traffic(
                    replace(plan, code=code), layers, pruning, spec.compression, spec.download
                )
                for code in ("", *codes)
            }
            found.append(
                Candidate(
                    window=window,
                    layers=plan.layers,
                    down=bytes_of[""].copy + exchanged,
                    up={code: t.up + exchanged for code, t in bytes_of.items()},
                    step_gflop=round_gflop(profile, plan, context, samples) / steps,
                    share=retained_parameters(plan, layers, pruning) / everything,
                )
            )
    return found


def window_plans(
    layers: LayerMap, settings: PlanSettings, window: Window, keep: float
) -> dict[Layer, LayerPlan]:
    """The plan of each layer where a client trains this window of hidden layers in full."""
    first, last = window
    rest = outside(settings, keep)
    if rest.send == "pruned" and keep == 1:
        rest = replace(rest, send="dense")  # the same tensors, without masks
    plans = {l: LayerPlan() if first <= j <= last else rest for j, l in enumerate(layers.hidden)}
    plans[layers.head] = HEADS[settings.head]
    return plans


def transfer_and_work(
    device: Device, down: int, up: int, gflop: float
) -> tuple[float, float, float]:
    """Seconds of download, computation and upload on a device whose links are constant."""
    return (
        8 * down / (1e6 * device.mbps_down),
        gflop / device.gflops,
        8 * up / (1e6 * device.mbps_up),
    )


def longest_phase(device: Device, down: int, up: int, gflop: float) -> str:
    """Which part of a round takes longest on a device."""
    phases = transfer_and_work(device, down, up, gflop)
    return max(zip(phases, ("download", "computation", "upload"), strict=True))[1]


def option_of(menu: Menu, candidate: Candidate, device: Device, limits: Limits) -> Option | None:
    """The candidate on a device, with the fewest parts and the most steps; None if none fits."""
    best = (0, 0, "", 0.0)  # steps, bytes of the upload, its code, seconds of all
    for code, size in candidate.up.items():
        down, one_step, up = transfer_and_work(device, candidate.down, size, candidate.step_gflop)
        steps = _most_steps(menu, one_step, limits.seconds - down - up)
        if (steps, size) > best[:2]:
            best = (steps, size, code, down + one_step * steps + up)
    steps, _, code, seconds = best
    if steps < 1:
        return None
    split = _fewest_parts(menu, candidate, limits.memory)
    if split is None:
        return None
    return Option(
        candidate=candidate,
        steps=steps if steps < menu.steps else 0,
        split=split,
        code=code,
        seconds=seconds,
    )


def _most_steps(menu: Menu, one_step: float, seconds: float) -> int:
    """The most local steps that fit into this time."""
    if one_step * menu.steps <= seconds:
        return menu.steps
    return math.floor(seconds / one_step) if menu.varies_steps and seconds > 0 else 0


def _fewest_parts(menu: Menu, candidate: Candidate, memory: float) -> int | None:
    """The fewest parts of a batch, among powers of two, with which a candidate fits."""
    if menu.most <= memory:
        return 1
    split = 1
    while True:
        if menu.peak(candidate, split) <= memory:
            return split
        split *= 2
        if not menu.splits or split > menu.rows:
            return None


def effective_samples(menu: Menu, option: Option) -> float:
    """Samples of a round, times the share of the network that they are computed with."""
    return menu.rows * (option.steps or menu.steps) * option.candidate.share


def options_of(menu: Menu, device: Device, limits: Limits) -> tuple[Option, ...]:
    """The options of a device that no other one dominates.

    An option dominates another if it trains at least the same layers on at least as many effective
    samples.  Of equal ones, the first remains.
    """
    found = [option_of(menu, candidate, device, limits) for candidate in menu.candidates]
    options = [option for option in found if option is not None]
    if not options:
        return ()
    first, last = np.array([option.candidate.window for option in options]).T
    samples = np.array([round(effective_samples(menu, option), 6) for option in options])
    contains = (first[:, None] <= first) & (last[:, None] >= last) & (samples[:, None] >= samples)
    equal = contains & contains.T
    earlier = np.triu(np.ones_like(contains), 1)  # row comes before column
    dominated = (contains & (~equal | earlier.astype(bool))).any(axis=0)
    return tuple(option for option, out in zip(options, dominated, strict=True) if not out)


# --------------------------------------------------------------------------- limits that bind


def binding_limit(menu: Menu, device: Device, limits: Limits) -> str:
    """Which limit keeps a device from training everything; empty if none does."""
    full = menu.candidates[0]
    option = option_of(menu, full, device, limits)
    if option is not None and not option.steps:
        return ""
    if _fewest_parts(menu, full, limits.memory) is None:
        return "memory"
    return longest_phase(device, full.down, full.least_up, full.step_gflop * menu.steps)


Needs = Callable[[Candidate], bool]


def smallest_change(
    menu: Menu, devices: Sequence[Device], limits: Sequence[Limits], wanted: Needs
) -> str:
    """The least increase of a limit with which some device could use a wanted candidate."""
    seconds, memory = math.inf, math.inf
    for device, limit in zip(devices, limits, strict=True):
        for candidate in filter(wanted, menu.candidates):
            steps = 1 if menu.varies_steps else menu.steps
            takes = sum(
                transfer_and_work(
                    device, candidate.down, candidate.least_up, candidate.step_gflop * steps
                )
            )
            if _fewest_parts(menu, candidate, limit.memory) is not None:
                seconds = min(seconds, takes)
            elif takes <= limit.seconds:
                split = 1
                while menu.splits and split < menu.rows:
                    split *= 2
                memory = min(memory, menu.peak(candidate, split) / (1e6 * device.memory_mb))
    changes = []
    if math.isfinite(seconds):
        changes.append(f"devices.round_seconds = {_rounded_up(seconds)}")
    if math.isfinite(memory) and memory <= 1:
        changes.append(f"devices.memory_share = {_rounded_up(memory)}")
    return " or ".join(changes) or "a smaller network, or devices with more memory"


def _rounded_up(value: float) -> str:
    """A number of three significant digits that is at least this value."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit) * unit:.6g}"
