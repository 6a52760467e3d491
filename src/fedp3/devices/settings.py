"""The settings of a run's devices: which they are, and what a round may take of them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedp3.core.registry import NameIn
from fedp3.core.settings import STRICT, Share
from fedp3.devices.clock import ALWAYS
from fedp3.devices.round_ends import ROUND_ENDS
from fedp3.devices.table import UNREPORTED, Device
from fedp3.devices.window_draws import WINDOW_DRAWS
from fedp3.messages.compressors import COMPRESSORS

NODES = "nodes"  # the fleet that consists of what Flower's nodes report
Positive = Annotated[float, Field(gt=0)]


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """The numbers of one client's device, as a run records them."""

    name: str
    memory_mb: Positive
    gflops: Positive
    mbps_down: Positive
    mbps_up: Positive
    available: Share = 1.0
    watts: Positive | None = None


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class DevicesSettings:
    """The devices of the clients; without a fleet, nothing is known about them."""

    fleet: str | dict[str, Share] | tuple[DeviceRow, ...] = Field(
        default="",
        description="the clients' devices: phones or boards (drawn with the run's seed); a CSV "
        "file with the columns client,name,memory_mb,gflops,mbps_down,mbps_up,available,watts; a "
        "table such as {'Pixel 3' = 0.3, raspberry-pi-4 = 0.7} of devices and their share of the "
        "clients; nodes (what Flower's nodes report); empty means that devices are not described",
    )
    round_seconds: float = Field(
        default=0.0,
        ge=0,
        description="seconds that a client's part of a round may take on its device, in virtual "
        "time; 0 means no limit. run.deadline, in contrast, is real waiting",
    )
    memory_share: Share = Field(
        default=0.25, description="share of a device's memory that training may use"
    )
    planner: Literal["auto", "manual"] = Field(
        default="auto",
        description="auto chooses for each device what it trains, holds and computes; manual "
        "leaves that to plan.layers and prune.keep",
    )
    codes: tuple[Annotated[str, NameIn(COMPRESSORS)], ...] = Field(
        default=(),
        description="with planner = 'auto': codes that a device's uploads may have instead of "
        "upload.compress; each device gets the code with the most bits that costs it no local step",
    )
    windows: Annotated[str, NameIn(WINDOW_DRAWS)] = Field(
        default="balanced",
        description="which of the windows of layers that a device can train it gets: balanced "
        "(over the fleet, redrawn each round), random (each round) or fixed (drawn once)",
    )
    round_end: Annotated[str, NameIn(ROUND_ENDS)] = Field(
        default="wait",
        description="when a round ends in virtual time: wait for all participants; deadline "
        "leaves out who takes longer than round_seconds; first asks over_selection times as many "
        "clients and takes the first; buffered is asynchronous: a round ends with every "
        "buffer-th arrival",
    )
    over_selection: float = Field(
        default=1.3, ge=1, description="with round_end = 'first': how many times more are asked"
    )
    buffer: int = Field(
        default=0,
        ge=0,
        description="with round_end = 'buffered': the number of arrivals that end a round; 0 means "
        "half of clients_per_round, which is how many clients compute at any time",
    )
    availability: str = Field(
        default=ALWAYS,
        description="when devices can take part: always; daily (each for its share of every day, "
        "from an hour that is drawn for it); or a trace file with lines seconds,on and "
        "seconds,off, which every device follows from a moment that is drawn for it",
    )
    bandwidth: str = Field(
        default="",
        description="a trace file with lines seconds,Mbit/s, or a folder of them: links vary over "
        "time as a trace does, with the mean of the device; empty means constant links",
    )

    @property
    def described(self) -> bool:
        """Whether the run knows its devices."""
        return bool(self.fleet)

    @property
    def plans(self) -> bool:
        """Whether plans are chosen for the devices."""
        return self.described and self.planner == "auto"


def row_of(device: Device) -> DeviceRow:
    """What a run records about a device."""
    return DeviceRow(**{f.name: getattr(device, f.name) for f in fields(DeviceRow)})


def device_of(row: DeviceRow) -> Device:
    """The device that a run recorded."""
    numbers: dict[str, Any] = {f.name: getattr(row, f.name) for f in fields(DeviceRow)}
    return Device(**numbers, kind="own", source="recorded with the run")


def recorded_row(row: Mapping[str, Any]) -> DeviceRow | None:
    """A device of a run's description; None if its node had not reported it."""
    if row["name"] == UNREPORTED.name:
        return None
    return DeviceRow(**{f.name: row[f.name] for f in fields(DeviceRow)})
