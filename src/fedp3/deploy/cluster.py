"""A SuperLink and its SuperNodes as processes of this machine, started and stopped together.

    FOLDER/home/config.toml     the connection "up", for `FLWR_HOME=FOLDER/home flwr run APP up`
    FOLDER/tls/                 certificates and node keys, with TLS
    FOLDER/nodes/client-<i>/    what node i stores
    FOLDER/*.log                the output of each process

Without TLS, a SuperLink listens on loopback only, unless `--insecure` allows more.
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
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedp3.core.errors import InputError, RunError
from fedp3.deploy.certificates import make_certificates, make_node_key
from fedp3.engines.flower import SWITCHES

START_SECONDS = 120.0
STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cluster runs."""

    folder: Path
    host: str = "127.0.0.1"
    port: int = 0  # 0 means a free port
    tls: bool = False

    @property
    def address(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"

    @property
    def home(self) -> Path:
        """Flower's home folder, FLWR_HOME."""
        return self.folder / "home"

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the processes of this cluster: its home, no telemetry, one thread each."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return {
            **os.environ,
            **SWITCHES,
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            "FLWR_HOME": str(self.home),
            "PATH": path,
            "OMP_NUM_THREADS": "1",
        }


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that runs: the SuperLink, and the SuperNodes by their number."""

    place: Place
    superlink: subprocess.Popen[bytes]
    nodes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)


def check_address(host: str, tls: bool, insecure: bool) -> None:
    """Refuse unencrypted messages between machines, unless `insecure` allows them."""
    if not (tls or insecure or is_loopback(host)):
        raise InputError(
            f"{host} can be reached from other machines: add --tls, or --insecure to allow that"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach this address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def cluster(
    place: Place, nodes: int, extra: Callable[[int], str] | None = None
) -> Iterator[Cluster]:
    """Inside this context, a SuperLink with SuperNodes 0, 1, ... runs.

    Args:
        place: where it runs.
        nodes: the number of SuperNodes.
        extra: returns further keys for the --node-config of a node.
    """
    if place.port and _listens(place):
        raise InputError(
            f"a program listens at {place.address} already; choose another --port, or none"
        )
    place = prepare(place)
    running = Cluster(place, start_superlink(place))
    try:
        _wait(lambda: _listens(place), running.superlink, place.folder / "superlink.log")
        for i in range(nodes):
            told = f"num-partitions={nodes} {extra(i) if extra else ''}"
            running.nodes[i] = start_node(place, i, told.strip())
        yield running
    finally:
        stop(running.nodes.values())
        stop([running.superlink])


def prepare(place: Place) -> Place:
    """Write the connection and, with TLS, certificates; returns the place with its port."""
    place = replace(
        place,
        folder=place.folder.absolute(),  # Flower takes absolute paths only
        port=place.port or free_port(place.host),
    )
    place.home.mkdir(parents=True, exist_ok=True)
    trust = "insecure = true"
    if place.tls:
        make_certificates(place.folder / "tls", place.host)
        trust = f'root-certificates = "{place.folder / "tls" / "ca.crt"}"'
    text = f'[superlink]\ndefault = "up"\n\n[superlink.up]\naddress = "{place.address}"\n{trust}\n'
    (place.home / "config.toml").write_text(text)
    return place


def start_superlink(place: Place) -> subprocess.Popen[bytes]:
    """Start the server's process."""
    tls = place.folder / "tls"
    command = ["flower-superlink"]
    if place.tls:
        command += ["--ssl-ca-certfile", str(tls / "ca.crt")]
        command += ["--ssl-certfile", str(tls / "server.pem")]
        command += ["--ssl-keyfile", str(tls / "server.key")]
        command += ["--enable-supernode-auth"]
    else:
        command += ["--insecure"]
    command += ["--host", place.host, "--port", str(place.port)]
    command += ["--database", str(place.folder / "superlink.db")]
    return start(place, "superlink", command)


def start_node(place: Place, i: int, extra: str = "") -> subprocess.Popen[bytes]:
    """Start the SuperNode of client i.

    With TLS, its key is made and registered first if it has none.

    Args:
        place: the cluster.
        i: the client.
        extra: further `key=value` pairs for `--node-config`.
    """
    command = ["flower-supernode"]
    if place.tls:
        key = place.folder / "tls" / f"node-{i}"
        if not key.exists():
            make_node_key(key)
            flwr(place, "supernode", "register", f"{key}.pub", "up")
        command += ["--root-certificates", str(place.folder / "tls" / "ca.crt")]
        command += ["--auth-supernode-private-key", str(key)]
    else:
        command += ["--insecure"]
    command += ["--superlink", place.address]
    command += ["--host", "127.0.0.1", "--port", str(free_port("127.0.0.1"))]
    node_config = (
        f'partition-id={i} folder="{place.folder / "nodes" / f"client-{i}"}" {extra}'.strip()
    )
    command += ["--node-config", node_config]
    return start(place, f"node-{i}", command)


# --------------------------------------------------------------------------- processes


def flwr(place: Place, *arguments: str, seconds: float = 120.0) -> str:
    """Run a command of `flwr` against this cluster; returns its output."""
    done = subprocess.run(
        [program("flwr"), *arguments],
        env=place.environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode:
        output = (done.stderr or done.stdout).strip()
        raise RunError(f"flwr {' '.join(arguments)} failed: {output[-500:]}")
    return done.stdout


def program(name: str) -> str:
    """The path of one of Flower's programs, of this Python environment if it is there."""
    beside_python = Path(sys.executable).parent / name
    path = str(beside_python) if beside_python.exists() else shutil.which(name)
    if path is None:
        raise InputError(f"{name} is not installed; get it with: pip install 'fedp3[flower]'")
    return path


def start(place: Place, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process that Ctrl-C does not reach, so that `stop` can end it in order.

    Args:
        place: the cluster that it belongs to.
        name: names its log file.
        command: one of Flower's programs, and its arguments.
    """
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
    """Terminate processes, and kill those that do not end in time, with all that they started."""
    descendants = [pid for process in processes for pid in _descendants(process.pid)]
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    end = time.monotonic() + STOP_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, end - time.monotonic()))
    for pid in [*descendants, *(process.pid for process in processes)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def _descendants(pid: int) -> list[int]:
    """All processes below this one; Flower's launcher and apps run in other sessions."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
    family = {pid}
    while True:
        children = {child for child, parent in parents.items() if parent in family} - family
        if not children:
            return sorted(family - {pid})
        family |= children


def free_port(host: str) -> int:
    """A port that no program listens on."""
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def _listens(place: Place) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((place.host, place.port), 1.0):
        return True
    return False


def _wait(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the SuperLink is ready; raises if it ends before, or takes too long."""
    end = time.monotonic() + START_SECONDS
    while not ready():
        if process.poll() is not None or end < time.monotonic():
            tail = log.read_text(errors="replace")[-500:].strip()
            raise RunError(f"the SuperLink did not start; {log} ends with: {tail}")
        time.sleep(0.2)
