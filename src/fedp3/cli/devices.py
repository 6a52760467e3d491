"""`fedp3 devices`: known devices, fleets of them, their links, and what this machine can do."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedp3.cli import terminal
from fedp3.cli.options import AsJson
from fedp3.core.errors import InputError

if TYPE_CHECKING:
    from fedp3.devices.measurement import Machine
    from fedp3.devices.table import Device
    from fedp3.devices.traces import Trace

STARTS = 8  # moments of a trace at which a transfer is started

app = typer.Typer(
    help="Known devices, fleets of them, their links, and what this machine can do.",
    no_args_is_help=True,
    epilog="Example: fedp3 devices ls",
)


@app.command("ls")
def ls(json: AsJson = False) -> None:
    """List the known devices.

    Example: fedp3 devices ls
    """
    from dataclasses import asdict

    from fedp3.devices.table import DEVICES

    if json:
        terminal.as_json({"devices": [asdict(device) for device in DEVICES.values()]})
        return
    _table([_cells(device) for device in DEVICES.values()])
    terminal.line("MB: all RAM; Mbit/s: down/up; on: share of time in which it can take part.")
    terminal.line("Where the numbers come from: fedp3 devices show NAME")


def _cells(device: "Device") -> dict[str, str]:
    return {
        "name": device.name,
        "kind": device.kind,
        "year": str(device.year or "-"),
        "MB": f"{device.memory_mb:,.0f}",
        "GFLOP/s": f"{device.gflops:g}",
        "Mbit/s": f"{device.mbps_down:g}/{device.mbps_up:g}",
        "watts": "-" if device.watts is None else f"{device.watts:g}",
        "on": f"{device.available:.2f}",
    }


def _table(rows: Sequence[Mapping[str, str]]) -> None:
    columns = {name: "left" if name in ("name", "kind") else "right" for name in rows[0]}
    terminal.table(columns, [list(row.values()) for row in rows])


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Name of a device, as in `fedp3 devices ls`")],
    json: AsJson = False,
) -> None:
    """Show one device, and where its numbers come from.

    Example: fedp3 devices show "Pixel 3"
    """
    from dataclasses import asdict

    from fedp3.devices.table import DEVICES

    device = DEVICES.pick(name)
    if json:
        terminal.as_json(asdict(device))
        return
    watts = "not known" if device.watts is None else f"{device.watts:g}"
    terminal.line(f"{device.name} ({device.kind}, {device.year})")
    terminal.line(f"  memory     {device.memory_mb:,.0f} MB")
    terminal.line(f"  training   {device.gflops:g} GFLOP/s, float32, on the CPU")
    terminal.line(f"  link       {device.mbps_down:g} Mbit/s down, {device.mbps_up:g} Mbit/s up")
    terminal.line(f"  watts      {watts}")
    terminal.line(f"  available  {terminal.share(device.available, 0)} of the time")
    terminal.line(device.source)


@app.command("score")
def score(
    points: Annotated[
        float, typer.Argument(metavar="SCORE", help="Float score of the CPU in AI Benchmark")
    ],
    json: AsJson = False,
) -> None:
    """Estimate the training speed of a phone that is not listed from its benchmark score.

    Example: fedp3 devices score 2324
    """
    from fedp3.devices.table import SCORE_FACTOR, gflops_of_score

    gflops = gflops_of_score(points)
    low, high = gflops / SCORE_FACTOR, gflops * SCORE_FACTOR
    if json:
        terminal.as_json({"gflops": gflops, "low": low, "high": high})
        return
    terminal.line(f"{gflops:.3g} GFLOP/s, assumed; {low:.3g} to {high:.3g} are possible")


@app.command("fleet")
def fleet(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="FLEET",
            help="phones, boards, a fleet file (.csv), or devices with shares of the clients, as "
            "in 'Pixel 3=0.3,raspberry-pi-4=0.7'",
        ),
    ],
    clients: Annotated[
        int | None,
        typer.Option("--clients", min=1, help="Number of clients; a fleet file knows its own"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the draw")] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Fleet file to write")] = None,
    json: AsJson = False,
) -> None:
    """Check a fleet file or draw a fleet, and show how many clients have which device.

    Example: fedp3 devices fleet phones --clients 100 --out fleet.csv
    """
    from collections import Counter
    from dataclasses import asdict

    from fedp3.devices.fleet_file import SUFFIX, read_fleet, write_fleet
    from fedp3.devices.fleets import make_fleet

    if out is not None:
        _check_new(out, SUFFIX)
    if Path(spec).suffix.lower() == SUFFIX:
        devices = read_fleet(Path(spec), clients)
    elif clients is None:
        raise InputError("a fleet that is drawn needs --clients, the number of clients")
    else:
        devices = make_fleet(_shares(spec) if "=" in spec else spec, clients, seed)
    if out is not None:
        write_fleet(out, devices)
        terminal.note(f"wrote {out}")
    if json:
        terminal.as_json({"clients": [asdict(device) for device in devices]})
        return
    counts = Counter(devices)
    slowest_first = sorted(counts, key=lambda device: (device.gflops, device.name))
    # Without two columns, so that the table fits a terminal.
    left_out = ("kind", "watts")
    _table(
        [
            {"clients": str(counts[device])}
            | {name: cell for name, cell in _cells(device).items() if name not in left_out}
            for device in slowest_first
        ]
    )


def _shares(spec: str) -> Mapping[str, float]:
    """Parse names of devices with shares: 'Pixel 3=0.3,raspberry-pi-4=0.7'."""
    shares: dict[str, float] = {}
    wrong = []
    for part in spec.split(","):
        name, _, text = part.rpartition("=")
        name = name.strip()
        try:
            share = float(text)
        except ValueError:
            share = -1.0
        if not name or name in shares or not 0 < share <= 1:
            wrong.append(repr(part))
        shares[name] = share
    if wrong:
        raise InputError(
            f"cannot read {', '.join(wrong)} of the fleet {spec!r}; want each device once with a "
            "share in (0, 1], as in 'Pixel 3=0.3,raspberry-pi-4=0.7'"
        )
    return shares


def _check_new(out: Path, suffix: str) -> None:
    if out.suffix.lower() != suffix:
        raise InputError(f"--out {out}: a fleet file ends in {suffix}")
    if out.exists():
        raise InputError(f"{out} exists already; remove it, or choose another name")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}")


@app.command("trace")
def trace(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="Bandwidth over time, lines `seconds,Mbit/s`")
    ],
    mb: Annotated[float, typer.Option("--mb", help="Megabytes to transfer")] = 5.0,
    available: Annotated[
        str | None,
        typer.Option(
            "--available",
            help="When the device takes part: the share of each day, from its beginning on, or a "
            "file of lines `seconds,on` and `seconds,off`; a transfer waits to begin until then",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show how long a transfer takes over a link whose bandwidth changes.

    Example: fedp3 devices trace bus.csv --mb 5
    """
    from fedp3.devices import traces

    if not 0 < mb <= 1e9:
        raise InputError(f"--mb {mb:g}: want a number above 0")
    link = traces.read_bandwidth(path)
    presence = traces.constant(1) if available is None else _presence(available)
    size = max(1, round(mb * 1e6))
    period = link.period / traces.MICRO
    rows = []
    for k in range(STARTS):
        start = k * period / STARTS
        waits = traces.waiting_seconds(presence, start)
        takes = traces.transfer_seconds(link, size, start + waits)
        rows.append({"start": start, "waits": waits, "seconds": takes})
    summary: dict[str, Any] = {
        "period": period,
        "intervals": len(link.starts),
        "mbps_mean": traces.mean(link) / traces.MICRO,
        "mbps_min": min(link.values) / traces.MICRO,
        "mbps_max": max(link.values) / traces.MICRO,
        "available": traces.mean(presence),
    }
    if json:
        terminal.as_json({**summary, "mb": mb, "transfers": rows})
        return
    terminal.line(
        f"{summary['intervals']} intervals in {period:,.1f} s, then it repeats; Mbit/s: mean "
        f"{summary['mbps_mean']:.2f}, min {summary['mbps_min']:.2f}, max {summary['mbps_max']:.2f}"
    )
    if available is not None:
        terminal.line(f"available {terminal.share(summary['available'])} of the time")
    terminal.table(
        dict.fromkeys(("starts at s", "waits s", f"{mb:g} MB take s"), "right"),
        [tuple(f"{value:,.2f}" for value in row.values()) for row in rows],
    )


def _presence(available: str) -> "Trace":
    """Availability from a share of each day, or from a file."""
    from fedp3.devices import traces

    try:
        share = float(available)
    except ValueError:
        return traces.read_availability(Path(available))
    return traces.share_of_day(share)


@app.command("measure")
def measure(
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Fleet file that gets a line for this machine; may exist"),
    ] = None,
    client: Annotated[
        int | None,
        typer.Option("--client", min=0, help="Its client; by default the next after the last"),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Its name; by default that of the host")
    ] = None,
    mbps_down: Annotated[
        float | None, typer.Option("--mbps-down", help="What it receives, in Mbit/s")
    ] = None,
    mbps_up: Annotated[
        float | None, typer.Option("--mbps-up", help="What it sends, in Mbit/s")
    ] = None,
    available: Annotated[
        float, typer.Option("--available", help="The share of time in which it can take part")
    ] = 1.0,
    server: Annotated[
        str | None, typer.Option("--server", help="HOST:PORT to which connections are timed")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.01, max=600, help="How long to train")
    ] = 5.0,
    json: AsJson = False,
) -> None:
    """Measure training speed, memory and disk of this machine, and the latency to a server.

    Throughput needs a server that takes part in the measurement, so it is not measured: state it
    with --mbps-down and --mbps-up, which --out requires.

    Example: fedp3 devices measure --out fleet.csv --mbps-down 50 --mbps-up 10
    """
    import platform

    from fedp3.devices import measurement
    from fedp3.devices.fleet_file import extend
    from fedp3.devices.table import Device

    name = name if name is not None else platform.node() or "this machine"
    address = None if server is None else measurement.parse_address(server)
    if out is not None:
        _check_line(name, mbps_down, mbps_up, available)
        client = _free_client(out, client)
    folder = Path() if out is None else out.parent
    machine = measurement.measure_machine(seconds, folder, address, terminal.note)
    if out is not None and client is not None and mbps_down is not None and mbps_up is not None:
        device = Device(
            name=name,
            kind="own",
            memory_mb=machine.memory_mb,
            gflops=machine.gflops,
            mbps_down=mbps_down,
            mbps_up=mbps_up,
            available=available,
            source="measured by fedp3 devices measure; link and availability: stated by its owner",
        )
        extend(out, client, device)
        terminal.note(f"wrote client {client} to {out}")
    _show_machine(name, machine, server, json=json)


def _show_machine(name: str, machine: "Machine", server: str | None, *, json: bool) -> None:
    """Print what was measured."""
    gflops, rates = machine.gflops, machine.rates
    if json:
        terminal.as_json(
            {
                "name": name,
                "gflops": gflops,
                "gflops_repeats": rates,
                "memory_mb": machine.memory_mb,
                "disk_mb_per_second": machine.disk,
                "server": server,
                "connect_seconds": machine.latency,
            }
        )
        return
    terminal.line(f"{name}")
    terminal.line(
        f"  training   {gflops:g} GFLOP/s, float32, one thread "
        f"(median of {len(rates)}, {min(rates):.3g} to {max(rates):.3g})"
    )
    terminal.line(f"  memory     {machine.memory_mb:,} MB")
    terminal.line(f"  disk       {machine.disk:,.0f} MB/s written")
    terminal.line(f"  server     {_latency(server, machine.latency)}")


def _latency(server: str | None, latency: float | None) -> str:
    if server is None:
        return "not measured; name one with --server HOST:PORT"
    if latency is None:
        return f"not measured: {server} cannot be reached"
    return f"{1000 * latency:.1f} ms to connect to {server}; throughput is not measured"


def _check_line(
    name: str, mbps_down: float | None, mbps_up: float | None, available: float
) -> None:
    """Refuse what a fleet file cannot hold, before anything is measured."""
    from fedp3.devices.table import mistakes

    stated = {"mbps_down": mbps_down, "mbps_up": mbps_up, "available": available}
    wrong = [f"{key} is not measured; state it" for key, value in stated.items() if value is None]
    wrong += mistakes({key: value for key, value in stated.items() if value is not None})
    if not name.strip() or not name.isprintable():
        wrong.append(f"the name {name!r} is not a line of text")
    if wrong:
        raise InputError(f"a line of a fleet file needs more: {'; '.join(wrong)}")


def _free_client(out: Path, client: int | None) -> int:
    """The client of a new line: this one, or the next after the last."""
    from fedp3.devices.fleet_file import SUFFIX, read_to_extend

    if not out.exists() or out.suffix.lower() != SUFFIX:
        _check_new(out, SUFFIX)
        return client or 0
    before = read_to_extend(out)
    if client in before:
        raise InputError(f"{out} has a line for client {client} already")
    return client if client is not None else max(before, default=-1) + 1
