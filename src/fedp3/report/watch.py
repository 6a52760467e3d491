"""A small web server that shows one run while it trains, to this machine only.

It listens on loopback and answers four requests: the page, its stream of events, the report, and a
POST that stops the run.  It reads the run folder and never serves a file of it.  Every address has
a random token, so that other users of the machine cannot guess it.  The names of the server and of
the page that sends a request are checked, so that no website can reach it through a browser.
"""

import json
import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedp3.core.errors import FedP3Error, InputError
from fedp3.core.files import json_line
from fedp3.report.live import EventReader, check_watchable, snapshot, state_of
from fedp3.report.page import policy_for, render, template_file
from fedp3.report.runs import load_runs
from fedp3.runs.stop_request import request_stop

LOOPBACK = "127.0.0.1"
LOOKS = 0.5  # seconds between two looks at the folder, however many pages are open
HEARTBEAT = 15.0  # seconds after which a quiet stream says that it is alive
STREAMS = 16  # open at the same time


class Watched:
    """A run folder that one thread looks at, for any number of pages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = EventReader(folder)
        self._news = threading.Condition()
        self._closed = threading.Event()
        self._state = ""
        self._version = 0
        self._snapshot: dict[str, Any] = {}
        self._report: tuple[int, bytes] = (-1, b"")
        self._look()
        self._thread = threading.Thread(target=self._watch, name="fedp3-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking, and end all streams."""
        self._closed.set()
        with self._news:
            self._news.notify_all()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(LOOKS):
            with suppress(FedP3Error, OSError, ValueError):  # a file is being replaced: look again
                self._look()

    def _look(self) -> None:
        """Look at the folder; if it has changed, wake all who wait for news."""
        changed, state = self._reader.update(), state_of(self.folder)
        if not changed and state == self._state:
            return
        now = snapshot(self.folder, self._reader.events, state)
        with self._news:
            self._state, self._snapshot = state, now
            self._version += 1
            self._news.notify_all()

    def wait(self, seen: int) -> tuple[int, dict[str, Any]] | None:
        """The newest numbers and their version; None if there is nothing newer for a while.

        Args:
            seen: the version that the caller has.
        """
        with self._news:
            self._news.wait_for(lambda: self._version != seen or self._closed.is_set(), HEARTBEAT)
            return None if self._version == seen else (self._version, self._snapshot)

    @property
    def is_closed(self) -> bool:
        """Whether the server is shutting down."""
        return self._closed.is_set()

    def report(self) -> bytes:
        """The report as it would be written now; it is made once for each change of the folder."""
        with self._news:
            version, (made, page) = self._version, self._report
        if made != version:
            page = render(load_runs([self.folder])).encode("utf-8", "replace")
            with self._news:
                self._report = (version, page)
        return page


@dataclass(frozen=True, slots=True)
class Address:
    """Where the page is; nobody else knows the token."""

    port: int
    token: str

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{LOOPBACK}:{self.port}/{self.token}/"

    @property
    def hosts(self) -> set[str]:
        """The names under which a browser may reach this server."""
        return {f"{name}:{self.port}" for name in (LOOPBACK, "localhost")}


class Server:
    """The server of one run; a context in which it answers.

    Args:
        folder: the run folder.
        port: the port; 0 chooses a free one.

    Raises:
        InputError: this is not the folder of one run, or the port is taken.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        check_watchable(folder)
        self._streams = threading.BoundedSemaphore(STREAMS)
        try:
            self._http = _Http((LOOPBACK, port), partial(_Handler, server=self))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"cannot listen on port {port}: {reason}; choose another --port"
            ) from None
        self.address = Address(self._http.server_address[1], secrets.token_urlsafe(24))
        self.watched = Watched(folder)
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    def __enter__(self) -> "Server":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.watched.close()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def page(self) -> tuple[str, str]:
        """The live page and its security policy."""
        style = template_file("style.css") + template_file("live.css")
        script = template_file("live.js")
        policy = (
            f"{policy_for(style, script)}; connect-src 'self'; frame-src 'self'; "
            "frame-ancestors 'none'"
        )
        environment = Environment(
            loader=PackageLoader("fedp3.report", "template"),
            autoescape=True,
            undefined=StrictUndefined,
        )
        html = environment.get_template("live.html").render(
            name=self.watched.folder.resolve().name, style=Markup(style), script=Markup(script)
        )
        return html, policy

    def stream(self, send: Callable[[bytes], None]) -> bool:
        """Send news as server-sent events until the reader has gone; False if too many read."""
        if not self._streams.acquire(blocking=False):
            return False
        try:
            seen = 0
            while not self.watched.is_closed:
                news = self.watched.wait(seen)
                if news is None:
                    send(b": still there\n\n")
                    continue
                seen, numbers = news
                send(b"data: " + json_line(numbers).rstrip() + b"\n\n")
        except OSError:
            pass  # the page was closed
        finally:
            self._streams.release()
        return True


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = False


class _Handler(BaseHTTPRequestHandler):
    """Answers requests that have the token, and were made by the page itself."""

    def __init__(self, *arguments: Any, server: Server) -> None:
        self._server = server
        super().__init__(*arguments)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: addresses have the token in them."""

    def do_GET(self) -> None:
        """The page, its events, or the report."""
        self._answer({"": self._page, "events": self._events, "report": self._report})

    def do_POST(self) -> None:
        """Stop the run."""
        self._answer({"stop": self._stop}, origin_needed=True)

    def _answer(
        self, routes: Mapping[str, Callable[[], None]], *, origin_needed: bool = False
    ) -> None:
        address = self._server.address
        origins = {f"http://{host}" for host in address.hosts}
        origin = self.headers.get("Origin")
        if self.headers.get("Host") not in address.hosts:
            return self._refuse(HTTPStatus.FORBIDDEN)
        if origin not in (origins if origin_needed else {None, *origins}):
            return self._refuse(HTTPStatus.FORBIDDEN)
        _, token, *rest = f"{self.path}/".split("/", 2)
        route = routes.get(rest[0].removesuffix("/")) if rest else None
        if route is None or not compare_digest(token.encode(), address.token.encode()):
            return self._refuse(HTTPStatus.NOT_FOUND)
        return route()

    def _refuse(self, status: HTTPStatus) -> None:
        self._send(status, "text/plain", status.phrase.encode())

    def _send(
        self, status: HTTPStatus, kind: str, body: bytes, policy: str = "default-src 'none'"
    ) -> None:
        self._head(status, kind, policy)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str, policy: str) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "Referrer-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
        }.items():
            self.send_header(name, value)

    def _page(self) -> None:
        html, policy = self._server.page()
        self._send(HTTPStatus.OK, "text/html", html.encode("utf-8", "replace"), policy)

    def _report(self) -> None:
        try:
            page = self._server.watched.report()
        except FedP3Error as error:
            return self._send(HTTPStatus.CONFLICT, "text/plain", str(error).encode())
        # the page has a policy of its own, by the hashes of its script and style
        return self._send(HTTPStatus.OK, "text/html", page, "frame-ancestors 'self'")

    def _events(self) -> None:
        self._head(HTTPStatus.OK, "text/event-stream", "default-src 'none'")
        self.end_headers()
        if not self._server.stream(self._write):
            self._write(b"event: full\ndata: {}\n\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def _stop(self) -> None:
        try:
            request_stop(self._server.watched.folder)
        except FedP3Error as error:
            answer = {"error": str(error)}
            return self._send(HTTPStatus.CONFLICT, "application/json", json.dumps(answer).encode())
        return self._send(HTTPStatus.ACCEPTED, "application/json", b'{"stopping": true}')
