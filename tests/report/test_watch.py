"""Watching a run: what the server shows, to whom, and how it stops a run."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from test_report import HOSTILE, make_run
from test_report_page import HANGS, browser  # noqa: F401
from torch import nn

import fedp3
from fedp3.cli import main
from fedp3.core.errors import InputError
from fedp3.core.files import is_locked, locked, read_json
from fedp3.report import live, watch
from fedp3.report.watch import Server
from fedp3.runs.stop_request import StopRequested, request_stop
from processes import ended, start_fedp3


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Server]:
    folder = make_run(tmp_path / "a", reason="NaN")
    with Server(folder) as server:
        yield server


def ask(
    server: Server,
    path: str = "",
    method: str = "GET",
    token: str | None = None,
    **headers: str,
) -> tuple[int, dict[str, str], bytes]:
    """The status, headers and body that a request gets; `path` is what follows the token."""
    port = server.address.port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest(
        method, f"/{server.address.token if token is None else token}/{path}", skip_host=True
    )
    for name, value in ({"Host": f"127.0.0.1:{port}"} | headers).items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = b"" if path == "events" and answer.status == 200 else answer.read()
    connection.close()
    return answer.status, {k.lower(): v for k, v in answer.getheaders()}, body


def origin(server: Server, host: str = "127.0.0.1") -> str:
    return f"http://{host}:{server.address.port}"


# --------------------------------------------------------------------------- who may ask what


def test_only_the_page_its_events_and_the_report_are_served(served: Server) -> None:
    assert ask(served)[0] == ask(served, "report")[0] == ask(served, "events")[0] == 200
    folder = served.watched.folder
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    assert "events.jsonl" in names and "run.json" in names
    for name in [*names, "checkpoint/", "ledger.jsonl", "..", "../a", "%2e%2e/run.json", "stop"]:
        assert ask(served, name)[0] == 404, name


def test_the_token_is_needed_for_everything(served: Server) -> None:
    token = served.address.token
    assert len(token) >= 32
    for wrong in ("", "x", token[:-1], token + "x", token.swapcase(), "%00", "é".encode().hex()):
        for path in ("", "events", "report"):
            assert ask(served, path, token=wrong)[0] == 404
        assert ask(served, "stop", "POST", wrong, Origin=origin(served))[0] == 404
    with Server(served.watched.folder) as other:
        assert other.address.token != token


def test_a_website_cannot_reach_the_server_through_a_browser(served: Server) -> None:
    port = served.address.port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
        assert ask(served, Host=host)[0] == 403
        assert ask(served, "stop", "POST", Host=host, Origin=origin(served))[0] == 403
    for other in ("http://evil.example", "null", f"https://127.0.0.1:{port}", "http://127.0.0.1"):
        assert ask(served, "events", Origin=other)[0] == 403
        assert ask(served, "stop", "POST", Origin=other)[0] == 403
    assert ask(served, "stop", "POST")[0] == 403, "a page always names its origin"
    assert ask(served, Host=f"localhost:{port}")[0] == 200
    assert ask(served, "events", Origin=origin(served))[0] == 200


def test_other_methods_are_not_supported(served: Server) -> None:
    for method in ("PUT", "DELETE", "HEAD", "OPTIONS"):
        assert ask(served, "", method, Origin=origin(served))[0] == 501
    assert ask(served, "", "POST", Origin=origin(served))[0] == 404


def test_only_loopback_is_listened_on(served: Server) -> None:
    assert served._http.server_address[0] == "127.0.0.1"
    assert urlsplit(served.address.url).hostname == "127.0.0.1"


def test_answers_are_not_stored_and_run_nothing_else(served: Server) -> None:
    for path in ("", "report", "events", "nothing"):
        headers = ask(served, path)[1]
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert "content-security-policy" in headers
    policy = ask(served)[1]["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy


def test_a_hostile_name_is_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", reason=HOSTILE)
    folder = folder.rename(tmp_path / "<script>alert(1)<")
    with Server(folder) as server:
        assert b"<script>alert(1)" not in ask(server)[2]


# --------------------------------------------------------------------------- the stream


def stream(server: Server) -> Iterator[dict[str, Any]]:
    """The numbers of a stream of events as they come."""
    connection = http.client.HTTPConnection("127.0.0.1", server.address.port, timeout=60)
    connection.request("GET", f"/{server.address.token}/events")
    answer = connection.getresponse()
    try:
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    finally:
        connection.close()


def test_a_stream_sends_the_numbers_once_and_then_only_news(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "HEARTBEAT", 0.2)
    folder, numbers = served.watched.folder, stream(served)
    first = next(numbers)
    events = (folder / "events.jsonl").read_text().splitlines()
    assert first["round"] == len(events) and first["state"] == "finished"
    more = json.loads(events[-1]) | {"t": len(events), "round": len(events) + 1}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(more) + "\n")
    assert next(numbers)["round"] == len(events) + 1
    numbers.close()


def test_there_are_not_too_many_streams(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "_streams", threading.BoundedSemaphore(2))
    first, second = stream(served), stream(served)
    next(first), next(second)
    connection = http.client.HTTPConnection("127.0.0.1", served.address.port, timeout=60)
    connection.request("GET", f"/{served.address.token}/events")
    assert b"event: full" in connection.getresponse().read()
    connection.close()


def test_a_folder_is_looked_at_by_one_thread_however_many_pages_are_open(served: Server) -> None:
    streams = [stream(served) for _ in range(3)]
    for numbers in streams:
        next(numbers)
    assert sum(t.name == "fedp3-watch" for t in threading.enumerate()) == 1


def test_the_report_is_made_once_for_each_change(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    render = watch.render
    monkeypatch.setattr(watch, "render", lambda runs: made.append(1) or render(runs))
    assert ask(served, "report")[2] == ask(served, "report")[2] and len(made) == 1


# --------------------------------------------------------------------------- the numbers


def test_events_are_read_as_they_grow_and_again_if_they_were_cut_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = live.EventReader(tmp_path)
    assert not reader.update() and reader.events == []
    path.write_text('{"t": 0}\n{"t": 1}\n{"t"')
    assert reader.update() and [e["t"] for e in reader.events] == [0, 1]
    assert not reader.update(), "a line that is being written is not read"
    path.write_text(path.read_text() + ": 2}\n")
    assert reader.update() and [e["t"] for e in reader.events] == [0, 1, 2]
    (tmp_path / "new").write_text('{"t": 0}\n{"t": 5}\n{"t": 6}\n{"t": 7}\n')
    (tmp_path / "new").rename(path)
    assert reader.update() and [e["t"] for e in reader.events] == [0, 5, 6, 7]


def test_client_states_are_those_of_the_last_round_in_which_they_were_asked() -> None:
    def event(t: int, sampled: list[int], accepted: list[int], late: list[int]) -> dict[str, Any]:
        return {"t": t, "sampled": sampled, "accepted": accepted, "late": late}

    rows = live.clients_of(
        [event(0, [0, 1, 2], [0, 1], []), event(1, [1, 3, 9], [], [3]), event(2, [0], [0], [])], 5
    )
    assert [row["did"] for row in rows] == ["used", "rejected", "rejected", "late", "never"]
    assert [row["round"] for row in rows] == [3, 2, 1, 2, None]
    assert [row["used"] for row in rows] == [2, 1, 0, 0, 0]


def test_the_state_of_a_run_follows_from_its_folder(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", reason="NaN")
    assert live.state_of(folder) == "finished"
    result = read_json(folder / "result.json")
    (folder / "result.json").write_text(json.dumps(result | {"stopped": "enough"}))
    assert live.state_of(folder) == "stopped"
    (folder / "result.json").unlink()
    assert live.state_of(folder) == "idle"
    with pytest.raises(InputError, match="no process is training"):
        request_stop(folder)
    with locked(folder):
        assert is_locked(folder) and live.state_of(folder) == "running"
        request_stop(folder)
        assert live.state_of(folder) == "stopping"
    assert not is_locked(folder)


def test_time_left_is_that_of_recent_rounds(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", reason="NaN")
    reader = live.EventReader(folder)
    reader.update()
    events = [e | {"seconds": 100.0} for e in reader.events[:1]]
    events += [reader.events[0] | {"t": t, "seconds": 2.0} for t in range(1, 12)]
    numbers = live.snapshot(folder, events, "running")
    assert numbers["left"] == pytest.approx(2.0 * (numbers["rounds"] - 12))
    assert live.snapshot(folder, events, "idle")["left"] is None


# --------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nowhere"], "nowhere is not a run folder"),
        (["seeds"], "watch one, as in seeds/seed-0"),
        (["run", "--port", "70000"], "70000"),
    ],
)
def test_bad_input_is_answered(
    words: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", reason="NaN")
    Path("seeds").mkdir()
    Path("seeds/seeds.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(["watch", *words])
    assert ended.value.code == 2 and text in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", reason="NaN")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="choose another --port"):
            Server(folder, taken.getsockname()[1])


# --------------------------------------------------------------------------- a run that is going on


@pytest.fixture
def training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], BaseProcess]]:
    """Starts a long run in `tmp_path / "a"`, and ends it with the test if it still goes on."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["init", str(tmp_path / "my.toml")])
    started: list[BaseProcess] = []

    def start() -> BaseProcess:
        words = ["run.rounds=2000", "run.eval_every=1", "partition.clients=12", "local.steps=1"]
        process = start_fedp3(tmp_path / "log", "run", "my.toml", *words, "--out", "a")
        started.append(process)
        until(lambda: live.EventReader(tmp_path / "a").update(), "the first round")
        return process

    yield start
    for process in started:
        process.terminate()
        process.join()


def until(done: Callable[[], Any], what: str) -> None:
    for _ in range(1200):
        if done():
            return
        time.sleep(0.1)
    raise AssertionError(f"waited in vain for {what}")


def test_a_request_stops_a_run_as_ctrl_c_does(
    tmp_path: Path, training: Callable[[], BaseProcess]
) -> None:
    process = training()
    with Server(tmp_path / "a") as server:
        status, _, body = ask(server, "stop", "POST", Origin=origin(server))
        assert status == 202 and json.loads(body) == {"stopping": True}
        assert ended(process) == 130
        until(lambda: live.state_of(tmp_path / "a") == "idle", "the end")
        status, _, body = ask(server, "stop", "POST", Origin=origin(server, "localhost"))
        assert status == 409 and "no process is training" in json.loads(body)["error"]
    assert "resume with: fedp3 resume a" in (tmp_path / "log").read_text()
    assert not (tmp_path / "a" / "stop").exists() and not (tmp_path / "a" / "result.json").exists()


def test_a_stopped_python_run_raises_and_resumes_at_the_same_bits(tmp_path: Path) -> None:
    y = torch.arange(80) % 2
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(0)) + 2 * y[:, None]

    def run(**how: Any) -> fedp3.Result:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        return fedp3.run(net, (x, y), run={"rounds": 6}, **how)

    folder = tmp_path / "r"

    def stop(record: Any) -> None:
        if record.t == 2:
            request_stop(folder)

    with pytest.raises(StopRequested):
        run(out=folder, on_round=stop)
    assert issubclass(StopRequested, KeyboardInterrupt)
    resumed = run(out=folder, resume=True)
    assert len(resumed.history) == 6 and resumed.model_sha256 == run().model_sha256


def test_an_old_request_does_not_stop_a_resumed_run(tmp_path: Path) -> None:
    x, y = torch.randn(40, 6), torch.arange(40) % 2
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    (tmp_path / "r").mkdir()
    with locked(tmp_path / "r"):
        request_stop(tmp_path / "r")
    result = fedp3.run(net, (x, y), out=tmp_path / "r", resume=True, run={"rounds": 3})
    assert len(result.history) == 3


def test_the_page_follows_a_run_and_its_button_stops_it(
    tmp_path: Path,
    training: Callable[[], BaseProcess],
    browser: Any,  # noqa: F811
) -> None:
    process = training()
    with Server(tmp_path / "a") as server:
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        errors: list[str] = []
        asked: list[str] = []
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("request", lambda r: asked.append(r.url))
        page.goto(server.address.url, timeout=HANGS)
        page.set_default_timeout(HANGS)

        def round_shown() -> int:
            return int(page.locator("#round").inner_text().partition(" ")[0].replace("–", "0"))

        until(lambda: page.locator("#state").inner_text() == "training", "the first numbers")
        first = round_shown()
        until(lambda: round_shown() > first + 2, "further rounds")
        assert page.locator("#left").inner_text() != "–"
        assert page.locator("#G").inner_text().endswith("%")
        assert page.locator("#clients i").count() == 12
        assert page.locator("#clients i.recent").count() == 10
        assert 0 < page.locator("#timeline i").count() <= live.RECENT
        frame = page.frame_locator("#report iframe")
        assert "rounds" in frame.locator(".lead").first.inner_text()
        for width in (1300, 400):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        sizes = page.locator("main :not(:has(*))").evaluate_all(
            "parts => parts.filter(p => p.textContent.trim()).map(p => "
            "parseFloat(getComputedStyle(p).fontSize))"
        )
        assert min(sizes) >= 11
        page.locator("#stop").click()
        assert page.locator("#stop").inner_text() == "Really stop? Click again"
        assert not (tmp_path / "a" / "stop").exists(), "one click is not enough"
        page.locator("#stop").click()
        assert ended(process) == 130
        until(lambda: page.locator("#state").inner_text() == "stopped by this page", "the end")
        assert not page.locator("#stop").is_visible()
        assert errors == []
        assert {urlsplit(url).netloc for url in asked} == {f"127.0.0.1:{server.address.port}"}
        streams = [url for url in asked if url.endswith("/events")]
        assert len(streams) == 1, "one stream, no polling"
        page.close()


def test_the_page_of_a_finished_run_shows_its_end(served: Server, browser: Any) -> None:  # noqa: F811
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.goto(served.address.url, timeout=HANGS)
    until(lambda: page.locator("#state").inner_text() == "finished", "the numbers")
    assert not page.locator("#stop").is_visible()
    assert page.locator("#link").inner_text() == "the run is finished"
    page.close()


def test_the_command_prints_an_address_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    make_run(tmp_path / "a", reason="NaN")
    program = [sys.executable, "-m", "fedp3", "watch", "a", "--json"]
    process = subprocess.Popen(program, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = urlsplit(json.loads(process.stdout.readline())["url"])
    connection = http.client.HTTPConnection("127.0.0.1", url.port, timeout=60)
    connection.request("GET", url.path)
    assert b"fedp3 watch" in connection.getresponse().read()
    connection.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    process.stdout.close()
