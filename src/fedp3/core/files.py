"""Files that survive a crash: locks, atomic writes, JSON."""

import contextlib
import fcntl
import json
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fedp3.core.errors import BusyError, InputError, RunError


@contextmanager
def locked(folder: Path, name: str = ".lock", wait: bool = False) -> Iterator[None]:
    """Make this process the only writer of a folder; the lock of a dead process is void.

    Args:
        folder: the folder to lock; it is created if necessary.
        name: the name of the lock file in it.
        wait: wait for another writer to finish instead of raising a `BusyError`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / name).open("a+")
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror or error}") from None
    with handle:
        try:
            _lock(handle, wait)
        except OSError:
            handle.seek(0)
            process = handle.read().strip() or "unknown"
            raise BusyError(
                f"{folder} is being written by process {process}; wait for it, or stop it"
            ) from None
        handle.truncate(0)
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        yield


def _lock(handle: IO[str], wait: bool) -> None:
    if wait:
        fcntl.flock(handle, fcntl.LOCK_EX)
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        time.sleep(0.05)  # it may be `is_locked`, which holds the lock for a moment
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(folder: Path, name: str = ".lock") -> bool:
    """Whether a process is the writer of a folder now; see `locked`."""
    try:
        with (folder / name).open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False  # nobody has locked it yet


def write_atomic(path: Path, data: bytes, *, sync_folder: bool = True) -> None:
    """Write a complete file or nothing: a crash or a full disk leaves the old file in place.

    Args:
        path: the file to write or replace.
        data: its contents.
        sync_folder: also sync the folder, so that the new file survives a power cut.  Without it, a
            power cut may bring the old file back.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        if sync_folder:
            _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise RunError(
            f"cannot write {len(data)} bytes to {path}: {error.strerror or error}"
        ) from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_atomic(path, (json.dumps(plain_json(value), indent=1) + "\n").encode())


def json_line(value: Mapping[str, Any]) -> bytes:
    """Return one line of JSON; NaN and infinity become null."""
    try:
        return (json.dumps(value, allow_nan=False) + "\n").encode()
    except ValueError:
        return (json.dumps(plain_json(value)) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that this package wrote; raises an `InputError` where it cannot."""
    try:
        return read_object(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path} was damaged, or fedp3 did not write it: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises OSError or ValueError where it cannot."""
    value = json.loads(path.read_text())
    if not isinstance(value, dict):
        raise ValueError("it does not hold a JSON object")
    return value


def plain_json(value: Any) -> Any:
    """Return the value as JSON can hold it: NaN and infinity are None, and keys are strings."""
    if isinstance(value, float):
        return finite_or_none(value)
    if isinstance(value, Mapping):
        return {str(k): plain_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(v) for v in value]
    return value


def finite_or_none(value: float) -> float | None:
    """The value, or None for infinity and NaN, which JSON does not have."""
    return value if math.isfinite(value) else None


def state_home() -> Path:
    """Where programs of this user store what they remember."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")


def write_secret(path: Path) -> bytes:
    """Write 32 random bytes that only this user can read; the caller makes sure that it is new."""
    secret = secrets.token_bytes(32)
    write_atomic(path, secret)
    path.chmod(0o600)
    return secret
