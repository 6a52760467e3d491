"""Choose plans for a whole fleet, so that every layer is trained enough.

Let s_l be the effective samples of a round that train layer l, over all clients.  The fleet pass
gives every client one of its device's options such that

    F = sum over hidden layers l of log(1 + s_l)

is large.  A layer that few clients train gains most from one more, so that none is neglected, and
among windows that gain the same, the one with more samples wins.  The head is in every L_i and does
not count.  F is increased greedily: at every step one client gets the option that adds most to F,
over all clients that have none yet.  F is monotone and submodular, so that the result is at least
half of the best possible (Fisher, Nemhauser and Wolsey, 1978).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedp3.core.errors import PlanError
from fedp3.core.types import ClientPlan, LayerMap
from fedp3.devices.options import (
    Limits,
    Menu,
    binding_limit,
    effective_samples,
    options_of,
    smallest_change,
)
from fedp3.devices.table import Device
from fedp3.devices.window_draws import DeviceClass

DIGITS = 9  # gains are compared with this many, so that the last bit of a logarithm decides nothing


def plan_fleet(
    devices: Sequence[Device],
    menus: Mapping[int, Menu],
    layers: LayerMap,
    memory_share: float,
    round_seconds: float,
) -> tuple[DeviceClass, ...]:
    """The device classes of a fleet, with the options of each and how often each is used.

    Args:
        devices: the device of every client.
        menus: the candidates of every client that has training samples; clients whose batches are
            equal share one menu.
        layers: the model's layers.
        memory_share: the share of a device's memory that training may use.
        round_seconds: what a round may take; 0 means no limit.

    Raises:
        PlanError: some layer can be trained by no client.
    """
    members: dict[tuple[Device, int], list[int]] = {}
    for client, menu in sorted(menus.items()):
        members.setdefault((devices[client], id(menu)), []).append(client)
    classes, samples = [], []
    for (device, _), clients in members.items():
        menu, limits = menus[clients[0]], Limits.of(device, memory_share, round_seconds)
        options = options_of(menu, device, limits)
        group = DeviceClass(
            device=device,
            clients=tuple(clients),
            options=options,
            counts=(),
            binding=binding_limit(menu, device, limits),
            least=ClientPlan(-1, menu.candidates[-1].layers),
        )
        classes.append(group)
        samples.append([effective_samples(menu, option) for option in options])
    _refuse_untrained(classes, menus, layers, memory_share, round_seconds)
    counts = greedy_counts(
        [len(group.clients) for group in classes],
        [_trained(group, len(layers.hidden)) for group in classes],
        [np.array(row) for row in samples],
    )
    return tuple(
        replace(group, counts=tuple(row)) for group, row in zip(classes, counts, strict=True)
    )


def _trained(group: DeviceClass, hidden: int) -> np.ndarray:
    """(options, hidden layers): whether an option trains a layer."""
    positions = np.arange(hidden)
    windows = [option.candidate.window for option in group.options]
    rows = [(first <= positions) & (positions <= last) for first, last in windows]
    return np.array(rows, dtype=bool).reshape(len(rows), hidden)


def greedy_counts(
    clients: Sequence[int], trained: Sequence[np.ndarray], samples: Sequence[np.ndarray]
) -> list[list[int]]:
    """How many clients of each class get each of its options.

    Args:
        clients: the number of clients of each class.
        trained: for each class (options, layers), whether an option trains a layer.
        samples: for each class the effective samples of each option.
    """
    classes = np.concatenate([np.full(len(row), c) for c, row in enumerate(samples)])
    all_trained, all_samples = np.concatenate(list(trained)), np.concatenate(list(samples))
    left = np.array(clients)
    left[[len(row) == 0 for row in samples]] = 0
    counts = np.zeros(len(classes), dtype=int)
    covered = np.zeros(all_trained.shape[1])
    while left.any():
        gains = np.log1p(all_samples[:, None] / (1 + covered))
        gains = np.round((gains * all_trained).sum(axis=1), DIGITS)
        gains[left[classes] == 0] = -1
        best = int(np.argmax(gains))
        counts[best] += 1
        left[classes[best]] -= 1
        covered += all_samples[best] * all_trained[best]
    return [counts[classes == c].tolist() for c in range(len(samples))]


def _refuse_untrained(
    classes: Sequence[DeviceClass],
    menus: Mapping[int, Menu],
    layers: LayerMap,
    memory_share: float,
    round_seconds: float,
) -> None:
    """Refuse a fleet in which nobody can train some layer, and suggest what would help."""
    hidden = layers.hidden
    reached = np.zeros(len(hidden), dtype=bool)
    for group in classes:
        if group.options:
            reached |= _trained(group, len(hidden)).any(axis=0)
    if reached.all() and any(group.options for group in classes):
        return
    missing = [l for l, ok in zip(hidden, reached, strict=True) if not ok]
    positions = [j for j, ok in enumerate(reached) if not ok]
    devices = [group.device for group in classes]
    menu = menus[classes[0].clients[0]]
    change = smallest_change(
        menu,
        devices,
        [Limits.of(device, memory_share, round_seconds) for device in devices],
        lambda c: any(c.window[0] <= j <= c.window[1] for j in positions) or not positions,
    )
    what = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    limits = f"{memory_share:g} of its memory"
    if round_seconds:
        limits += f" and {round_seconds:g} seconds a round"
    raise PlanError(
        f"no device of this fleet can train {what or 'the head'} within {limits}; the smallest "
        f"change that helps one device: {change}"
    )
