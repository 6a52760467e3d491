"""Measuring this machine: what is counted; no test depends on how long anything takes."""

import itertools
import socket

import pytest
import torch

from fedp3.core.errors import InputError
from fedp3.devices import measurement


def linear(step: float):
    """A clock that goes on by `step` with each look at it."""
    ticks = itertools.count()
    return lambda: step * next(ticks)


def test_the_flops_of_a_step_are_those_of_its_layers():
    """Two per multiplication: forward, by weight, and by input except for the first layer."""
    conv1, conv2 = 32 * 32 * 32 * 3 * 9, 64 * 16 * 16 * 32 * 9
    linear1, linear2 = 4096 * 128, 128 * 10
    wanted = 2 * measurement.BATCH * (2 * conv1 + 3 * (conv2 + linear1 + linear2))
    assert measurement.step_flops(*measurement.workload()) == wanted


def test_the_speed_is_flops_over_time():
    flops = measurement.step_flops(*measurement.workload())
    rates = measurement.training_gflops(1.0, 3, linear(0.5))
    assert rates == pytest.approx([flops * 2 / 1e9] * 3), "a step takes half a second of this clock"


def test_measuring_changes_neither_threads_nor_the_global_generator():
    torch.set_num_threads(2)
    try:
        before = torch.random.get_rng_state()
        measurement.training_gflops(0.0, 1, linear(1.0))
        assert torch.get_num_threads() == 2
        assert torch.equal(torch.random.get_rng_state(), before)
    finally:
        torch.set_num_threads(1)


def test_the_memory_is_that_of_the_kernels_account(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemFree:  1 kB\nMemTotal:       16000000 kB\nSwapTotal: 5 kB\n")
    assert measurement.total_memory_mb(path) == 16_384.0


@pytest.mark.parametrize("text", [None, "", "MemTotal: much\n", "MemTotal:\n"])
def test_an_unknown_memory_is_an_error_that_says_what_to_do(text, tmp_path):
    path = tmp_path / "meminfo"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match="by hand"):
        measurement.total_memory_mb(path)


def test_the_disk_is_written_and_left_as_it_was(tmp_path):
    speed = measurement.disk_mb_per_second(tmp_path, linear(2.0))
    assert speed == pytest.approx(64 * 2**20 / 1e6 / 2.0)
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="cannot write"):
        measurement.disk_mb_per_second(tmp_path / "none")


def test_a_server_that_listens_is_timed_and_one_that_does_not_is_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert measurement.connect_seconds("127.0.0.1", port, linear(0.25)) == 0.25
    assert measurement.connect_seconds("127.0.0.1", port) is None


@pytest.mark.parametrize(
    ("text", "address"), [("localhost:9092", ("localhost", 9092)), ("[::1]:80", ("::1", 80))]
)
def test_addresses_are_split(text, address):
    assert measurement.parse_address(text) == address


@pytest.mark.parametrize("text", ["", "localhost", ":80", "localhost:", "a:x", "a:0", "a:70000"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(InputError, match="HOST:PORT"):
        measurement.parse_address(text)
