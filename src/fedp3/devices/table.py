"""Real phones and boards by name, with what each can do and where its numbers come from.

Every number is published, derived from a published number by a rule in this module, or assumed;
the `source` of each device says which.  A fleet file overrules any of them
(`fedp3.devices.fleet_file`), and `fedp3 devices measure` measures the machine that it runs on.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fedp3.core.errors import InputError
from fedp3.core.registry import Registry

# What a fleet file can set; each number is positive, and `available` is at most 1.
NUMBERS = ("memory_mb", "gflops", "mbps_down", "mbps_up", "available")

# GFLOP/s per point of AI Benchmark's float score of the CPU; `gflops_of_score` says why.
GFLOPS_PER_POINT = 0.01
# Published rates of Snapdragon 8 CPUs lie within this factor of the rule, in either direction.
SCORE_FACTOR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one device can do.

    Args:
        name: the model.
        kind: "phone", "board", or "own" for a device that only a fleet file describes.
        year: of its release; None if nobody said.
        memory_mb: all of its RAM, in megabytes of 10^6 bytes.  What is free is less.
        gflops: GFLOP/s (10^9 float32 operations a second) that training sustains on its CPU.
        mbps_down: what it receives, in Mbit/s.
        mbps_up: what it sends, in Mbit/s.
        watts: what it draws while it computes; None if nobody measured it.
        available: the share of time in which it can take part.
        source: where these numbers come from, and which of them are assumed.
    """

    name: str
    kind: str
    year: int | None = None
    memory_mb: float
    gflops: float
    mbps_down: float
    mbps_up: float
    watts: float | None = None
    available: float
    source: str

    def __post_init__(self) -> None:
        wrong = list(mistakes({name: getattr(self, name) for name in NUMBERS}))
        if wrong:
            raise InputError(f"device {self.name!r}: {'; '.join(wrong)}")


def mistakes(numbers: Mapping[str, float]) -> Iterator[str]:
    """Yield a sentence for every number that no device can have.

    Args:
        numbers: values by their names, which are among `NUMBERS`, or watts.
    """
    for name, value in numbers.items():
        if not (math.isfinite(value) and value > 0):
            yield f"{name} is {value:g}, want a number above 0"
        elif name == "available" and value > 1:
            yield f"available is {value:g}, want a share of time in (0, 1]"


def gflops_of_score(score: float) -> float:
    """GFLOP/s of float32 training that are assumed for a phone of a known benchmark score.

    The score is the float score of the CPU in AI Benchmark, as listed in 2020.  It is assumed to be
    proportional to the speed of training.  One published number fixes the factor: on the CPUs of
    Snapdragon 8 processors, the kernels of training run at 15 to 30 GFLOP/s (Das et al., arXiv
    2202.10100, abstract).  The middle of this range, sqrt(15 * 30) = 21.2, is assumed to belong to
    the median score of the 88 listed phones with such a processor, 2213: 0.0096 GFLOP/s a point,
    rounded to 0.01.

    A phone may be twice as fast or half as fast (`SCORE_FACTOR`): this covers the published range
    and the spread of these scores.  For old phones, far below the anchor, and for networks that
    spend their time on moving memory, the error can be larger.
    """
    if not (math.isfinite(score) and score > 0):
        raise InputError(f"the score is {score:g}, want a number above 0")
    return GFLOPS_PER_POINT * score


def find(name: str) -> Device | None:
    """The device of this name, whatever its capitals, spaces and signs (pixel-3), or None."""
    return next((d for d in DEVICES.values() if _letters(d.name) == _letters(name)), None)


def _letters(name: str) -> str:
    return "".join(c for c in name.casefold() if c.isalnum())


DEVICES: Registry[Device] = Registry("device", find=find)


# --------------------------------------------------------------------------- phones

# One phone from each twentieth of a list of 333, sorted by score: drawn uniformly, they have its
# distribution of speeds.  (name, year, GB of RAM, GFLOP/s by `gflops_of_score`, rounded)
_PHONES = (
    ("Nexus S", 2010, 0.5, 1.9),
    ("Galaxy Note", 2011, 1.0, 2.4),
    ("Desire 310", 2014, 0.5, 2.8),
    ("Galaxy A3", 2014, 1.5, 3.8),
    ("Moto G4", 2016, 2.0, 4.6),
    ("Realme C2", 2019, 2.0, 6.1),
    ("P20 lite", 2018, 4.0, 8.6),
    ("Fairphone 3", 2019, 4.0, 13.0),
    ("Galaxy A50", 2019, 6.0, 14.0),
    ("Nokia 7 plus", 2018, 4.0, 15.0),
    ("Pixel 3a", 2019, 4.0, 16.0),
    ("Xperia XZ1", 2017, 4.0, 17.0),
    ("Pocophone F1", 2018, 6.0, 19.0),
    ("P20 Pro", 2018, 6.0, 20.0),
    ("Mi 9T", 2019, 6.0, 21.0),
    ("Pixel 3", 2018, 4.0, 23.0),
    ("Redmi Note 8 Pro", 2019, 8.0, 30.0),
    ("Pixel 4", 2019, 6.0, 32.0),
    ("Honor 20 Pro", 2019, 8.0, 35.0),
    ("Galaxy Fold", 2019, 12.0, 39.0),
)
_PHONE_SOURCE = (
    "RAM, year and benchmark score: ai-benchmark.com, as listed in the FLASH repository "
    "(github.com/PKU-Chengxu/FLASH). GFLOP/s: derived from the score, within a factor of two at "
    "best. Link: assumed from year and RAM. Available: assumed, eight hours a night. "
    "Watts: not known."
)
_LAST_YEAR_OF_3G = 2012
_NIGHT = 8 / 24


def assumed_link(year: int, memory_gb: float) -> tuple[float, float]:
    """Mbit/s down and up that are assumed for a phone; a model does not determine its network.

    Phones up to 2012 have 3G at 3 Mbit/s.  Later ones have 25 Mbit/s, and those with at least 8 GB
    of RAM 100 Mbit/s: the numbers of a middle and a high phone in the README of FedLab-ZMQ.
    Sending is assumed to be five times slower than receiving.
    """
    if year <= _LAST_YEAR_OF_3G:
        down = 3.0
    elif memory_gb < 8:
        down = 25.0
    else:
        down = 100.0
    return down, down / 5


def _phone(name: str, year: int, gb: float, gflops: float) -> Device:
    down, up = assumed_link(year, gb)
    return Device(
        name=name,
        kind="phone",
        year=year,
        memory_mb=1000 * gb,
        gflops=gflops,
        mbps_down=down,
        mbps_up=up,
        available=_NIGHT,
        source=_PHONE_SOURCE,
    )


PHONES = tuple(_phone(*row) for row in _PHONES)

# --------------------------------------------------------------------------- boards

_LINPACK = (
    "GFLOP/s: the measured float64 rate of LINPACK on all cores, {source}; assumed that float32 "
    "doubles it and that training reaches half of that. Link: {link}. "
    "Available: assumed, always on."
)
_TOP500 = "and watts, github.com/geerlingguy/top500-benchmark"
_FEDLAB = "the README of FedLab-ZMQ, the same in both directions"
# (name, year, GB of RAM, GFLOP/s, Mbit/s, watts, source)
_BOARDS = (
    (
        *("raspberry-pi-zero-2w", 2021, 0.5, 2.6, 20.0, 2.1),
        "GFLOP/s: assumed, the rate of the Raspberry Pi 3, which has the same cores, scaled by the "
        "clock (1.0 to 1.4 GHz). LINPACK measured 0.37 with a matrix that fills the memory "
        "(github.com/geerlingguy/top500-benchmark, also watts). "
        f"Link: {_FEDLAB}. Available: assumed, always on.",
    ),
    (
        *("raspberry-pi-3", 2018, 1.0, 3.7, 20.0, 5.0),
        _LINPACK.format(
            source="and watts, a sixteenth of a cluster of 16 boards with 60 GFLOP/s at 80 W "
            "(Basford et al. 2019, abstract; the best of three boards, of which two are "
            "Raspberry Pi 3)",
            link="assumed, as the Raspberry Pi Zero 2 W",
        ),
    ),
    (
        *("raspberry-pi-4", 2019, 4.0, 12.0, 50.0, 7.2),
        _LINPACK.format(source=f"11.9 {_TOP500}", link=_FEDLAB),
    ),
    (
        *("raspberry-pi-5", 2023, 8.0, 30.0, 80.0, 11.0),
        _LINPACK.format(source=f"30.2 {_TOP500}", link="assumed, as the Jetson Nano"),
    ),
    (
        *("jetson-nano", 2019, 4.0, 9.4, 80.0, 10.0),
        "GFLOP/s: assumed, the rate of the Raspberry Pi 4 scaled by the clock (1.43 to 1.8 GHz); "
        "its CPU alone, not the GPU, whose peak is often quoted as 472. Watts: its power mode of "
        f"10 W. Link: {_FEDLAB}. Available: assumed, always on.",
    ),
    (
        *("orange-pi-5", 2022, 4.0, 53.0, 80.0, 11.5),
        _LINPACK.format(source=f"53.3 {_TOP500}", link="assumed, as the Jetson Nano"),
    ),
)


def _board(
    name: str, year: int, gb: float, gflops: float, mbps: float, watts: float, source: str
) -> Device:
    return Device(
        name=name,
        kind="board",
        year=year,
        memory_mb=1000 * gb,
        gflops=gflops,
        mbps_down=mbps,
        mbps_up=mbps,
        watts=watts,
        available=1.0,
        source=source,
    )


BOARDS = tuple(_board(*row) for row in _BOARDS)

for device in PHONES + BOARDS:
    DEVICES.add(device.name, device)

# The device of a client whose node has not said what it is; nothing fits into it.
UNREPORTED = Device(
    name="not reported",
    kind="own",
    memory_mb=1e-6,
    gflops=1e-6,
    mbps_down=1e-6,
    mbps_up=1e-6,
    available=1.0,
    source="the node had not reported itself when the run began",
)
