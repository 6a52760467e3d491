"""What the page shows about the devices of a run: the fleet, a round, and a table by device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from fedp3.core.scores import Score
from fedp3.report import text
from fedp3.report.device_classes import DeviceClass, device_classes, limits_text
from fedp3.report.device_svg import (
    fleet_picture,
    fleet_tips,
    glyphs,
    level_class,
    timeline_picture,
    timeline_tips,
)
from fedp3.report.fleets import fleet
from fedp3.report.runs import Run, mean
from fedp3.report.table import Head, Table, plain
from fedp3.report.timelines import note, timeline

WIDE, NARROW = 560, 320  # pixels of the two drawings of a picture
HEIGHTS = {WIDE: 380, NARROW: 300}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A drawing for wide screens and one for narrow screens, with their legend."""

    title: str
    wide: Markup
    narrow: Markup
    legend: tuple[tuple[str, str, str], ...]  # class of the mark, its character, meaning
    note: str


@dataclass(frozen=True, slots=True)
class DevicePanel:
    """Devices of one run."""

    pictures: tuple[Picture, ...]
    classes: Table


def device_panel(run: Run, i: int, tips: dict[str, Any]) -> DevicePanel | None:
    """The devices of run i; None if it has none.  Adds to `tips` what pictures show on hover."""
    seed = run.seeds[0]
    which = f" Shown for seed {seed.config['run']['seed']}." if len(run.seeds) > 1 else ""
    pictures = []
    devices = fleet(seed)
    if devices is not None:
        shapes = tuple(("grey", glyph, kind) for kind, glyph in glyphs(devices).items())
        levels = tuple(
            (level_class(level), "", meaning) for level, meaning in devices.legend.items()
        )
        wide, narrow = _both(
            f"fleet-{i}",
            tips,
            lambda key, width: fleet_picture(devices, key, width, HEIGHTS[width]),
            lambda width: fleet_tips(devices, width, HEIGHTS[width]),
        )
        pictures.append(
            Picture(
                title="Fleet: memory against speed",
                wide=wide,
                narrow=narrow,
                legend=levels + shapes,
                note=devices.note + which,
            )
        )
    shown = timeline(seed)
    if shown is not None:
        wide, narrow = _both(
            f"timeline-{i}",
            tips,
            lambda key, width: timeline_picture(shown, key, width),
            lambda width: timeline_tips(shown, width),
        )
        pictures.append(
            Picture(
                title=f"Round {shown.round} in virtual time",
                wide=wide,
                narrow=narrow,
                legend=tuple((kind, "", meaning) for kind, meaning in shown.legend.items()),
                note=note(shown) + which,
            )
        )
    return (
        DevicePanel(tuple(pictures), class_table(device_classes(run), run.score))
        if pictures
        else None
    )


def _both(
    key: str,
    tips: dict[str, Any],
    draw: Callable[[str, int], Markup],
    describe: Callable[[int], Mapping[str, Any]],
) -> tuple[Markup, Markup]:
    """A picture for wide and one for narrow screens; both show the same texts on hover."""
    narrow = f"{key}-narrow"
    tips[key], tips[narrow] = describe(WIDE), dict(describe(NARROW))
    for name in ("titles", "lines"):
        del tips[narrow][name]
    tips[narrow]["texts_of"] = key
    return draw(key, WIDE), draw(narrow, NARROW)


COLUMNS: Mapping[str, str] = {  # heading -> meaning
    "Device": "name of the device",
    "Clients": "clients that have it",
    "In full (L_i)": "layers that it trains in full and uploads",
    "Memory, GB": "memory of the device",
    "GFLOP/s": "sustained speed",
    "Round (s)": "seconds of a round, as planned",
    "Binding limit": "what keeps it from training more",
    "Used": "share of its tasks whose update was aggregated",
    "D": "{score} of the model as dispatched, mean over its clients",
    "P": "{score} after one local update, mean over its clients",
}
TEXTS = ("Device", "In full (L_i)", "Binding limit")  # columns that hold no numbers


def class_table(classes: Sequence[DeviceClass], score: Score) -> Table:
    """A line for each device.

    Args:
        classes: the devices.
        score: what D and P are.
    """
    return Table(
        name="devices",
        title="Means over the clients of each device",
        heads=tuple(
            Head(name=name, meaning=meaning.format(score=score.name), number=name not in TEXTS)
            for name, meaning in COLUMNS.items()
        ),
        rows=plain(
            (
                c.name,
                f"{c.clients:g}" if c.clients == round(c.clients) else f"{c.clients:.1f}",
                c.trains,
                text.number(c.memory_mb / 1e3),
                text.number(c.gflops),
                text.number(mean(c.seconds)),
                limits_text(c.limits),
                text.NONE if c.used is None else f"{100 * c.used:.0f}{text.NBSP}%",
                *(text.score_stat(score, a).replace(" ", text.NBSP) for a in (c.D, c.P)),
            )
            for c in classes
        ),
    )
