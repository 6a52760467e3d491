"""The fleet of one run: its devices, what each of them does, and how long that takes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fedp3.client.context import ClientContext
from fedp3.core.errors import PlanError
from fedp3.core.types import ClientPlan, Params
from fedp3.costs.compute import ComputeProfile, peak_bytes
from fedp3.costs.device_time import round_gflop
from fedp3.costs.traffic import VALUE, traffic
from fedp3.devices.clock import Timing, Work, make_timings, visit
from fedp3.devices.fleet_pass import plan_fleet
from fedp3.devices.fleets import make_fleet
from fedp3.devices.options import Limits, Menu, make_menu, transfer_and_work
from fedp3.devices.round_ends import ROUND_ENDS, RoundMode, Visit
from fedp3.devices.settings import DevicesSettings, device_of
from fedp3.devices.table import Device
from fedp3.devices.window_draws import DeviceClass, class_plans
from fedp3.planning.client_plans import PlanSettings

WorkOf = Callable[[ClientPlan], Work]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFleet:
    """The fleet of one run.

    Args:
        settings: the run's `[devices]`.
        devices: the device of every client.
        timings: the same devices over virtual time.
        able: the clients whose devices can take part.
        binding: for every client the limit that keeps it from training everything, if any.
        profile: the FLOPs and memory of the network.
        work_of: what a client's plan takes.
        classes: the options of each kind of device, where windows are planned; else none.
    """

    settings: DevicesSettings
    devices: tuple[Device, ...]
    timings: tuple[Timing, ...]
    able: frozenset[int]
    binding: tuple[str, ...]
    profile: ComputeProfile
    work_of: WorkOf
    classes: tuple[DeviceClass, ...] = ()

    @property
    def mode(self) -> RoundMode:
        """How rounds end."""
        return ROUND_ENDS.pick(self.settings.round_end)

    @property
    def redraws(self) -> bool:
        """Whether plans change from round to round."""
        return bool(self.classes) and self.settings.windows != "fixed"

    def asked(self, participants: int) -> int:
        """How many clients are asked if this many shall take part."""
        if not self.mode.over_selects:
            return participants
        return math.ceil(self.settings.over_selection * participants)


def fleet_plans(fleet: RunFleet, seed: int, t: int) -> dict[int, ClientPlan]:
    """The plan of every client in round t, where windows are planned."""
    return class_plans(fleet.classes, fleet.settings.windows, seed, t)


def visits(fleet: RunFleet, plans: Iterable[ClientPlan], start: int) -> list[Visit]:
    """Every client's part of a round that begins at `start`."""
    return [
        visit(plan.client, fleet.timings[plan.client], fleet.work_of(plan), start) for plan in plans
    ]


# --------------------------------------------------------------------------- devices


def run_devices(settings: DevicesSettings, clients: int, seed: int) -> tuple[Device, ...]:
    """The device of every client."""
    fleet = settings.fleet
    if isinstance(fleet, tuple):
        if len(fleet) != clients:
            raise PlanError(
                f"[devices] fleet: {len(fleet)} devices for {clients} clients; want one for each"
            )
        return tuple(device_of(row) for row in fleet)
    return make_fleet(fleet, clients, seed)


# --------------------------------------------------------------------------- plans


def plan_windows(
    settings: DevicesSettings,
    devices: tuple[Device, ...],
    plan: PlanSettings,
    context: ClientContext,
    profile: ComputeProfile,
    examples: Mapping[int, int],
    extra: Params,
) -> RunFleet:
    """The fleet whose clients train windows of layers that are chosen for their devices.

    Args:
        settings: the run's `[devices]`.
        devices: the device of every client.
        plan: the run's `[plan]`.
        context: what all clients share.
        profile: the FLOPs and memory of the network.
        examples: the number of training samples of each client.
        extra: the method's tensors.
    """
    menus = _menus(context, profile, plan, examples, extra)
    classes = plan_fleet(
        devices, menus, context.layers, settings.memory_share, settings.round_seconds
    )
    idle = tuple(i for i in sorted(examples) if i not in menus)
    binding = {i: group.binding for group in classes for i in group.clients}
    if idle:  # clients without samples never train, but evaluation needs a plan for each
        classes += (replace(classes[0], clients=idle, options=(), counts=()),)
    return RunFleet(
        settings=settings,
        devices=devices,
        timings=_timings(settings, devices, context.seed),
        able=frozenset(i for group in classes if group.options for i in group.clients),
        binding=tuple(binding.get(i, "") for i in range(len(devices))),
        profile=profile,
        work_of=work_counter(context, profile, examples, extra),
        classes=classes,
    )


def _menus(
    context: ClientContext,
    profile: ComputeProfile,
    plan: PlanSettings,
    examples: Mapping[int, int],
    extra: Params,
) -> dict[int, Menu]:
    """The menu of every client with training samples; clients with equal batches share one."""
    known: dict[int, Menu] = {}
    menus = {}
    for client, samples in examples.items():
        if not samples:
            continue
        # With epochs, the number of steps depends on the number of samples too.
        rows = samples if context.local.epochs else min(samples, context.local.batch)
        if rows not in known:
            known[rows] = make_menu(context, profile, plan, rows, extra)
        menus[client] = known[rows]
    return menus


def plan_shares(
    settings: DevicesSettings,
    devices: tuple[Device, ...],
    levels: Sequence[float],
    plans_at: Callable[[float], Sequence[ClientPlan]],
    context: ClientContext,
    profile: ComputeProfile,
    examples: Mapping[int, int],
    extra: Params,
) -> tuple[RunFleet, tuple[float, ...]]:
    """The fleet whose clients get the largest sub-model that fits, and each client's `keep`.

    Args:
        settings: the run's `[devices]`.
        devices: the device of every client.
        levels: the shares that a client may have.
        plans_at: a share -> the plans of all clients if all have this share.
        context: what all clients share.
        profile: the FLOPs and memory of the network.
        examples: the number of training samples of each client.
        extra: the method's tensors.
    """
    work_of = work_counter(context, profile, examples, extra)
    peak_of = peak_counter(context, profile, examples)
    keep: dict[int, float] = {}
    binding: dict[int, str] = {}
    for level in sorted(levels, reverse=True):
        for plan in plans_at(level):
            i = plan.client
            if i in keep:
                continue
            limit = _violated(settings, devices[i], work_of(plan), peak_of(plan))
            if limit:
                binding.setdefault(i, limit)
            else:
                keep[i] = level
    able = frozenset(i for i in keep if examples.get(i, 0))
    if not able:
        raise PlanError(
            f"no device of this fleet fits even a share of {min(levels):g} of the network within "
            f"{settings.memory_share:g} of its memory and {settings.round_seconds:g} seconds a "
            "round; raise one of these limits, or use a smaller network"
        )
    fleet = RunFleet(
        settings=settings,
        devices=devices,
        timings=_timings(settings, devices, context.seed),
        able=able,
        binding=tuple(binding.get(i, "") for i in range(len(devices))),
        profile=profile,
        work_of=work_of,
    )
    return fleet, tuple(keep.get(i, min(levels)) for i in range(len(devices)))


def as_planned(
    settings: DevicesSettings,
    devices: tuple[Device, ...],
    plans: Sequence[ClientPlan],
    context: ClientContext,
    profile: ComputeProfile,
    examples: Mapping[int, int],
    extra: Params,
) -> RunFleet:
    """The fleet under plans that the config makes; devices without the memory for them are out.

    Args:
        settings: the run's `[devices]`.
        devices: the device of every client.
        plans: the plans of all clients in the first round.
        context: what all clients share.
        profile: the FLOPs and memory of the network.
        examples: the number of training samples of each client.
        extra: the method's tensors.
    """
    work_of = work_counter(context, profile, examples, extra)
    peak_of = peak_counter(context, profile, examples)
    binding = []
    for plan in plans:
        device = devices[plan.client]
        binding.append(_violated(settings, device, work_of(plan), peak_of(plan)))
    able = frozenset(
        plan.client
        for plan, limit in zip(plans, binding, strict=True)
        if limit != "memory" and examples.get(plan.client, 0)
    )
    if not able:
        least = min(peak_of(plan) for plan in plans) / 1e6
        raise PlanError(
            f"no device of this fleet can hold its plan, which takes {least:.0f} MB or more, in "
            f"{settings.memory_share:g} of its memory; raise devices.memory_share, or set "
            "devices.planner = 'auto'"
        )
    return RunFleet(
        settings=settings,
        devices=devices,
        timings=_timings(settings, devices, context.seed),
        able=able,
        binding=tuple(binding),
        profile=profile,
        work_of=work_of,
    )


def _violated(settings: DevicesSettings, device: Device, work: Work, peak: int) -> str:
    """The limit that a plan exceeds on a device: memory, or the longest phase; empty if none."""
    limits = Limits.of(device, settings.memory_share, settings.round_seconds)
    if peak > limits.memory:
        return "memory"
    parts = transfer_and_work(device, work.down, work.up, work.gflop)
    if sum(parts) <= limits.seconds:
        return ""
    return max(zip(parts, ("download", "computation", "upload"), strict=True))[1]


def _timings(settings: DevicesSettings, devices: Sequence[Device], seed: int) -> tuple[Timing, ...]:
    return make_timings(devices, seed, settings.availability, settings.bandwidth)


# --------------------------------------------------------------------------- costs of plans


def work_counter(
    context: ClientContext, profile: ComputeProfile, examples: Mapping[int, int], extra: Params
) -> WorkOf:
    """A function from a client's plan to the bytes and GFLOP that it takes; it remembers plans."""
    layers, pruning = context.layers, context.pruning
    extra_bytes = VALUE * sum(w.numel() for w in extra.values())
    known: dict[tuple[object, ...], tuple[ClientPlan, Work]] = {}

    def work_of(plan: ClientPlan) -> Work:
        samples = examples[plan.client]
        key = id(plan.layers), plan.deal, plan.steps, samples
        if key not in known:
            bytes_of = traffic(plan, layers, pruning, context.spec.compression)
            gflop = round_gflop(profile, plan, context, samples)
            work = Work(bytes_of.down + extra_bytes, bytes_of.up + extra_bytes, gflop)
            known[key] = plan, work  # the plan stays alive, so that nothing else gets its id
        return known[key][1]

    return work_of


def peak_counter(
    context: ClientContext, profile: ComputeProfile, examples: Mapping[int, int]
) -> Callable[[ClientPlan], int]:
    """A function from a client's plan to the bytes that a local step needs; it remembers plans."""
    known: dict[tuple[object, ...], tuple[ClientPlan, int]] = {}
    local, layers = context.local, context.layers

    def peak_of(plan: ClientPlan) -> int:
        rows = max(1, min(local.batch, examples[plan.client]))
        key = id(plan.layers), plan.deal, rows
        if key not in known:
            momentum = local.momentum > 0
            peak = peak_bytes(profile, plan, layers, context.pruning, rows, momentum)
            known[key] = plan, peak
        return known[key][1]

    return peak_of
