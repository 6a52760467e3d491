"""A SuperLink and its SuperNodes as processes of this machine, started and stopped together.

    FOLDER/home/config.toml     the connection "up", for `FLWR_HOME=FOLDER/home flwr run APP up`
    FOLDER/tls/                 certificates and node keys, with TLS
    FOLDER/nodes/               what the nodes keep
    FOLDER/*.log                what each process said
Without TLS a SuperLink listens on loopback only, unless told that this is meant.
"""

import contextlib
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedp3.engines.flower import SWITCHES
from fedp3.engines.flower.certificates import make_certificates, make_node_key
from fedp3.errors import InputError, RunError

START_SECONDS = 120.0
STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cluster runs."""

    folder: Path
    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one
    tls: bool = False

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def environment(self) -> dict[str, str]:
        """For everything that belongs to this cluster: its home, no calls home, one thread per process."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        own = {"FLWR_HOME": str(self.home), "PATH": path, "OMP_NUM_THREADS": "1"}
        return {**os.environ, **SWITCHES, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2", **own}


@dataclass(frozen=True, slots=True)
class Cluster:
    """What runs: the SuperLink and the SuperNodes by their number."""

    place: Place
    superlink: subprocess.Popen[bytes]
    nodes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)


def check_address(host: str, tls: bool, insecure: bool) -> None:
    """Refuse to talk in the clear with other machines unless that is said to be meant."""
    if not (tls or insecure or is_loopback(host)):
        raise InputError(f"{host} can be reached from other machines: add --tls, or --insecure if that is meant")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach this address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def cluster(place: Place, nodes: int, extra: Callable[[int], str] | None = None) -> Iterator[Cluster]:
    """A SuperLink with SuperNodes 0, 1, ...; `extra` adds to a node's --node-config."""
    if place.port and _listens(place):
        raise InputError(f"something listens at {place.address} already; choose another --port, or none")
    place = prepare(place)
    running = Cluster(place, start_superlink(place))
    try:
        _wait(lambda: _listens(place), running.superlink, place.folder / "superlink.log")
        for i in range(nodes):
            running.nodes[i] = start_node(place, i, extra(i) if extra else "")
        yield running
    finally:
        stop(running.nodes.values())
        stop([running.superlink])


def prepare(place: Place) -> Place:
    """Make the folder: connection, and certificates where they are wanted."""
    # Flower takes absolute paths only.
    place = Place(place.folder.absolute(), place.host, place.port or free_port(place.host), place.tls)
    place.home.mkdir(parents=True, exist_ok=True)
    trust = "insecure = true"
    if place.tls:
        make_certificates(place.folder / "tls", place.host)
        trust = f'root-certificates = "{place.folder / "tls" / "ca.crt"}"'
    text = f'[superlink]\ndefault = "up"\n\n[superlink.up]\naddress = "{place.address}"\n{trust}\n'
    (place.home / "config.toml").write_text(text)
    return place


def start_superlink(place: Place) -> subprocess.Popen[bytes]:
    """The server's process."""
    tls = place.folder / "tls"
    trust = ["--insecure"]
    if place.tls:
        trust = ["--ssl-ca-certfile", f"{tls / 'ca.crt'}", "--ssl-certfile", f"{tls / 'server.pem'}"]
        trust += ["--ssl-keyfile", f"{tls / 'server.key'}", "--enable-supernode-auth"]
    here = ["--host", place.host, "--port", str(place.port), "--database", str(place.folder / "superlink.db")]
    return start(place, "superlink", ["flower-superlink", *trust, *here])


def start_node(place: Place, i: int, extra: str = "") -> subprocess.Popen[bytes]:
    """A client's process: node i is client i."""
    trust = ["--insecure"]
    if place.tls:
        key = place.folder / "tls" / f"node-{i}"
        if not key.exists():
            make_node_key(key)
            flwr(place, "supernode", "register", f"{key}.pub", "up")
        trust = ["--root-certificates", str(place.folder / "tls" / "ca.crt"), "--auth-supernode-private-key", str(key)]
    said = f'partition-id={i} folder="{place.folder / "nodes"}" {extra}'.strip()
    own = ["--host", "127.0.0.1", "--port", str(free_port("127.0.0.1")), "--node-config", said]
    return start(place, f"node-{i}", ["flower-supernode", *trust, "--superlink", place.address, *own])


# --------------------------------------------------------------------------- processes


def flwr(place: Place, *arguments: str, seconds: float = 120.0) -> str:
    """Run one of Flower's own commands against this cluster; returns what it printed."""
    done = subprocess.run(
        [program("flwr"), *arguments],
        env=place.environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode:
        raise RunError(f"flwr {' '.join(arguments)} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def program(name: str) -> str:
    """One of Flower's programs, of the same environment as this one."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise InputError(f"{name} is not here; install it with: pip install 'fedp3[flower]'")
    return found


def start(place: Place, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process that Ctrl-C does not reach: it is for us to stop it."""
    with (place.folder / f"{name}.log").open("ab") as out:
        return subprocess.Popen(
            [program(command[0]), *command[1:]],
            env=place.environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """Ask, wait, then insist; nothing they started stays."""
    started = [pid for process in processes for pid in _started_by(process.pid)]
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    end = time.monotonic() + STOP_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, end - time.monotonic()))
    for pid in [*started, *(process.pid for process in processes)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def _started_by(pid: int) -> list[int]:
    """The processes below this one; Flower's launcher and apps run in sessions of their own."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    below = {pid}
    while more := {p for p, parent in parents.items() if parent in below} - below:
        below |= more
    return sorted(below - {pid})


def free_port(host: str) -> int:
    """A port nobody listens on."""
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def _listens(place: Place) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((place.host, place.port), 1.0):
        return True
    return False


def _wait(ready: Callable[[], bool], process: subprocess.Popen[bytes], said: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while not ready():
        if process.poll() is not None or end < time.monotonic():
            tail = said.read_text(errors="replace")[-500:].strip()
            raise RunError(f"the SuperLink did not start; {said} ends with: {tail}")
        time.sleep(0.2)
