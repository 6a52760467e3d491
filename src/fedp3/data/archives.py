"""Unpack a published archive: extract the expected members, and no others, to their bare names.

A member is recognised by its full name and written under the name in our table.  An archive can
therefore not write anywhere else.  Links are not followed, and no member may exceed its limit.
"""

import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from fedp3.core.errors import DataError

CHUNK = 1 << 20

# (archive, folder inside it, limit in bytes of each expected member, folder to write to)
Unpack = Callable[[Path, str, Mapping[str, int], Path], None]


def untar(archive: Path, inside: str, limits: Mapping[str, int], to: Path) -> None:
    """Unpack members of a gzipped tar file.

    Args:
        archive: the file.
        inside: the folder of the members in the archive.
        limits: the expected members, and the largest size in bytes of each.
        to: the folder to write to.
    """
    missing = {f"{inside}/{name}": name for name in limits}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if not member.isfile() or member.name not in missing:
                    continue
                stream = tar.extractfile(member)
                if stream is not None:
                    name = missing.pop(member.name)
                    _copy(stream, to / name, limits[name], archive)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{archive.name} is not a complete tar.gz archive ({error})") from None
    if missing:
        raise DataError(f"{archive.name} lacks {', '.join(missing)}")


def unzip(archive: Path, inside: str, limits: Mapping[str, int], to: Path) -> None:
    """Extract the files in `limits` from a zip archive, and ignore all others.

    Raises a DataError if one is missing or too large, or if the archive is damaged.

    Args:
        archive: the file.
        inside: the folder of the members in the archive.
        limits: the expected members, and the largest size in bytes of each.
        to: the folder to write to.
    """
    try:
        with zipfile.ZipFile(archive) as z:
            present = z.namelist()
            members = {f"{inside}/{name}": name for name in limits}
            missing = [member for member in members if member not in present]
            if missing:
                raise DataError(f"{archive.name} lacks {', '.join(missing)}")
            for member, name in members.items():
                with z.open(member) as stream:
                    _copy(stream, to / name, limits[name], archive)
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise DataError(f"{archive.name} is not a complete zip archive ({error})") from None


def _copy(stream: IO[bytes], path: Path, limit: int, archive: Path) -> None:
    written = 0
    with path.open("wb") as out:
        while chunk := stream.read(CHUNK):
            written += len(chunk)
            if written > limit:
                raise DataError(
                    f"{archive.name} has a member {path.name} of more than {limit:,} bytes"
                )
            out.write(chunk)
