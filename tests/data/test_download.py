"""Downloads from a local server: complete and verified, or one sentence and nothing left behind."""

import gzip
import hashlib
import io
import os
import re
import socket
import struct
import tarfile
import threading
import time
import zipfile
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from fedp3.core.errors import DataError
from fedp3.data import DATASETS, SOURCES, download, find, get, load
from fedp3.data.archives import untar, unzip
from fedp3.data.catalogue import _load_published
from fedp3.data.formats import File, cifar, idx
from fedp3.data.sources import Download, Source

RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 256, (90, 40, 40)), RNG.integers(0, 10, 90)


def idx_gz(a):
    return gzip.compress(
        struct.pack(f">HBB{a.ndim}I", 0, 8, a.ndim, *a.shape) + a.astype(np.uint8).tobytes()
    )


FILES = {"x.gz": idx_gz(X), "y.gz": idx_gz(Y)}
ROWS = np.concatenate(
    [RNG.integers(0, 10, (5, 1)), RNG.integers(0, 256, (5, 3072))], axis=1
).astype(np.uint8)


def published(name, raw):
    return Download(name, len(raw), hashlib.md5(raw).hexdigest())


def plain_source():
    return Source(
        parse=idx,
        samples=90,
        classes=10,
        shape=(1, 40, 40),
        note="a test",
        folder="small/raw",
        files=(File("x.gz", X.shape), File("y.gz", Y.shape)),
        url="http://127.0.0.1:9/never/",
        downloads=tuple(published(name, raw) for name, raw in FILES.items()),
    )


def packed_source(name, raw, unpack):
    return replace(
        plain_source(),
        parse=cifar,
        shape=(3, 32, 32),
        files=(File("a.bin", ROWS.shape),),
        downloads=(published(name, raw),),
        unpack=unpack,
        inside="inner",
    )


# The server: what it answers is set by each test.


def complete(raw):
    def answer(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(raw)))
        handler.end_headers()
        handler.wfile.write(raw)

    return answer


def cut(raw):
    """Promises all, sends half."""

    def answer(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(raw)))
        handler.end_headers()
        handler.wfile.write(raw[: len(raw) // 2])

    return answer


def cut_silently(raw):
    """Sends half and never says how much there should be."""

    def answer(handler):
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(raw[: len(raw) // 2])

    return answer


def corrupt(raw):
    middle = len(raw) // 2
    return complete(raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :])


def refuse(code):
    return lambda raw: lambda handler: handler.send_error(code)


def stall(raw):
    def answer(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(raw)))
        handler.end_headers()
        handler.server.stop.wait(10)

    return answer


def silent(raw):
    return lambda handler: handler.server.stop.wait(10)


def endless(raw):
    def answer(handler):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(10_000):
            handler.wfile.write(bytes(1 << 16))

    return answer


def unpacks_if_it_may(raw):
    """Calls the file itself the gzip encoding of its contents, as some servers do."""

    def answer(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(raw)))
        if "gzip" in handler.headers.get("Accept-Encoding", ""):
            handler.send_header("Content-Encoding", "gzip")
        handler.end_headers()
        handler.wfile.write(raw)

    return answer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append(self.path)
        answer = self.server.answers.get(self.path.removeprefix("/mirror/"), refuse(404)(b""))
        try:
            answer(self)
        except (BrokenPipeError, ConnectionResetError):
            self.server.hung_up.append(self.path)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.answers = {name: complete(raw) for name, raw in FILES.items()}
    httpd.requests, httpd.hung_up, httpd.stop = [], [], threading.Event()
    httpd.url = f"http://127.0.0.1:{httpd.server_address[1]}/mirror"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield httpd
    httpd.stop.set()
    httpd.shutdown()
    httpd.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """A data set of two small files, and a machine without any other."""
    monkeypatch.delenv("FEDP3_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(SOURCES, "small", plain_source())
    monkeypatch.setitem(DATASETS._table, "small", partial(_load_published, "small"))


def everything(folder):
    return {
        path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))
    }


def fails(call, folder, *parts):
    """The call fails with one sentence that has all parts, and changes nothing below the folder."""
    before = everything(folder)
    with pytest.raises(DataError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text and not re.search(r"[.!?]\s", text)
    assert [part for part in map(str, parts) if part not in text] == []
    assert everything(folder) == before
    return text


# What works


def test_a_good_download_is_put_in_place_and_loads(server, tmp_path, capfd):
    at = get("small", tmp_path / "d", base_url=server.url)
    assert at == tmp_path / "d/small/raw" == find("small", tmp_path / "d")
    assert {path.name: path.read_bytes() for path in at.iterdir()} == FILES
    assert np.array_equal(load("small", tmp_path / "d").x[:, 0], X)
    assert list(tmp_path.iterdir()) == [tmp_path / "d"] and list((tmp_path / "d").iterdir()) == [
        tmp_path / "d/small"
    ]
    assert capfd.readouterr() == ("", "")


def test_the_publisher_s_address_is_used_when_no_mirror_is_named(server, tmp_path, monkeypatch):
    monkeypatch.setitem(SOURCES, "small", replace(plain_source(), url=f"{server.url}/"))
    get("small", tmp_path)
    assert server.requests == ["/mirror/x.gz", "/mirror/y.gz"]


def test_progress_goes_up_to_the_total(server, tmp_path):
    seen = []
    get(
        "small",
        tmp_path,
        base_url=server.url,
        progress=lambda done, total: seen.append((done, total)),
    )
    total = sum(map(len, FILES.values()))
    assert len(FILES["x.gz"]) > 2 * download.CHUNK  # so that there is something to see
    assert len(seen) > 3
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {t for _, t in seen} == {total} and seen[-1] == (total, total)


def test_a_gz_file_arrives_as_it_is_published(server, tmp_path):
    server.answers = {name: unpacks_if_it_may(raw) for name, raw in FILES.items()}
    assert (get("small", tmp_path, base_url=server.url) / "x.gz").read_bytes() == FILES["x.gz"]


def test_what_is_complete_on_this_machine_is_not_downloaded_again(server, tmp_path):
    get("small", tmp_path, base_url=server.url)
    server.requests.clear()
    assert get("small", tmp_path, base_url=server.url) == tmp_path / "small/raw"
    assert server.requests == []


def test_a_broken_file_is_replaced(server, tmp_path):
    at = get("small", tmp_path, base_url=server.url)
    (at / "x.gz").write_bytes(FILES["x.gz"][:-20])
    get("small", tmp_path, base_url=server.url)
    assert (at / "x.gz").read_bytes() == FILES["x.gz"]


@pytest.mark.parametrize("variable", ["FEDP3_DATA", "XDG_CACHE_HOME"])
def test_without_a_folder_named_it_goes_where_it_will_be_found_first(
    server, tmp_path, monkeypatch, variable
):
    monkeypatch.setenv(variable, str(tmp_path / "there"))
    at = get("small", base_url=server.url)
    assert at == find("small") and (tmp_path / "there") in at.parents


def test_digits_are_here_already():
    assert get("digits") == find("digits")


# What fails

FAULTS = {
    "corrupt": (corrupt, "is not the published file (md5 "),
    "truncated": (cut, "broke off"),
    "truncated in silence": (cut_silently, "is not the published file (md5 "),
    "not there": (refuse(404), "404"),
    "out of order": (refuse(503), "503"),
    "empty": (lambda raw: complete(b""), "is not the published file (md5 "),
    "too long": (endless, "is longer than the published"),
    "stalled": (stall, "the connection to"),
    "silent": (silent, "does not respond within"),
}


# Faults that only show by waiting; the others must not depend on how busy a machine is.
WAITS = ("stalled", "silent")


@pytest.mark.parametrize("bad", ["x.gz", "y.gz"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_download_is_one_sentence_and_leaves_nothing(
    server, tmp_path, monkeypatch, fault, bad
):
    monkeypatch.setattr(download, "TIMEOUT", 2 if fault in WAITS else 60)
    answer, text = FAULTS[fault]
    server.answers[bad] = answer(FILES[bad])
    fails(
        lambda: get("small", tmp_path / "d", base_url=server.url), tmp_path,
        text, bad, f"put x.gz and y.gz into {tmp_path / 'd/small/raw'} yourself",
    )  # fmt: skip
    assert not (tmp_path / "d").exists()


def test_a_server_that_never_ends_is_hung_up_on(server, tmp_path):
    server.answers["x.gz"] = endless(b"")
    with pytest.raises(DataError, match="longer than"):
        get("small", tmp_path, base_url=server.url)
    for _ in range(500):
        if server.hung_up:
            break
        time.sleep(0.01)
    assert server.hung_up == ["/mirror/x.gz"]


def test_a_refused_connection_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{s.getsockname()[1]}"  # bound but not listening: refuses
        fails(
            lambda: get("small", tmp_path, base_url=url),
            tmp_path,
            f"the connection to {url}/x.gz failed",
            "small/raw",
        )


@pytest.mark.parametrize("url", ["nonsense", "file:///etc", "http://"])
def test_a_mirror_that_is_no_address_is_refused(tmp_path, url):
    fails(
        lambda: get("small", tmp_path, base_url=url), tmp_path, "cannot be fetched (", "small/raw"
    )


def test_a_failed_download_keeps_what_was_there(server, tmp_path):
    at = tmp_path / "small/raw"
    at.mkdir(parents=True)
    (at / "x.gz").write_bytes(b"old")
    (at / "notes.txt").write_text("mine")
    server.answers["y.gz"] = refuse(404)(b"")
    fails(lambda: get("small", tmp_path, base_url=server.url), tmp_path, "404")


def test_an_interrupted_download_leaves_nothing(server, tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get("small", tmp_path / "d", base_url=server.url, progress=stop)
    assert everything(tmp_path) == {}


def test_a_file_in_place_of_the_folder_is_reported(server, tmp_path):
    (tmp_path / "d").write_text("not a folder")
    fails(
        lambda: get("small", tmp_path / "d", base_url=server.url), tmp_path,
        f"{tmp_path / 'd'} is a file", "--data-dir",
    )  # fmt: skip


def test_a_folder_that_may_not_be_written_is_reported(server, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir()
    if os.geteuid() == 0:
        locked = Path("/proc/self/fd")  # not even root can write here
    else:
        locked.chmod(0o500)
    fails(
        lambda: get("small", locked, base_url=server.url),
        tmp_path,
        f"{locked}/small/raw cannot be written",
        "x.gz",
    )
    assert server.requests == []  # found out before anything was downloaded


def test_a_full_disk_is_reported_and_leaves_nothing(server, tmp_path, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(DataError, match="No space left on device"):
        get("small", tmp_path, base_url=server.url)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


# Archives


def tar(*members):
    """A tar.gz of (name, content) pairs; content None makes a link to /etc/passwd."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            else:
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content or b""))
    return out.getvalue()


def zipped(*members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
    return out.getvalue()


PACKERS = {"pack.tar.gz": (tar, untar), "pack.zip": (zipped, unzip)}
GOOD = ("inner/a.bin", ROWS.tobytes())
HOSTILE = [
    ("inner/../../../evil", b"e"),
    ("/tmp/fedp3-evil", b"e"),
    ("../a.bin", b"e"),
    ("inner/readme.txt", b"r"),
    ("a.bin", b"e"),
]


def serve(server, monkeypatch, name, raw):
    monkeypatch.setitem(SOURCES, "small", packed_source(name, raw, PACKERS[name][1]))
    server.answers = {name: complete(raw)}


@pytest.mark.parametrize("name", PACKERS)
def test_an_archive_gives_its_expected_members_and_no_others(server, tmp_path, monkeypatch, name):
    serve(server, monkeypatch, name, PACKERS[name][0](*HOSTILE[:3], GOOD, *HOSTILE[3:]))
    at = get("small", tmp_path / "d", base_url=server.url)
    assert everything(tmp_path) == {
        tmp_path / "d": None,
        tmp_path / "d/small": None,
        at: None,
        at / "a.bin": ROWS.tobytes(),
    }
    assert not Path("/tmp/fedp3-evil").exists()
    assert torch.equal(
        load("small", tmp_path / "d").y, torch.from_numpy(ROWS[:, 0].astype(np.int64))
    )


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize(
    ("members", "text"),
    [
        (HOSTILE, "lacks inner/a.bin"),
        ([("inner/a.bin", bytes(ROWS.size + 100_000))], "has a member a.bin of more than"),
        ([("inner/a.bin", bytes(10))], "has 10 bytes"),
    ],
)
def test_an_archive_without_the_right_members_is_refused(
    server, tmp_path, monkeypatch, name, members, text
):
    serve(server, monkeypatch, name, PACKERS[name][0](*members))
    fails(
        lambda: get("small", tmp_path, base_url=server.url),
        tmp_path,
        text,
        f"put a.bin (from {SOURCES['small'].url}",
    )


def test_a_link_in_place_of_a_member_is_not_followed(server, tmp_path, monkeypatch):
    serve(server, monkeypatch, "pack.tar.gz", tar(("inner/a.bin", None)))
    fails(lambda: get("small", tmp_path, base_url=server.url), tmp_path, "lacks inner/a.bin")


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize(
    "broken", [lambda raw: raw[:-200], lambda raw: b"", lambda raw: b"<html>moved</html>" * 100]
)
def test_a_broken_archive_is_refused_even_with_the_right_md5(
    server, tmp_path, monkeypatch, name, broken
):
    serve(server, monkeypatch, name, broken(PACKERS[name][0](GOOD)))
    fails(
        lambda: get("small", tmp_path, base_url=server.url), tmp_path, f"{name} is not a complete"
    )
