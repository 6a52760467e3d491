"""Measure this machine: speed of training, memory, disk, and the way to a server.

Measurements describe a machine.  They enter a run only as numbers of a fleet file, which stays as
it is, so that no result depends on a timing.
"""

import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedp3.core.errors import InputError
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.core.threads import one_thread

Clock = Callable[[], float]

MEMINFO = Path("/proc/meminfo")
BATCH = 32
DISK_MB = 64
CONNECTS = 5
CONNECT_TIMEOUT = 5.0  # seconds
REPEATS = 5  # of the measurement of GFLOP/s


def workload() -> tuple[nn.Module, Tensor]:
    """The network that is trained, and a batch for it: two convolutions and two linear layers."""
    rng = stream(0, Stream.INIT)
    with layers_draw_from(rng):
        net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 8 * 8, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
    return net, torch.randn(BATCH, 3, 32, 32, generator=rng)


def step(net: nn.Module, batch: Tensor) -> None:
    """One forward and backward pass."""
    net.zero_grad()
    net(batch).square().mean().backward()


def step_flops(net: nn.Module, batch: Tensor) -> int:
    """FLOPs of one step: two for each multiplication with a weight and its addition."""
    with FlopCounterMode(display=False) as counter:
        step(net, batch)
    return int(counter.get_total_flops())


def training_gflops(
    seconds: float, repeats: int, clock: Clock = time.perf_counter
) -> tuple[float, ...]:
    """GFLOP/s of float32 training on one thread, once for each repeat.

    Args:
        seconds: the length of a repeat; it ends with the first step that ends later.
        repeats: how often it is measured.
        clock: returns the time in seconds.
    """
    net, batch = workload()
    flops = step_flops(net, batch)
    with one_thread():  # as the clients of a run compute
        step(net, batch)  # the first step also allocates and chooses kernels
        return tuple(
            flops * _steps_a_second(net, batch, seconds, clock) / 1e9 for _ in range(repeats)
        )


def _steps_a_second(net: nn.Module, batch: Tensor, seconds: float, clock: Clock) -> float:
    began = clock()
    steps = 0
    while True:
        step(net, batch)
        steps += 1
        elapsed = clock() - began
        if elapsed >= seconds:
            return steps / elapsed


def total_memory_mb(meminfo: Path = MEMINFO) -> float:
    """All memory of this machine in megabytes of 10^6 bytes, from the kernel's own account."""
    try:
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemTotal":
                return int(rest.split()[0]) * 1024 / 1e6
    except (OSError, ValueError, IndexError):
        pass
    raise InputError(
        f"{meminfo} does not say how much memory this machine has; write its line of the fleet "
        "file by hand"
    )


def disk_mb_per_second(folder: Path, clock: Clock = time.perf_counter) -> float:
    """MB/s that are written to a file without a name in this folder, and synced to the disk."""
    block = os.urandom(2**20)  # a disk that compresses must not gain from it
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            began = clock()
            for _ in range(DISK_MB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return DISK_MB * len(block) / 1e6 / (clock() - began)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror or error}") from None


def parse_address(server: str) -> tuple[str, int]:
    """Split HOST:PORT, where an IPv6 host is in brackets."""
    host, _, port = server.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(f"--server {server!r}: want HOST:PORT, as in 192.168.1.5:9092")
    return host, int(port)


def connect_seconds(host: str, port: int, clock: Clock = time.perf_counter) -> float | None:
    """The median time to open a TCP connection, about one round trip; None if it fails."""
    times = []
    for _ in range(CONNECTS):
        began = clock()
        try:
            with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT):
                times.append(clock() - began)
        except OSError:
            return None
    return statistics.median(times)


# --------------------------------------------------------------------------- all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was measured of this machine.

    Args:
        rates: GFLOP/s of training, once for each repeat.
        memory_mb: all of its memory.
        disk: MB/s that are written.
        latency: seconds to connect to the server; None if that failed, or none was named.
    """

    rates: tuple[float, ...]
    memory_mb: int
    disk: float
    latency: float | None

    @property
    def gflops(self) -> float:
        """The median of the repeats, with three digits."""
        return float(f"{statistics.median(self.rates):.3g}")


def measure_machine(
    seconds: float, folder: Path, address: tuple[str, int] | None, note: Callable[[str], None]
) -> Machine:
    """Measure this machine.

    Args:
        seconds: how long to train.
        folder: where the disk is measured.
        address: host and port of a server; None if there is none.
        note: is told what is measured next.
    """
    memory = total_memory_mb()
    note("measuring the disk")
    disk = disk_mb_per_second(folder)
    latency = None
    if address is not None:
        note(f"connecting to {address[0]}, port {address[1]}")
        latency = connect_seconds(*address)
    note(f"training for {seconds:g} s on one thread")
    rates = training_gflops(seconds / REPEATS, REPEATS)
    return Machine(rates=rates, memory_mb=round(memory), disk=disk, latency=latency)
