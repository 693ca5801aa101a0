"""The web server of the viewer: on loopback, read-only, behind a token.

Everybody on a machine reaches its loopback, and so does every page that a browser there shows. So:

- a random token, which the address that is printed carries; the page that it leads to keeps it in
  a cookie that no script and no other site can use. The cookie's name has the port in it, because
  cookies know no ports;
- only requests to 127.0.0.1 or localhost by name, at any port (`ssh -L`): a site that points its
  own name here (DNS rebinding) is refused;
- GET and HEAD without a body, and nothing is written; what is read is the dataset, never a path;
- a policy for the browser (CSP) without scripts, styles or requests from anywhere but here;
- connections, sizes and times are bounded: a client that says nothing, or too slowly, has a thread
  for ten seconds at most.
"""

from __future__ import annotations

import contextlib
import hmac
import http.cookies
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Final
from urllib.parse import urlsplit

from ..errors import OptionError, printable
from .address import Fields, read_query, write_query
from .render import render

LOOPBACK: Final = "127.0.0.1"
_HOSTS: Final = {LOOPBACK, "localhost"}
_CONNECTIONS: Final = 64  # a browser opens six to one host, whatever the number of its tabs
_TARGET_BYTES: Final = 16 << 10  # path and query of a request
_ANSWER_S: Final = 60.0  # until the client has taken an answer: images of MBs, through ssh
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Answer:
    """What a page, a picture or a file is answered by."""

    body: bytes
    type: str = "text/html; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    cacheable: bool = False  # by the browser: the same address always has the same bytes
    location: str = ""  # where the browser is led to
    cookie: str = ""


Site = Callable[[str, Fields], Answer]  # by path, without "/" before it, and query


class Server(socketserver.ThreadingTCPServer):
    """Serves a site on loopback until `serve_forever` is interrupted."""

    allow_reuse_address = True
    request_queue_size = 64
    daemon_threads = True  # Ctrl-C waits for no client
    block_on_close = False

    def __init__(self, site: Site, port: int = 0, *, request_s: float = 10.0) -> None:
        """Listen at the port; 0: at a free one. Raises OptionError.

        request_s: a client has so many seconds for a request, from when its connection is free.
        """
        self.site = site
        self.token = secrets.token_urlsafe(24)
        self._request_s = request_s
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        self._awaited: dict[socket.socket, float] = {}
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise OptionError(f"--port {port}: {why}; without it, a free one is taken") from None
        self.port: int = self.server_address[1]
        self.cookie = f"shardio-{self.port}"

    @property
    def url(self) -> str:
        """Return the address that a user opens."""
        return f"http://{LOOPBACK}:{self.port}/?token={self.token}"

    def knows(self, token: str) -> bool:
        """Return True for the token of this server; the time that it takes tells nothing."""
        return hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode())

    def expect(self, connection: socket.socket) -> None:
        """Give a client some seconds for its request."""
        self._awaited[connection] = time.monotonic() + self._request_s

    def has(self, connection: socket.socket) -> None:
        """Say that the request of a client is there, or that the client is gone."""
        self._awaited.pop(connection, None)

    def service_actions(self) -> None:
        """Close the connections whose request does not come. Called twice a second."""
        now = time.monotonic()
        for connection, until in list(self._awaited.items()):
            if until < now:
                self.has(connection)
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread for a connection, once there are few enough."""
        while not self._free.acquire(timeout=0.5):
            self.service_actions()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection until it is closed."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.has(request)
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say in one line what went wrong, unless the client has gone, or Ctrl-C closed this."""
        error = sys.exception() if sys.version_info >= (3, 11) else sys.exc_info()[1]
        if request.fileno() >= 0 and not isinstance(error, (ConnectionError, TimeoutError)):
            text = printable(f"{type(error).__name__}: {error}", 1_000)
            print(f"shardio: view: {text}", file=sys.stderr)


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"  # one connection for many thumbnails: through ssh it matters
    wbufsize = -1  # buffered: head and body in two packets wait 40 ms for each other
    disable_nagle_algorithm = True
    server: Server

    def setup(self) -> None:
        self.request.settimeout(_ANSWER_S)
        super().setup()

    def handle_one_request(self) -> None:
        self.server.expect(self.connection)
        super().handle_one_request()

    def do_GET(self) -> None:
        """Answer a request, or refuse it."""
        self.server.has(self.connection)
        try:
            answer = self._refusal() or self._answer()
        except ConnectionError:
            raise
        except Exception as error:  # a fault of ours: the page says it, and the server goes on
            self.server.handle_error(self.request, self.client_address)
            answer = failure(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
        self._send(answer)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Refuse what could change something."""
        self.server.has(self.connection)
        self.close_connection = True  # its body is not read
        text = "Only GET and HEAD: nothing can be changed here."
        self._send(failure(HTTPStatus.METHOD_NOT_ALLOWED, text), {"Allow": "GET, HEAD"})

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = do_POST

    def _refusal(self) -> Answer | None:
        """Return why a request is not answered, if it is not."""
        host = self.headers.get_all("Host", [])
        if len(host) != 1 or (host[0].rpartition(":")[0] not in _HOSTS and host[0] not in _HOSTS):
            self.close_connection = True
            text = f"This server is called {LOOPBACK} or localhost, and by no other name."
            return failure(HTTPStatus.MISDIRECTED_REQUEST, text)
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            return failure(HTTPStatus.BAD_REQUEST, "A request here has no body.")
        site, mode = (self.headers.get(f"Sec-Fetch-{name}", "") for name in ("Site", "Mode"))
        if site in ("cross-site", "same-site") and mode != "navigate":  # another port's page
            return failure(HTTPStatus.FORBIDDEN, "A page of another site asks for this.")
        if len(self.path) > _TARGET_BYTES:
            return failure(HTTPStatus.REQUEST_URI_TOO_LONG, "The address is too long.")
        return None

    def _answer(self) -> Answer:
        """Return the answer to one who has the token, and how to get it to one who has not."""
        target = urlsplit("/" + self.path.lstrip("/\\"))
        path, query = target.path[1:], read_query(target.query)
        if (token := query.pop("token", None)) is not None and self.server.knows(token[0]):
            cookie = f"{self.server.cookie}={token[0]}; Path=/; HttpOnly; SameSite=Strict"
            return Answer(
                render("enter.html", target=f"/{path}{write_query(query)}"), cookie=cookie
            )
        if path.startswith("static/"):  # no secret, and the page of a refusal needs it
            return self.server.site(path, query)
        cookies = http.cookies.SimpleCookie()
        with contextlib.suppress(http.cookies.CookieError):
            cookies.load(self.headers.get("Cookie", ""))
        kept = cookies.get(self.server.cookie)
        if kept is None or not self.server.knows(kept.value):
            return failure(
                HTTPStatus.FORBIDDEN,
                "Open the address that `shardio view` printed in the terminal: it has the token.",
            )
        return self.server.site(path, query)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send a page of ours for what Python's server refuses itself, such as a broken request."""
        self.close_connection = True
        self.request_version = self.protocol_version  # of a broken one it is 0.9: without headers
        status = HTTPStatus(code)
        self._send(failure(status, printable(message or status.description, 1_000)))

    def _send(self, answer: Answer, more: dict[str, str] | None = None) -> None:
        """Send an answer, with all that a browser is to know about it."""
        self.send_response(answer.status)
        for name, value in (_HEADERS | (more or {})).items():
            self.send_header(name, value)
        kept = "private, max-age=86400, immutable" if answer.cacheable else "no-store"
        self.send_header("Cache-Control", kept)
        self.send_header("Content-Type", answer.type)
        self.send_header("Content-Length", str(len(answer.body)))
        for name, value in (("Location", answer.location), ("Set-Cookie", answer.cookie)):
            if value:
                self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def version_string(self) -> str:
        return "shardio"

    def log_message(self, *_: object) -> None:
        """Keep the terminal clean."""


def failure(status: HTTPStatus, text: str) -> Answer:
    """Return a page that says what is wrong."""
    return Answer(render("failure.html", title=status.phrase, text=text), status=status)
