"""The fleet of one run: its devices, what each of them does, and how long that takes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fedp3.client.context import ClientContext
from fedp3.core.errors import PlanError
from fedp3.core.memo import once_per_plan
from fedp3.core.types import ClientPlan, Params
from fedp3.costs.compute import ComputeProfile
from fedp3.costs.device_time import round_gflop
from fedp3.costs.memory import client_bytes
from fedp3.costs.traffic import exchange_bytes, traffic
from fedp3.devices.clock import Timing, Work, make_timings
from fedp3.devices.fleet_pass import plan_fleet
from fedp3.devices.fleets import make_fleet
from fedp3.devices.options import (
    Limits,
    Menu,
    longest_phase,
    make_menu,
    transfer_and_work,
)
from fedp3.devices.round_ends import ROUND_ENDS, RoundMode
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetInputs:
    """What plans for devices are made from.

    Args:
        settings: the run's `[devices]`.
        devices: the device of every client.
        context: what all clients share.
        profile: the FLOPs and memory of the network.
        examples: the number of training samples of each client.
        extra: the method's tensors, which are sent in both directions.
    """

    settings: DevicesSettings
    devices: tuple[Device, ...]
    context: ClientContext
    profile: ComputeProfile
    examples: Mapping[int, int]
    extra: Params


def plan_windows(inputs: FleetInputs, plan: PlanSettings, *, all_steps: bool = False) -> RunFleet:
    """The fleet whose clients train windows of layers that are chosen for their devices.

    Args:
        inputs: the run and its devices.
        plan: the run's `[plan]`.
        all_steps: whether every device takes all local steps.
    """
    settings, examples = inputs.settings, inputs.examples
    menus = _menus(inputs, plan, all_steps=all_steps)
    classes = plan_fleet(
        inputs.devices,
        menus,
        inputs.context.layers,
        settings.memory_share,
        settings.round_seconds,
    )
    binding = {i: group.binding for group in classes for i in group.clients}
    idle = tuple(i for i in sorted(examples) if i not in menus)
    if idle:  # clients without samples never train, but evaluation needs a plan for each
        classes += (replace(classes[0], clients=idle, options=(), counts=()),)
    able = frozenset(i for group in classes if group.options for i in group.clients)
    return replace(_run_fleet(inputs, able, binding), classes=classes)


def _menus(inputs: FleetInputs, plan: PlanSettings, *, all_steps: bool) -> dict[int, Menu]:
    """The menu of every client with training samples; clients with equal batches share one."""
    context = inputs.context
    known: dict[int, Menu] = {}
    menus = {}
    for client, samples in inputs.examples.items():
        if not samples:
            continue
        # With epochs, the number of steps depends on the number of samples too.
        rows = samples if context.local.epochs else min(samples, context.local.batch)
        if rows not in known:
            known[rows] = make_menu(
                context,
                inputs.profile,
                plan,
                rows,
                inputs.extra,
                codes=inputs.settings.codes,
                all_steps=all_steps,
            )
        menus[client] = known[rows]
    return menus


def plan_shares(
    inputs: FleetInputs,
    levels: Sequence[float],
    plans_at: Callable[[float], Sequence[ClientPlan]],
) -> tuple[RunFleet, tuple[float, ...]]:
    """The fleet whose clients get the largest sub-model that fits, and each client's `keep`.

    Args:
        inputs: the run and its devices.
        levels: the shares that a client may have.
        plans_at: a share -> the plans of all clients if all have this share.
    """
    settings = inputs.settings
    violated = _violation_counter(inputs)
    keep: dict[int, float] = {}
    binding: dict[int, str] = {}
    for level in sorted(levels, reverse=True):
        for plan in plans_at(level):
            if plan.client in keep:
                continue
            limit = violated(plan)
            if limit:
                binding.setdefault(plan.client, limit)
            else:
                keep[plan.client] = level
    able = frozenset(i for i in keep if inputs.examples.get(i, 0))
    if not able:
        raise PlanError(
            f"no device of this fleet fits even a share of {min(levels):g} of the network within "
            f"{settings.memory_share:g} of its memory and {settings.round_seconds:g} seconds a "
            "round; raise one of these limits, or use a smaller network"
        )
    shares = tuple(keep.get(i, min(levels)) for i in range(len(inputs.devices)))
    return _run_fleet(inputs, able, binding), shares


def as_planned(inputs: FleetInputs, plans: Sequence[ClientPlan]) -> RunFleet:
    """The fleet under plans that the config makes; devices without the memory for them are out.

    Args:
        inputs: the run and its devices.
        plans: the plans of all clients in the first round, and where they follow a schedule in
            every round until it begins again.
    """
    violated = _violation_counter(inputs)
    binding: dict[int, str] = {}
    for plan in plans:
        if binding.get(plan.client) != "memory":
            binding[plan.client] = violated(plan) or binding.get(plan.client, "")
    able = frozenset(
        i for i, limit in binding.items() if limit != "memory" and inputs.examples.get(i, 0)
    )
    if not able:
        peak_of = peak_counter(inputs)
        least = min(peak_of(plan) for plan in plans) / 1e6
        raise PlanError(
            f"no device of this fleet can hold its plan, which takes {least:.0f} MB or more, in "
            f"{inputs.settings.memory_share:g} of its memory; raise devices.memory_share, or set "
            "devices.planner = 'auto'"
        )
    if inputs.settings.round_end == "deadline" and not inputs.settings.bandwidth:
        _refuse_unmet(inputs, [plan for plan in plans if plan.client in able])
    return _run_fleet(inputs, able, binding)


def _refuse_unmet(inputs: FleetInputs, plans: Sequence[ClientPlan]) -> None:
    """Refuse a deadline that none of these plans meets on its device."""
    work_of = work_counter(inputs)
    least = math.inf
    for plan in plans:
        work = work_of(plan)
        device = inputs.devices[plan.client]
        least = min(least, sum(transfer_and_work(device, work.down, work.up, work.gflop)))
    if least > inputs.settings.round_seconds:
        raise PlanError(
            f"[devices] round_seconds: no device can answer within "
            f"{inputs.settings.round_seconds:g} seconds; the fastest takes "
            f"{math.ceil(1000 * least) / 1000:g}. Set round_seconds to that or more, or planner to "
            "'auto'"
        )


def _run_fleet(inputs: FleetInputs, able: frozenset[int], binding: Mapping[int, str]) -> RunFleet:
    settings, devices, context = inputs.settings, inputs.devices, inputs.context
    return RunFleet(
        settings=settings,
        devices=devices,
        timings=make_timings(devices, context.seed, settings.availability, settings.bandwidth),
        able=able,
        binding=tuple(binding.get(i, "") for i in range(len(devices))),
        profile=inputs.profile,
        work_of=work_counter(inputs),
    )


def _violation_counter(inputs: FleetInputs) -> Callable[[ClientPlan], str]:
    """A function from a client's plan to the limit that it exceeds on its device.

    The limit is memory, or the longest phase of a round that takes too long; empty if there is
    none.
    """
    settings = inputs.settings
    work_of, peak_of = work_counter(inputs), peak_counter(inputs)

    def violated(plan: ClientPlan) -> str:
        device, work = inputs.devices[plan.client], work_of(plan)
        limits = Limits.of(device, settings.memory_share, settings.round_seconds)
        if peak_of(plan) > limits.memory:
            return "memory"
        takes = sum(transfer_and_work(device, work.down, work.up, work.gflop))
        if takes <= limits.seconds:
            return ""
        return longest_phase(device, work.down, work.up, work.gflop)

    return violated


# --------------------------------------------------------------------------- costs of plans


def work_counter(inputs: FleetInputs) -> WorkOf:
    """A function from a client's plan to the bytes and GFLOP that it takes; it remembers plans."""
    context, examples = inputs.context, inputs.examples
    exchanged = exchange_bytes(inputs.extra)

    def work_of(plan: ClientPlan) -> Work:
        spec = context.spec
        bytes_of = traffic(plan, spec.layers, spec.pruning, spec.compression, spec.download)
        gflop = round_gflop(inputs.profile, plan, context, examples[plan.client])
        # A client that missed many rounds is sent a copy: no download is longer.
        return Work(bytes_of.copy + exchanged, bytes_of.up + exchanged, gflop)

    return once_per_plan(work_of, lambda plan: examples[plan.client])


def peak_counter(inputs: FleetInputs) -> Callable[[ClientPlan], int]:
    """A function from a client's plan to the bytes that a local step needs; it remembers plans."""
    context, local = inputs.context, inputs.context.local

    def rows(plan: ClientPlan) -> int:
        return max(1, min(local.batch, inputs.examples[plan.client]))

    def peak_of(plan: ClientPlan) -> int:
        return client_bytes(context, inputs.profile, plan, rows(plan))

    return once_per_plan(peak_of, rows)
