"""Fleet files: a CSV file with one line for the device of each client.

A line that names a known device takes its numbers where the line has none, and overrules them
where it has some.  A line with any other name must have all numbers.
"""

import csv
import io
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedp3.core.errors import InputError
from fedp3.core.files import write_atomic
from fedp3.core.registry import suggestion
from fedp3.devices.table import DEVICES, NUMBERS, Device, find, mistakes
from fedp3.devices.text_files import read_text, refuse

SUFFIX = ".csv"
WHAT = "fleet file"
COLUMNS = ("client", "name", *NUMBERS)
WATTS = "watts"  # a further column, which may be missing or empty: nobody knows the watts of phones
_Line = tuple[int, dict[str, str]]  # its number in the file, and its cells by column


def read_fleet(path: Path, clients: int | None = None) -> tuple[Device, ...]:
    """Read the device of every client, or raise an `InputError` that lists all mistakes.

    Args:
        path: the file.
        clients: the number of clients; None takes as many as the file has.
    """
    devices, named, wrong = _read(path)
    count = len(named) if clients is None else clients
    missing = [i for i in range(count) if i not in named]
    surplus = sorted(i for i in named if i >= count)
    if missing:
        wrong.append(
            f"no line for {_listed(missing)}; "
            f"{count} clients are numbered from 0 to {count - 1} without a hole"
        )
    if surplus and clients is not None:
        wrong.append(f"a line for {_listed(surplus)}, but the run has {count} clients")
    refuse(path, wrong)
    if not devices:
        raise InputError(f"{path} has no line for a client; want {','.join(COLUMNS)}")
    return tuple(devices[i] for i in range(count))


def read_to_extend(path: Path) -> dict[int, Device]:
    """Read a fleet file that is not complete yet: the devices in it, by client."""
    devices, _, wrong = _read(path)
    refuse(path, wrong)
    absent = set(COLUMNS) - set(_rows(path)[0][1])
    if absent:
        raise InputError(f"{path} lacks the columns {', '.join(sorted(absent))}; add them")
    return devices


def extend(path: Path, client: int, device: Device) -> None:
    """Add a line to a file, which is made if necessary; the lines that it has stay as they are."""
    old = read_text(path, WHAT) if path.exists() else _csv([(*COLUMNS, WATTS)])
    separator = "" if old.endswith("\n") else "\n"
    cells = _cells(client, device)
    columns = _rows(path)[0][1] if path.exists() else (*COLUMNS, WATTS)
    new = _csv([[cells[column] for column in columns]])
    write_atomic(path, (old + separator + new).encode())


def write_fleet(path: Path, devices: Sequence[Device]) -> None:
    """Write a file with all numbers of the device of every client."""
    lines = [list(_cells(client, device).values()) for client, device in enumerate(devices)]
    write_atomic(path, _csv([(*COLUMNS, WATTS), *lines]).encode())


def _cells(client: int, device: Device) -> dict[str, str]:
    numbers = {column: repr(float(getattr(device, column))) for column in NUMBERS}
    shown = {column: text.removesuffix(".0") for column, text in numbers.items()}
    watts = "" if device.watts is None else repr(float(device.watts)).removesuffix(".0")
    return {"client": str(client), "name": device.name, **shown, WATTS: watts}


def _csv(rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _read(path: Path) -> tuple[dict[int, Device], Collection[int], list[str]]:
    """The devices of lines without a mistake, all clients that have a line, and all mistakes."""
    lines, wrong = _lines(path)
    devices: dict[int, Device] = {}
    line_of: dict[int, int] = {}
    for number, cells in lines:
        found: list[str] = []
        client = _client(cells["client"])
        if client is None:
            found.append(f"the client is {cells['client']!r:.40}, want an integer from 0")
        elif client in line_of:
            found.append(f"client {client} has line {line_of[client]} already")
        else:
            line_of[client] = number
        device = _device(cells, f"{path.name}, line {number}", found)
        if client is not None and device is not None and not found:
            devices[client] = device
        wrong += [f"line {number}: {text}" for text in found]
    return devices, line_of.keys(), wrong


def _lines(path: Path) -> tuple[list[_Line], list[str]]:
    """The cells of all lines that have as many as the header, and what is wrong with the others."""
    (_, header), *rows = _rows(path)
    unknown = [cell for cell in header if cell not in (*COLUMNS, WATTS)]
    if unknown or len(set(header)) < len(header) or not {"client", "name"} <= set(header):
        raise InputError(
            f"{path}: the columns are {','.join(header)!r:.120}; want "
            f"{','.join((*COLUMNS, WATTS))}, "
            "of which client and name are required, each at most once"
        )
    lines = [
        (number, dict(zip(header, cells, strict=True)))
        for number, cells in rows
        if len(cells) == len(header)
    ]
    wrong = [
        f"line {number}: {len(cells)} cells, want {len(header)}"
        for number, cells in rows
        if len(cells) != len(header)
    ]
    return lines, wrong


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    """The cells of all lines that are not empty, with the numbers of the lines; at least one."""
    reader = csv.reader(io.StringIO(read_text(path, WHAT), newline=""), strict=True)
    rows = []
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any(cells):
                rows.append((reader.line_num, cells))
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}, is not CSV: {error}") from None
    if not rows:
        raise InputError(f"{path} is empty; want {','.join(COLUMNS)}")
    return rows


def _client(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _device(cells: Mapping[str, str], place: str, found: list[str]) -> Device | None:
    """The device of a line; None, with its mistakes added to `found`, if it has any."""
    name = cells["name"]
    known = find(name)
    numbers: dict[str, Any] = {}
    wrong: list[str] = [] if name else ["the name is empty"]
    for column in (*NUMBERS, WATTS):
        text = cells.get(column, "")
        value = _number(text)
        if value is not None:
            numbers[column] = value
        elif text:
            wrong.append(f"{column} is {text!r:.40}, want a number")
    wrong += mistakes(numbers)
    empty = [column for column in NUMBERS if not cells.get(column, "")]
    if name and known is None and empty:
        wrong.append(
            f"unknown device {name!r:.40} ({suggestion(name, DEVICES)}), and no value for "
            f"{', '.join(empty)}; name a known device, or fill in all columns"
        )
    found += wrong
    if wrong:
        return None
    if known is None:
        return Device(name=name, kind="own", **numbers, source=place)
    if all(getattr(known, column) == value for column, value in numbers.items()):
        return known
    return replace(
        known, **numbers, source=f"{', '.join(numbers)}: {place}. The rest: {known.source}"
    )


def _number(text: str) -> float | None:
    """The text as a finite number; None if it is anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in text else None


def _listed(clients: Sequence[int]) -> str:
    shown = ", ".join(map(str, clients[:10]))
    noun = "client" if len(clients) == 1 else "clients"
    return f"{noun} {shown}, ... ({len(clients)})" if len(clients) > 10 else f"{noun} {shown}"
