"""A server on loopback that says who one is, and a store that lets only these in.

    with identities(folder) as there:
        there.set(keys=["first"])
        ... read from there.url/bucket/..., with credentials from there.url/container ...

One process is all of these, by the path of the request:

    /container       AWS credentials, as a container's agent gives them
    /latest/...      the same, as EC2's metadata service does (IMDSv2)
    /computeMetadata/...  a token, as Google's metadata server gives it
    else             a file of the folder, below any bucket, for who shows a key that is let in

It does not check signatures, which moto does; it looks for the key, or token, in Authorization. So
credentials can end while an epoch runs. It obeys a POST of JSON to /control.
"""

import contextlib
import http.client
import http.server
import json
import re
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from support import LIMIT_S
from support.servers import free_port, running
from support.trees import environment

TESTS = Path(__file__).resolve().parent.parent


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: ClassVar[Path]
    state: ClassVar[dict[str, Any]] = {
        "keys": [],  # that are let in; the first one is given to who asks
        "lives_s": 3600,  # until what is given says that it ends
        "refuse": [],  # the statuses for who asks for credentials next; then they are given
        "region": "",  # of the bucket: who signs for another one is sent away
        "echo": False,  # a refusal has the whole Authorization in it
        "given": 0,  # how often credentials were given
        "asked": [],  # of the store: [path, Authorization], in order
    }

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        state = self.state
        key = state["keys"][0] if state["keys"] else ""
        if path == "/container" or path.startswith(("/latest/", "/computeMetadata/")):
            if state["refuse"]:
                self.send(state["refuse"].pop(0), b"")
            elif path == "/latest/api/token":
                self.send(200, b"a session")
            elif path == "/latest/meta-data/iam/security-credentials/":
                self.send(200, b"role")
            elif path.startswith("/computeMetadata/"):
                state["given"] += 1
                self.send_json({"access_token": key, "expires_in": state["lives_s"]})
            else:
                state["given"] += 1
                ends = time.gmtime(time.time() + state["lives_s"])
                given = {"AccessKeyId": key, "SecretAccessKey": "of it", "Token": "with it"}
                kind = {
                    "Code": "Success",
                    "Type": "AWS-HMAC",
                    "LastUpdated": "2026-01-01T00:00:00Z",
                }
                ends_text = time.strftime("%Y-%m-%dT%H:%M:%SZ", ends)
                self.send_json({**kind, **given, "Expiration": ends_text})
            return
        self.store(path)

    do_HEAD = do_PUT = do_GET

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.state.update(given)
        self.send_json(self.state)

    def store(self, path: str) -> None:
        asked = self.headers.get("Authorization", "")
        self.state["asked"].append([path, asked])
        region = self.state["region"]
        if region and f"/{region}/" not in asked:
            self.send(301, b"", {"x-amz-bucket-region": region})
        elif not any(key in asked for key in self.state["keys"]):
            code = "AccessDenied" if not asked else "ExpiredToken"
            if self.state["echo"]:
                code = asked.split()[-1]
            self.send(403, f"<Error><Code>{code}</Code></Error>".encode())
        elif not (file := self.root / path.lstrip("/").partition("/")[2]).is_file():
            self.send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            body, status, headers = file.read_bytes(), 200, {}
            if found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                first, last = int(found[1]), min(int(found[2]), len(body) - 1)
                headers = {"Content-Range": f"bytes {first}-{last}/{len(body)}"}
                body, status = body[first : last + 1], 206
            self.send(status, body, {"ETag": '"x"', **headers})

    def send_json(self, body: Any) -> None:
        self.send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Identities:
    """The running server, from the test's side."""

    def __init__(self, port: int) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"

    def set(self, **given: Any) -> dict[str, Any]:
        """Change what the server's `state` has, and return it."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        with contextlib.closing(client):
            client.request("POST", "/control", json.dumps(given))
            found: dict[str, Any] = json.load(client.getresponse())
            return found


@contextlib.contextmanager
def identities(root: Path) -> Iterator[Identities]:
    """Run the server over a folder."""
    with tempfile.TemporaryDirectory(prefix="shardio-identities-") as scratch:
        there = Identities(free_port(hold=True))
        command = [sys.executable, "-m", "support.identity_server", root.resolve(), str(there.port)]
        with running(command, there.port, Path(scratch), environment(PYTHONPATH=str(TESTS))):
            yield there


if __name__ == "__main__":
    _Handler.root = Path(sys.argv[1])
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), _Handler).serve_forever()
