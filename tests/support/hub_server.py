"""A server on loopback that answers as the Hugging Face Hub does where a file is read.

    with hub(folder) as there:
        ... GET {there.url}/datasets/ORG/NAME/resolve/REVISION/PATH ...

The folder holds `ORG/NAME/REVISION/PATH`. The answer is 302 to a signed URL of a second server, the
CDN, which serves ranges of it and asks for no token, as the Hub's does; each signed URL can end
after some uses, or on command, upon which it is 403. Both are one process, which obeys a POST of
JSON from the test: `python -m support.hub_server ROOT PORT CDN_PORT`.
"""

import contextlib
import http.client
import http.server
import json
import mimetypes
import re
import secrets
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from support import LIMIT_S
from support.servers import free_port, running
from support.trees import environment

TESTS = Path(__file__).resolve().parent.parent
RESOLVE = re.compile(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
TREE = re.compile(r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Request(NamedTuple):
    """One request that was answered, by the Hub or by its CDN."""

    server: str  # "hub" or "cdn"
    method: str
    path: str  # without the signature
    range: str  # the Range header, or ""
    status: int
    authorized: bool = False  # it had the header Authorization


class State:
    """What the two servers share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.token: str | None = None
        self.uses: int | None = None
        self.page = 1000  # entries of a page of a tree, at most
        self.cdn_url = ""
        self.requests: list[Request] = []
        self._lock = threading.Lock()
        self._left: dict[str, tuple[Path, int | None]] = {}

    def sign(self, path: Path) -> str:
        """Make a signed URL of a file."""
        signature = secrets.token_hex(8)
        self._left[signature] = path, self.uses
        name = urllib.parse.quote(path.relative_to(self.root).as_posix())
        return f"{self.cdn_url}/{name}?Signature={signature}"

    def use(self, signature: str) -> Path | None:
        """Return the file of a signature, and count the use; None where it has ended."""
        with self._lock:
            path, left = self._left.get(signature, (None, 0))
            if path is None or left == 0:
                return None
            self._left[signature] = path, None if left is None else left - 1
            return path

    def obey(self, command: dict[str, Any]) -> list[Request]:
        """Set what is given, end the signed URLs if told so, and return the requests until now."""
        with self._lock:
            if command.pop("expire", False):
                self._left.clear()
            for name, value in command.items():
                setattr(self, name, value)
            return list(self.requests)


class _Handler(http.server.BaseHTTPRequestHandler):
    """What both have in common."""

    protocol_version = "HTTP/1.1"
    state: ClassVar[State]
    name = ""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def answer(self) -> None:
        raise NotImplementedError

    def send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        path = self.path.partition("?")[0]
        asked = self.headers.get("Range", "")
        authorized = "Authorization" in self.headers
        one = Request(self.name, self.command, path, asked, status, authorized)
        self.state.requests.append(one)
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Resolve(_Handler):
    """The Hub itself."""

    name = "hub"

    def answer(self) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        tree = TREE.fullmatch(path)
        found = tree or RESOLVE.fullmatch(path)
        if self.state.token and self.headers.get("Authorization") != f"Bearer {self.state.token}":
            # For who may not know, what is private does not exist.
            self.refuse(401, "RepoNotFound", "Invalid username or password.")
        elif found is None or not (self.state.root / found[1]).is_dir():
            self.refuse(404, "RepoNotFound", "Repository not found")
        elif not (self.state.root / found[1] / found[2]).is_dir():
            self.refuse(404, "RevisionNotFound", "Revision not found")
        elif tree is not None:
            self.list(self.state.root / tree[1] / tree[2], tree[3] or "")
        elif not (path := self.state.root / found[1] / found[2] / found[3]).is_file():
            self.refuse(404, "EntryNotFound", "Entry not found")
        else:
            size = str(path.stat().st_size)
            headers = {"X-Repo-Commit": COMMIT, "X-Linked-Size": size, "X-Linked-ETag": etag(path)}
            self.send(302, {"Location": self.state.sign(path), **headers})

    def list(self, root: Path, folder: str) -> None:
        """Answer a page of the tree below a folder; in the order of the Hub, folders first."""
        query = urllib.parse.parse_qs(self.path.partition("?")[2])
        top = root / folder
        if not top.is_dir():
            self.refuse(404, "EntryNotFound", "Entry not found")
            return
        entries = []
        for path in sorted(top.rglob("*"), key=lambda path: (path.is_file(), path)):
            here = path.relative_to(root).as_posix()
            if path.is_dir():
                entries.append({"type": "directory", "oid": "0", "size": 0, "path": here})
            else:
                one = {"type": "file", "oid": etag(path)[1:-1], "size": path.stat().st_size}
                entries.append(one | {"path": here})
        first = int(query.get("cursor", ["0"])[0])
        page = min(int(query["limit"][0]), self.state.page)
        headers = {"Content-Type": "application/json"}
        if first + page < len(entries):
            query["cursor"] = [str(first + page)]
            host, path = self.headers["Host"], self.path.partition("?")[0]
            more = urllib.parse.urlencode(query, doseq=True)
            headers["Link"] = f'<http://{host}{path}?{more}>; rel="next"'
        self.send(200, headers, json.dumps(entries[first : first + page]).encode())

    def do_POST(self) -> None:
        """Obey the test: the Hub itself has no such request."""
        command = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps(self.state.obey(command)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, code: str, message: str) -> None:
        self.send(status, {"X-Error-Code": code, "X-Error-Message": message}, message.encode())


class _Cdn(_Handler):
    """What the Hub redirects to."""

    name = "cdn"

    def answer(self) -> None:
        query = urllib.parse.parse_qs(self.path.partition("?")[2])
        path = self.state.use(query.get("Signature", [""])[0])
        if path is None:
            body = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
            self.send(403, {"Content-Type": "application/xml"}, body)
            return
        size = path.stat().st_size
        begin, end = 0, size
        headers = {"ETag": etag(path), "Accept-Ranges": "bytes"}
        headers["Content-Type"] = mimetypes.guess_type(path)[0] or "application/octet-stream"
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        status = HTTPStatus.OK
        if asked:
            first, last = asked.groups()
            begin = int(first) if first else max(0, size - int(last))
            end = min(size, int(last) + 1) if first and last else size
            if begin >= end:
                self.send(416, {"Content-Range": f"bytes */{size}"})
                return
            status = HTTPStatus.PARTIAL_CONTENT
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        with path.open("rb") as file:
            file.seek(begin)
            body = file.read(end - begin)
        self.send(status, headers, body)


def etag(path: Path) -> str:
    stat = path.stat()
    return f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"'


class Hub:
    """The running Hub, from the test's side."""

    def __init__(self, port: int, cdn_port: int) -> None:
        self.port, self.cdn_port = port, cdn_port
        self.url = f"http://127.0.0.1:{port}"

    def set(self, **given: Any) -> None:
        """Change the token, the uses of URLs signed from now on, or the `cdn_url` they begin with.

        token:   who has it not is answered 401; None: the repositories are public
        uses:    of each signed URL; None: any number
        cdn_url: such as that of a fault proxy before `cdn_port`
        page:    entries of a page of a tree, at most
        """
        self._control(given)

    def expire(self) -> None:
        """End all signed URLs that were given until now."""
        self._control({"expire": True})

    def requests(self) -> list[Request]:
        """Return all requests that were answered until now."""
        return [Request(*one) for one in self._control({})]

    def _control(self, command: dict[str, Any]) -> Any:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        with contextlib.closing(client):
            client.request("POST", "/", json.dumps(command))
            return json.load(client.getresponse())


@contextlib.contextmanager
def hub(root: Path, *, token: str | None = None, uses: int | None = None) -> Iterator[Hub]:
    """Serve a folder of `ORG/NAME/REVISION/PATH` as the Hub does. token, uses: see `Hub.set`."""
    with tempfile.TemporaryDirectory(prefix="shardio-hub-") as scratch:
        there = Hub(free_port(hold=True), free_port(hold=True))
        command = [sys.executable, "-m", "support.hub_server", root.resolve()]
        command += [str(there.port), str(there.cdn_port)]
        with running(command, there.port, Path(scratch), environment(PYTHONPATH=str(TESTS))):
            there.set(token=token, uses=uses)
            yield there


def main() -> None:
    root, *ports = sys.argv[1:]
    state = State(Path(root))
    state.cdn_url = f"http://127.0.0.1:{ports[1]}"
    servers = []
    for handler, port in zip((_Resolve, _Cdn), ports, strict=True):
        of_it = type(handler.__name__, (handler,), {"state": state})
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), of_it))
    # The Hub's last, since its port is the sign that both listen.
    threading.Thread(target=servers[1].serve_forever, daemon=True).start()
    servers[0].serve_forever()


if __name__ == "__main__":
    main()
