"""The options of a device are those of a search over every window, share, split and step count."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedp3.client.context import ClientContext
from fedp3.core.types import ClientPlan
from fedp3.costs.compute import measure, peak_bytes
from fedp3.costs.device_time import round_gflop
from fedp3.costs.traffic import Traffic, retained_parameters, traffic
from fedp3.devices.options import (
    EMPTY,
    KEEPS,
    Limits,
    Menu,
    Option,
    Window,
    binding_limit,
    effective_samples,
    make_menu,
    options_of,
    smallest_change,
    transfer_and_work,
    window_plans,
)
from fedp3.devices.table import DEVICES, Device
from fedp3.planning.client_plans import PlanSettings
from worlds import world

FREEZE = PlanSettings(others="freeze")
PHONE = DEVICES.pick("Pixel 3")


def device(**numbers: float) -> Device:
    usual = {
        "memory_mb": 1.0,
        "gflops": 1e-3,
        "mbps_down": 0.1,
        "mbps_up": 0.05,
        "available": 1.0,
    }
    return Device(name="test", kind="own", source="a test", **(usual | numbers))  # type: ignore[arg-type]


def menu_of(
    kind: str = "mlp", samples: int = 4, codes: Sequence[str] = (), **changes: Any
) -> tuple[Menu, ClientContext]:
    here = world(kind, steps=4, batch=4, **changes)
    context = here.context
    profile = measure(context.net, tuple(context.data.x.shape[1:]))
    return make_menu(context, profile, FREEZE, samples, {}, codes=codes), context


def positions(window: Window) -> frozenset[int]:
    return frozenset() if window == EMPTY else frozenset(range(int(window[0]), int(window[1]) + 1))


@cache
def everything(kind: str) -> list[tuple[frozenset[int], float, Traffic, float, float]]:
    """For every window, share, split and number of steps: what is trained, and what it costs."""
    menu, context = MENUS[kind]
    layers, local = context.layers, context.local
    H = len(layers.hidden)
    windows = [(a, b) for a, b in product(range(H), range(H)) if a <= b]
    total = sum(w.numel() for w in context.net.parameters())
    rows = []
    for window, keep in product([*windows, EMPTY], KEEPS):
        for split, steps in product((1, 2, 4), range(1, local.steps + 1)):
            plan = ClientPlan(
                0, window_plans(layers, FREEZE, window, keep), steps=steps, split=split
            )
            share = retained_parameters(plan, layers, context.pruning) / total
            rows.append(
                (
                    positions(window),
                    round(menu.rows * steps * share, 6),
                    traffic(plan, layers, context.pruning),
                    round_gflop(menu.profile, plan, context, menu.rows),
                    peak_bytes(menu.profile, plan, layers, context.pruning, menu.rows, False),
                )
            )
    return rows


def naive(kind: str, device: Device, limits: Limits) -> set[Any]:
    """Try everything; keep what trains most of each set of layers, and drop what is dominated."""
    fits = []
    for trained, samples, bytes_of, gflop, peak in everything(kind):
        seconds = (
            8 * bytes_of.down / (1e6 * device.mbps_down)
            + gflop / device.gflops
            + 8 * bytes_of.up / (1e6 * device.mbps_up)
        )
        if seconds <= limits.seconds and peak <= limits.memory:
            fits.append((trained, samples))
    return {
        (trained, samples)
        for trained, samples in fits
        if not any(
            trained <= other and samples <= more and (trained, samples) != (other, more)
            for other, more in fits
        )
    }


def found(menu: Menu, options: tuple[Option, ...]) -> set[Any]:
    rows = set()
    for option in options:
        trained = positions(option.candidate.window)
        rows.add((trained, round(effective_samples(menu, option), 6)))
    return rows


@pytest.mark.parametrize("kind", ["mlp", "cnn", "groupnorm"])
@given(memory=st.floats(1e3, 4e4), seconds=st.floats(0.01, 2.0), speed=st.floats(1e-6, 1e-3))
@settings(max_examples=25, deadline=None)
def test_options_are_those_of_an_exhaustive_search(
    kind: str, memory: float, seconds: float, speed: float
) -> None:
    menu, _ = MENUS[kind]
    phone, limits = device(gflops=speed), Limits(memory, seconds)
    assert found(menu, options_of(menu, phone, limits)) == naive(kind, phone, limits)


MENUS = {kind: menu_of(kind) for kind in ("mlp", "cnn", "groupnorm")}


@given(memory=st.floats(1e3, 4e4), seconds=st.floats(0.01, 2.0), link=st.floats(1e-4, 1e-1))
@settings(max_examples=40, deadline=None)
def test_an_upload_has_the_most_bits_that_cost_no_step(
    memory: float, seconds: float, link: float
) -> None:
    """Compared with every code and number of steps; a coarser code only ever adds options."""
    menu, context = CODED
    phone, limits = device(gflops=1e-4, mbps_up=link), Limits(memory, seconds)
    spec = context.spec
    options = options_of(menu, phone, limits)
    for option in options:
        fits = []
        for code, steps in product(("", *CODES), range(1, menu.steps + 1)):
            plan = replace(option.plan, client=0, code=code, steps=steps)
            bytes_of = traffic(plan, spec.layers, spec.pruning, spec.compression, spec.download)
            gflop = round_gflop(menu.profile, plan, context, menu.rows)
            if sum(transfer_and_work(phone, bytes_of.copy, bytes_of.up, gflop)) <= seconds:
                fits.append((steps, bytes_of.up, code))
        steps, _, code = max(fits)
        assert (option.steps or menu.steps, option.code) == (steps, code)
    uncoded, _ = MENUS["mlp"]
    before = found(uncoded, options_of(uncoded, phone, limits))
    now = found(menu, options)
    assert all(any(a <= c and b <= d for c, d in now) for a, b in before)


CODES = ("int8", "ternary")
CODED = menu_of("mlp", codes=CODES)


def test_without_a_time_limit_uploads_have_the_bits_of_the_run() -> None:
    menu, _ = CODED
    (option,) = options_of(menu, PHONE, Limits(1e12, float("inf")))
    assert (option.code, option.plan.code) == ("", "")


def test_without_limits_the_one_option_is_to_train_everything() -> None:
    menu, _ = MENUS["mlp"]
    (option,) = options_of(menu, PHONE, Limits(1e12, float("inf")))
    assert option.plan.full_layers == tuple(menu.context.layers.layers)
    assert (option.steps, option.split) == (0, 1)
    assert binding_limit(menu, PHONE, Limits(1e12, float("inf"))) == ""


def test_a_device_without_memory_or_time_has_no_option() -> None:
    menu, _ = MENUS["mlp"]
    assert options_of(menu, PHONE, Limits(10, 100)) == ()
    assert options_of(menu, PHONE, Limits(1e12, 1e-9)) == ()


@pytest.mark.parametrize(
    ("numbers", "limits", "binds"),
    [
        ({"gflops": 1e-9}, Limits(1e9, 1), "computation"),
        ({"mbps_up": 1e-6}, Limits(1e9, 1), "upload"),
        ({"mbps_down": 1e-6}, Limits(1e9, 1), "download"),
        ({}, Limits(100, 1e9), "memory"),
        ({}, Limits(1e9, 1e9), ""),
    ],
)
def test_the_binding_limit_is_the_one_that_is_short(
    numbers: dict[str, float], limits: Limits, binds: str
) -> None:
    menu, _ = MENUS["mlp"]
    assert binding_limit(menu, device(**numbers), limits) == binds


def test_more_of_a_limit_never_trains_less() -> None:
    menu, _ = MENUS["mlp"]
    before: set[Any] = set()
    for factor in (1, 2, 4, 8, 16, 64):
        options = found(menu, options_of(menu, device(), Limits(2e3 * factor, 0.05 * factor)))
        for trained, samples in before:
            assert any(trained <= more and samples <= n for more, n in options)
        before = options


def test_the_smallest_change_is_one_that_helps_and_a_smaller_one_does_not() -> None:
    menu, _ = MENUS["mlp"]
    phone = device()
    text = smallest_change(menu, [phone], [Limits(1e9, 1e-6)], lambda c: True)
    seconds = float(text.split("round_seconds = ")[1].split()[0])
    assert options_of(menu, phone, Limits(1e9, seconds))
    assert not options_of(menu, phone, Limits(1e9, 0.98 * seconds))
    text = smallest_change(menu, [phone], [Limits(10, 1e9)], lambda c: True)
    share = float(text.split("memory_share = ")[1].split()[0])
    assert options_of(menu, phone, Limits.of(phone, share, 0))
    assert not options_of(menu, phone, Limits.of(phone, 0.98 * share, 0))


def test_with_epochs_and_under_ldp_steps_are_never_reduced() -> None:
    here = world("mlp", steps=4, batch=4).context
    epochs = replace(here, local=replace(here.local, epochs=2))
    for context, all_steps in ((epochs, False), (here, True)):
        profile = measure(context.net, tuple(context.data.x.shape[1:]))
        menu = make_menu(context, profile, FREEZE, 4, {}, all_steps=all_steps)
        assert not menu.varies_steps
        for seconds in (5.0, 6.0, 7.0, 8.0, 9.0, 10.0):
            options = options_of(menu, device(gflops=1e-6), Limits(1e9, seconds))
            assert all(option.steps == 0 for option in options)
        assert options
    profile = measure(here.net, tuple(here.data.x.shape[1:]))
    varied = options_of(
        make_menu(here, profile, FREEZE, 4, {}), device(gflops=1e-6), Limits(1e9, 5)
    )
    assert any(option.steps for option in varied)


def test_networks_with_batch_statistics_are_not_computed_in_parts() -> None:
    menu, _ = menu_of("batchnorm")
    assert not menu.splits and MENUS["mlp"][0].splits
