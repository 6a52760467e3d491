"""Download a data set: nothing is put in place before all of it has arrived and was checked.

Everything is written to a temporary folder on the same disk, held against the publisher's md5, unpacked,
parsed as a local file would be, and then moved into place file by file; a failure at any point leaves the
data folder as it was.
"""

import math
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedp3.data.catalogue import by_hand, find, roots
from fedp3.data.sources import NAMES, Download, Source
from fedp3.errors import DataError
from fedp3.lookup import pick

TIMEOUT = 30  # seconds without a byte
CHUNK = 1 << 16
GZIP_SLACK = 4096  # what headers may add to a gzipped file over its contents

Progress = Callable[[int, int], None]  # bytes so far, bytes in all


def get(
    name: str, data_dir: Path | None = None, *, base_url: str | None = None, progress: Progress | None = None
) -> Path:
    """The folder of a data set, downloaded to the first data folder unless it is whole on this machine already.

    Args:
        name: a key of `NAMES`.
        data_dir: the data folder; else `FEDP3_DATA`, else the user's cache folder.
        base_url: a mirror that serves the publisher's file names.
        progress: called with (bytes so far, bytes in all).
    """
    source = pick(NAMES, name, "data set")
    here = find(name, data_dir)
    if here is not None and _whole(source, here):
        return here
    if not source.downloads:
        raise DataError(f"data set {name!r} comes with scikit-learn and cannot be downloaded: install scikit-learn")
    target = roots(data_dir)[0] / source.folder
    url = f"{base_url.rstrip('/')}/" if base_url else source.url
    try:
        with TemporaryDirectory(prefix=".fedp3-", dir=_nearest(target)) as folder:
            _download(source, url, Path(folder), progress)
            target.mkdir(parents=True, exist_ok=True)
            for file in source.files:
                (Path(folder) / file.name).replace(target / file.name)
    except DataError as error:
        raise DataError(f"cannot download data set {name!r}: {error}; {by_hand(source, target)} yourself") from None
    except OSError as error:
        raise DataError(
            f"cannot download data set {name!r}: {target} cannot be written ({error.strerror}); name another folder "
            f"with --data-dir or FEDP3_DATA, or {by_hand(source, target)} yourself"
        ) from None
    return target


def _whole(source: Source, folder: Path) -> bool:
    try:
        source.parse(folder, source.files, source.classes)
    except DataError:
        return False
    return True


def _nearest(folder: Path) -> Path:
    """The deepest part of a path that exists, so that a failed download leaves no new folder behind."""
    return next(at for at in (folder, *folder.absolute().parents) if at.exists())


def _download(source: Source, url: str, folder: Path, progress: Progress | None) -> None:
    before, total = 0, sum(file.bytes for file in source.downloads)
    for file in source.downloads:
        meter = _Meter(file, before, total, progress)
        _fetch(url, file, folder, meter)
        before += file.bytes
        if source.unpack:
            limits = {member.name: math.prod(member.shape) + GZIP_SLACK for member in source.files}
            source.unpack(folder / file.name, source.inside, limits, folder)
    source.parse(folder, source.files, source.classes)


def _fetch(url: str, file: Download, folder: Path, meter: "_Meter") -> None:
    import pooch  # pulls in an HTTP library that only a download needs
    from requests import exceptions as http

    # Without this header some servers say "gzip" of a .gz file, and it would arrive unpacked.
    plain = {"Accept-Encoding": "identity"}
    answers: list[Any] = []
    fetch = pooch.HTTPDownloader(
        progressbar=meter,
        chunk_size=CHUNK,
        timeout=TIMEOUT,
        headers=plain,
        hooks={"response": lambda answer, **_: answers.append(answer)},
    )
    try:
        fetch(url + file.name, str(folder / file.name), None)
    except http.HTTPError as error:
        raise DataError(f"the server answers {error}") from None
    except http.Timeout:
        raise DataError(f"{url}{file.name} gives no answer within {TIMEOUT} s") from None
    except (http.ChunkedEncodingError, http.ContentDecodingError):
        raise DataError(f"{url}{file.name} broke off") from None
    except http.ConnectionError:
        raise DataError(f"the connection to {url}{file.name} failed") from None
    except http.RequestException as error:
        raise DataError(f"{url}{file.name} cannot be fetched ({type(error).__name__})") from None
    finally:
        for answer in answers:  # a failed one would keep its connection open
            answer.close()
    md5 = pooch.file_hash(str(folder / file.name), alg="md5")
    if md5 != file.md5:
        raise DataError(f"{url}{file.name} is not the published file (md5 {md5}, want {file.md5})")


class _Meter:
    """What pooch takes for a progress bar: reports, and stops a server that sends more than the published file."""

    def __init__(self, file: Download, before: int, total: int, progress: Progress | None) -> None:
        self.total = 0  # set by pooch to what the server announces
        self._file, self._before, self._total, self._progress = file, before, total, progress
        self._done = 0

    def update(self, more: int) -> None:
        """Count whole chunks, so the last one may run over by less than a chunk."""
        self._done += more
        if self._done >= self._file.bytes + CHUNK:
            raise DataError(f"{self._file.name} is longer than the published {self._file.bytes:,} bytes")
        if self._progress:
            self._progress(self._before + min(self._done, self._file.bytes), self._total)

    def reset(self) -> None:
        self._done = 0

    def close(self) -> None:
        """Nothing is held open."""
