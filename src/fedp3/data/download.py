"""Download a data set; no file is moved into place before all of them are complete and verified.

Everything is written to a temporary folder on the same disk, compared with the publisher's md5,
unpacked, parsed as a local file would be, and then moved into place file by file.  A failure at any
point leaves the data folder unchanged.
"""

import math
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedp3.core.errors import DataError
from fedp3.core.registry import pick
from fedp3.data.catalogue import by_hand, find, roots
from fedp3.data.sources import SOURCES, Download, Source

TIMEOUT = 30  # seconds without a byte
CHUNK = 1 << 16
GZIP_SLACK = 4096  # bytes by which a gzipped file may exceed its contents

Progress = Callable[[int, int], None]  # (bytes so far, bytes in total)


def get(
    name: str,
    data_dir: Path | None = None,
    *,
    base_url: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the folder of a data set, and download it unless it is complete on this machine.

    Args:
        name: a key of `SOURCES`.
        data_dir: the data folder; by default `FEDP3_DATA`, or else the user's cache folder.
        base_url: a mirror that serves the publisher's file names.
        progress: called with (bytes so far, bytes in total).
    """
    source = pick(SOURCES, name, "data set")
    present = find(name, data_dir)
    if present is not None and _is_complete(source, present):
        return present
    if not source.downloads:
        raise DataError(
            f"data set {name!r} comes with scikit-learn and cannot be downloaded: "
            "install scikit-learn"
        )
    target = roots(data_dir)[0] / source.folder
    url = f"{base_url.rstrip('/')}/" if base_url else source.url
    try:
        with TemporaryDirectory(prefix=".fedp3-", dir=_deepest_existing(target)) as temporary:
            folder = Path(temporary)
            _download(source, url, folder, progress)
            target.mkdir(parents=True, exist_ok=True)
            for file in source.files:
                (folder / file.name).replace(target / file.name)
    except DataError as error:
        raise DataError(
            f"cannot download data set {name!r}: {error}; {by_hand(source, target)} yourself"
        ) from None
    except OSError as error:
        raise DataError(
            f"cannot download data set {name!r}: {target} cannot be written ({error.strerror}); "
            "choose another folder with --data-dir or FEDP3_DATA, "
            f"or {by_hand(source, target)} yourself"
        ) from None
    return target


def _is_complete(source: Source, folder: Path) -> bool:
    try:
        source.parse(folder, source.files, source.classes)
    except DataError:
        return False
    return True


def _deepest_existing(folder: Path) -> Path:
    """The deepest part of a path that exists: a failed download must leave no new folder."""
    return next(part for part in (folder, *folder.absolute().parents) if part.exists())


def _download(source: Source, url: str, folder: Path, progress: Progress | None) -> None:
    before, total = 0, sum(file.bytes for file in source.downloads)
    for file in source.downloads:
        meter = _Meter(file=file, before=before, total=total, progress=progress)
        _fetch(url, file, folder, meter)
        before += file.bytes
        if source.unpack:
            limits = {member.name: math.prod(member.shape) + GZIP_SLACK for member in source.files}
            source.unpack(folder / file.name, source.inside, limits, folder)
    source.parse(folder, source.files, source.classes)


def _fetch(url: str, file: Download, folder: Path, meter: "_Meter") -> None:
    import pooch  # imports an HTTP library that only a download needs
    from requests import exceptions as http

    # Without this header some servers declare a .gz file as gzip-encoded, and it arrives unpacked.
    headers = {"Accept-Encoding": "identity"}
    responses: list[Any] = []
    fetch = pooch.HTTPDownloader(
        progressbar=meter,
        chunk_size=CHUNK,
        timeout=TIMEOUT,
        headers=headers,
        hooks={"response": lambda response, **_: responses.append(response)},
    )
    try:
        fetch(url + file.name, str(folder / file.name), None)
    except http.HTTPError as error:
        raise DataError(f"the server responds {error}") from None
    except http.Timeout:
        raise DataError(f"{url}{file.name} does not respond within {TIMEOUT} s") from None
    except (http.ChunkedEncodingError, http.ContentDecodingError):
        raise DataError(f"{url}{file.name} broke off") from None
    except http.ConnectionError:
        raise DataError(f"the connection to {url}{file.name} failed") from None
    except http.RequestException as error:
        raise DataError(f"{url}{file.name} cannot be fetched ({type(error).__name__})") from None
    finally:
        for response in responses:  # a failed response would leave its connection open
            response.close()
    md5 = pooch.file_hash(str(folder / file.name), alg="md5")
    if md5 != file.md5:
        raise DataError(f"{url}{file.name} is not the published file (md5 {md5}, want {file.md5})")


class _Meter:
    """A progress bar for pooch; it also stops a server that sends more than the published file.

    Args:
        file: the file that is downloaded.
        before: the bytes of the files before it.
        total: the bytes of all files.
        progress: called with (bytes so far, bytes in total).
    """

    def __init__(
        self, *, file: Download, before: int, total: int, progress: Progress | None
    ) -> None:
        self.total = 0  # pooch sets it to the size that the server announces
        self._file = file
        self._before = before
        self._total = total
        self._progress = progress
        self._done = 0

    def update(self, more: int) -> None:
        """Count full chunks, so that the last one may exceed the file by less than a chunk."""
        self._done += more
        if self._done >= self._file.bytes + CHUNK:
            raise DataError(
                f"{self._file.name} is longer than the published {self._file.bytes:,} bytes"
            )
        if self._progress:
            self._progress(self._before + min(self._done, self._file.bytes), self._total)

    def reset(self) -> None:
        self._done = 0

    def close(self) -> None:
        """Do nothing: there is nothing to close."""
