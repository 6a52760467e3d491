"""Unpack a published archive: the expected members and no others, each to its bare name.

A member is matched by its whole name and written under the name of the table, never under its own, so an
archive cannot write anywhere else; links are not followed; no member may be longer than its limit.
"""

import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from fedp3.errors import DataError

CHUNK = 1 << 20

# Archive, folder inside it, limit in bytes of each expected member, folder to write to.
Unpack = Callable[[Path, str, Mapping[str, int], Path], None]


def untar(archive: Path, inside: str, limits: Mapping[str, int], to: Path) -> None:
    """Unpack members of a gzipped tar file."""
    missing = {f"{inside}/{name}": name for name in limits}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                stream = tar.extractfile(member) if member.isfile() and member.name in missing else None
                if stream is not None:
                    name = missing.pop(member.name)
                    _copy(stream, to / name, limits[name], archive)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{archive.name} is no whole tar.gz archive ({error})") from None
    if missing:
        raise DataError(f"{archive.name} lacks {', '.join(missing)}")


def unzip(archive: Path, inside: str, limits: Mapping[str, int], to: Path) -> None:
    """Unpack members of a zip file."""
    try:
        with zipfile.ZipFile(archive) as z:
            missing = [f"{inside}/{name}" for name in limits if f"{inside}/{name}" not in z.namelist()]
            if missing:
                raise DataError(f"{archive.name} lacks {', '.join(missing)}")
            for name, limit in limits.items():
                with z.open(f"{inside}/{name}") as stream:
                    _copy(stream, to / name, limit, archive)
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise DataError(f"{archive.name} is no whole zip archive ({error})") from None


def _copy(stream: IO[bytes], path: Path, limit: int, archive: Path) -> None:
    written = 0
    with path.open("wb") as out:
        while chunk := stream.read(CHUNK):
            written += len(chunk)
            if written > limit:
                raise DataError(f"{archive.name} has a member {path.name} of more than {limit:,} bytes")
            out.write(chunk)
