"""Whatever stops a run, `fedp3 resume` ends at the same bits as a run that nothing stopped.

A crash at any moment neither loses a round nor counts one twice.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from killed import MOMENTS, train

from fedp3 import cli
from fedp3.core import files
from fedp3.core.errors import RunError
from fedp3.core.files import locked
from fedp3.runs import checkpoint, run_folder, writer
from fedp3.runs.writer import round_writer
from processes import ended, start, start_fedp3

CONFIG = """
method = "fedp3"
[partition]
clients = 6
[model]
width = 0.02
[plan]
head = "personal_uploaded"
[aggregate]
rule = "attention"
[local]
steps = 2
lr = 0.1
[run]
rounds = 4
clients_per_round = 4
eval_every = 2
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    (folder / "my.toml").write_text(CONFIG)
    return folder


def fedp3(*arguments: str, capsys=None) -> tuple[int, str]:
    """Run the command line in this process: (exit code, last line of standard output)."""
    try:
        cli.main(list(arguments))
        code = 0
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    text = capsys.readouterr() if capsys else None
    last = text.out.strip().splitlines()[-1:] if text else []
    return code, (last[0] if last else "") + (text.err if text and code else "")


@pytest.fixture(scope="module")
def uninterrupted(place: Path) -> str:
    """The model hash of a run that nothing ended."""
    fedp3("run", str(place / "my.toml"), "--out", str(place / "uninterrupted"))
    return model_of(place / "uninterrupted")


def model_of(folder: Path) -> str:
    return str(files.read_json(folder / "result.json")["model_sha256"])


def hash_after_resume(folder: Path) -> str:
    code, _ = fedp3("resume", str(folder))
    assert code == 0
    events = run_folder.read_events(folder)
    assert [e["t"] for e in events] == [0, 1, 2, 3]
    return model_of(folder)


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_this_moment_it_resumes_to_the_same_bits(moment, place, uninterrupted, tmp_path):
    log, folder = tmp_path / "log", str(tmp_path / "run")
    killed = start(log, train, str(place / "my.toml"), folder, moment, 3)
    assert ended(killed) == -signal.SIGKILL, log.read_text()[-2000:]
    assert not (tmp_path / "run" / "result.json").exists()
    assert hash_after_resume(tmp_path / "run") == uninterrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_and_names_the_way_back(
    number, place, uninterrupted, tmp_path
):
    folder = tmp_path / "run"
    slow = [
        str(place / "my.toml"),
        "run.checkpoint_every=100",
        "run.rounds=2000",
        "--out",
        str(folder),
    ]
    process = start_fedp3(tmp_path / "log", "run", *slow)
    wait_for(lambda: len(run_folder.read_events(folder)) >= 3)
    os.kill(process.pid, number)
    code, err = ended(process), (tmp_path / "log").read_text()
    assert code == 128 + number, err
    assert f"fedp3 resume {folder}" in err
    newest = max(p.stem for p in (folder / "checkpoint").glob("*.json"))
    # After a signal between the event and the end of a round, the event is cut on resume, and the
    # round is run again.
    assert len(run_folder.read_events(folder)) - int(newest) in (0, 1), (
        "the last complete round is saved"
    )


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def damage_truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def damage_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [damage_truncated, damage_bit, damage_gone])
@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(
    damage, suffix, place, uninterrupted, tmp_path, capsys
):
    shutil.copytree(place / "uninterrupted", tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    damage(tmp_path / "run" / "checkpoint" / f"00000004.{suffix}")
    assert hash_after_resume(tmp_path / "run") == uninterrupted
    text = capsys.readouterr().err
    assert "resuming after round 3 of 4" in text
    if not (damage is damage_gone and suffix == "json"):
        assert "checkpoint of round 4 cannot be used" in text


def test_without_any_checkpoint_a_run_begins_again(place, uninterrupted, tmp_path):
    shutil.copytree(place / "uninterrupted", tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    (tmp_path / "run" / "checkpoint").mkdir()
    assert hash_after_resume(tmp_path / "run") == uninterrupted


def test_a_finished_run_prints_its_result(place, uninterrupted, capsys):
    code, last = fedp3("resume", str(place / "uninterrupted"), "--json", capsys=capsys)
    assert code == 0
    assert json.loads(last)["model_sha256"] == uninterrupted


def test_a_changed_config_is_refused_with_the_difference(place, uninterrupted, tmp_path, capsys):
    shutil.copytree(place / "uninterrupted", tmp_path / "run")
    text = (tmp_path / "run" / "config.toml").read_text()
    (tmp_path / "run" / "config.toml").write_text(text.replace("lr = 0.1", "lr = 0.3"))
    code, text = fedp3("resume", str(tmp_path / "run"), capsys=capsys)
    assert code == 2
    assert "[local] lr: was 0.1, is 0.3" in text


def test_a_folder_of_an_older_version_is_refused_with_what_that_did_not_know(
    place, uninterrupted, tmp_path, capsys
):
    shutil.copytree(place / "uninterrupted", tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    about = files.read_json(tmp_path / "run" / "run.json")
    del about["config"]["upload"], about["config"]["run"]["quorum"]
    files.write_json(tmp_path / "run" / "run.json", about)
    code, text = fedp3("resume", str(tmp_path / "run"), capsys=capsys)
    assert code == 2
    assert "did not know upload.compress, upload.share, upload.entropy, run.quorum" in text


# -------------------------------------------------------------- writing while the next round trains


@pytest.fixture
def disk(monkeypatch):
    """What is written, in order, on a disk that waits for a permit before each write."""
    written, go = [], threading.Semaphore(0)

    def write(kind: str, what: object) -> None:
        assert go.acquire(timeout=30)
        written.append((kind, what))

    monkeypatch.setattr(writer, "append_event", lambda folder, done: write("event", done))
    monkeypatch.setattr(
        writer,
        "save_checkpoint",
        lambda folder, checkpoint, digest: write("checkpoint", checkpoint),
    )
    return written, go


def test_a_round_is_written_while_the_next_one_trains_and_the_one_after_waits(disk, tmp_path):
    written, go = disk
    with round_writer(tmp_path, "digest", at_once=False) as put:
        put("first", "W1")  # nothing may be written yet: this returns all the same
        assert not written
        second = threading.Thread(target=put, args=("second", None))
        second.start()
        go.release()
        second.join(0.2)
        assert second.is_alive() and len(written) <= 1, "one round at most is waiting"
        for _ in range(3):
            go.release()
        second.join(30)
        put(None, "W2")
        go.release()
    assert written == [
        ("event", "first"),
        ("checkpoint", "W1"),
        ("event", "second"),
        ("checkpoint", "W2"),
    ]


def test_where_rounds_must_not_be_done_twice_each_is_on_disk_before_the_next(disk, tmp_path):
    written, go = disk
    with round_writer(tmp_path, "digest", at_once=True) as put:
        for _ in range(2):
            go.release()
        put("first", "W1")
        assert written == [("event", "first"), ("checkpoint", "W1")]


def test_after_a_write_that_failed_nothing_is_written_over_the_gap(tmp_path, monkeypatch):
    written = []

    def write(folder: Path, done: int) -> None:
        if done == 1:
            raise RunError("no space")
        written.append(done)

    monkeypatch.setattr(writer, "append_event", write)
    monkeypatch.setattr(
        writer, "save_checkpoint", lambda folder, checkpoint, digest: written.append(checkpoint)
    )

    def run() -> None:
        with round_writer(tmp_path, "digest", at_once=False) as put:
            try:
                for t in range(3):
                    put(t, None)
            finally:
                put(None, "W")

    with pytest.raises(RunError, match="no space"):
        run()
    assert written == [0]


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_run_whose_record_failed_once_resumes_with_every_round_in_it(
    failing, place, uninterrupted, tmp_path, monkeypatch
):
    append, calls = writer.append_event, 0

    def once(folder: Path, done: object) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise RunError("no space")
        append(folder, done)

    monkeypatch.setattr(writer, "append_event", once)
    seldom = ["run.checkpoint_every=100", "--out", str(tmp_path / "run")]
    assert fedp3("run", str(place / "my.toml"), *seldom)[0] == 1
    assert hash_after_resume(tmp_path / "run") == uninterrupted


@pytest.mark.parametrize("at_once", [True, False])
def test_what_goes_wrong_in_writing_ends_the_run(at_once, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise RunError("cannot write: no space")

    monkeypatch.setattr(writer, "append_event", full)
    rounds = []

    def run() -> None:
        with round_writer(tmp_path, "digest", at_once=at_once) as put:
            for t in range(5):
                put(t, None)
                rounds.append(t)

    with pytest.raises(RunError, match="no space"):
        run()
    assert len(rounds) <= 1, "the next round finds out"


def test_a_second_run_into_the_same_folder_names_resume(place, uninterrupted, capsys):
    code, text = fedp3(
        "run", str(place / "my.toml"), "--out", str(place / "uninterrupted"), capsys=capsys
    )
    assert code == 2
    assert "fedp3 resume" in text


def test_a_second_writer_is_refused_and_a_dead_ones_lock_is_not_one(
    place, uninterrupted, tmp_path, capsys
):
    shutil.copytree(place / "uninterrupted", tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    with locked(tmp_path / "run"):
        refused = start_fedp3(tmp_path / "log", "resume", str(tmp_path / "run"))
        assert ended(refused) == 2
        assert f"written by process {os.getpid()}" in (tmp_path / "log").read_text()
    assert (tmp_path / "run" / ".lock").exists()
    assert hash_after_resume(tmp_path / "run") == uninterrupted


# --------------------------------------------------------------------------- disks


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB, where the machine lets us mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this machine does not let the test mount a file system")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_stops_the_run_and_keeps_the_old_checkpoint(
    place, small_disk, tmp_path, capsys
):
    big = [str(place / "my.toml"), "model.width=0.1", "--out", str(small_disk / "run")]
    filler = small_disk / "filler"
    filler.write_bytes(b"0" * 500_000)
    code, text = fedp3("run", *big, capsys=capsys)
    assert code == 1
    assert "cannot write" in text and "bytes to" in text and "No space left" in text
    filler.unlink()
    kept, _ = checkpoint.load_checkpoint(small_disk / "run", digest_of(small_disk / "run"))
    assert kept is not None
    code, _ = fedp3("resume", str(small_disk / "run"), capsys=capsys)
    assert code == 0
    fedp3("run", *big[:2], "--out", str(tmp_path / "same"))
    hashes = {
        json.loads((f / "result.json").read_text())["model_sha256"]
        for f in (small_disk / "run", tmp_path / "same")
    }
    assert len(hashes) == 1


def digest_of(folder: Path) -> str:
    return str(files.read_json(folder / "run.json")["digest"])


def test_a_read_only_disk_fails_before_the_first_round(place, small_disk, capsys):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    code, text = fedp3(
        "run", str(place / "my.toml"), "--out", str(small_disk / "run"), capsys=capsys
    )
    assert code == 2
    assert "cannot write to" in text and "Read-only file system" in text


@pytest.mark.parametrize("n", range(1, 11))
def test_an_error_at_the_nth_write_leaves_a_checkpoint_that_works(
    n, place, uninterrupted, tmp_path, monkeypatch, capsys
):
    """Counted from the first write after the run folder is complete; a round takes four."""
    folder, real, calls = tmp_path / "run", os.fsync, 0

    def failing(handle: int) -> None:
        nonlocal calls
        calls += (folder / "events.jsonl").exists()
        if calls == n:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", failing)
    code, text = fedp3("run", str(place / "my.toml"), "--out", str(folder), capsys=capsys)
    monkeypatch.undo()
    assert code == 1
    assert "cannot write" in text and str(folder) in text
    assert not list(folder.rglob("*.new"))
    assert hash_after_resume(folder) == uninterrupted


def test_an_atomic_write_is_all_or_nothing(tmp_path, monkeypatch):
    files.write_atomic(tmp_path / "a", b"old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"cannot write 3 bytes to .*/a: No space left"):
        files.write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_finished_run_that_was_moved_still_prints_its_result(
    place, uninterrupted, tmp_path, monkeypatch, capsys
):
    shutil.copytree(place / "uninterrupted", tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    code, out = fedp3("resume", "moved", "--json", capsys=capsys)
    result = json.loads(out)
    assert code == 0 and result["out"] == "moved" and result["model_sha256"] == uninterrupted


def test_a_run_without_its_folder_of_checkpoints_begins_again(place, uninterrupted, tmp_path):
    shutil.copytree(place / "uninterrupted", tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    assert hash_after_resume(tmp_path / "run") == uninterrupted
