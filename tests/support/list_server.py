"""A server on loopback that answers what lists a bucket of S3, in a thread of this process.

    with list_server(["a/1.jpg", "a/2.jpg"]) as server:
        ... Storage(options=server.options) ... s3://bucket ...

It answers ListObjectsV2 and HEAD from a list of names, nothing else, and asks nobody who he is.
moto is a store, and slow: it sorts all its names for each page. So this one stands for stores with
many objects, for those that list in an order of their own, and for objects that come and go.
"""

import contextlib
import http.server
import threading
import time
import urllib.parse
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

from support import LIMIT_S

_LISTED = (
    "<Contents><Key>{}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    '<ETag>"d41d8cd98f00b204e9800998ecf8427e"</ETag><Size>{}</Size></Contents>'
)


class ListServer:
    """The names of a bucket. Those that end with a slash, or are `empty`, have no bytes.

    order      what names are sorted by
    honours    the store begins behind `start-after`
    page       names of an answer, at most; a request is for the whole bucket
    latency_s  before each answer
    together   from the 100th request on none is answered before so many are there at once
    changes    called with the number of each request, before it is answered
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.order: Callable[[str], Any] = str
        self.honours, self.page, self.latency_s, self.together = True, 1000, 0.0, 0
        self.empty: set[str] = set()
        self.changes: Callable[[int], None] = lambda number: None
        self.lists = self.under_way = self.most = 0
        self.changed = threading.Condition()
        self.port = 0
        self.put(names)

    def put(self, names: Sequence[str]) -> None:
        """Have these names in place of all others."""
        self.names = sorted(names, key=self.order)

    @property
    def options(self) -> dict[str, str]:
        """Options of a `Storage`."""
        address = {"endpoint": f"http://127.0.0.1:{self.port}", "region": "us-east-1"}
        return {**address, "access_key_id": "none", "secret_access_key": "none"}

    def answer(self, query: dict[str, str]) -> bytes:
        """Return the answer to one request."""
        with self.changed:
            self.lists += 1
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            self.changed.notify_all()
            if self.lists > 100:
                self.changed.wait_for(lambda: self.most >= self.together, LIMIT_S)
            number = self.lists
        try:
            with self.changed:
                self.changes(number)
                names = self.names
            time.sleep(self.latency_s)
            return self._page(names, query)
        finally:
            with self.changed:
                self.under_way -= 1

    def _page(self, names: list[str], query: dict[str, str]) -> bytes:
        after = query.get("continuation-token") or (query.get("start-after", "") * self.honours)
        at = bisect_right(names, self.order(after), key=self.order) if after else 0
        found = names[at : at + self.page]
        goes_on = at + self.page < len(names)
        token = escape(found[-1]) if goes_on else ""
        sizes = (int(name[-1] != "/" and name not in self.empty) for name in found)
        return (
            "<ListBucketResult><Name>bucket</Name>"
            f"<IsTruncated>{str(goes_on).lower()}</IsTruncated>"
            f"<NextContinuationToken>{token}</NextContinuationToken>"
            f"<KeyCount>{len(found)}</KeyCount>"
            f"{''.join(map(_LISTED.format, map(escape, found), sizes))}</ListBucketResult>"
        ).encode()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    bucket: ListServer

    def do_GET(self) -> None:
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        self._answer(200, self.bucket.answer(query))

    def do_HEAD(self) -> None:
        name = urllib.parse.unquote(self.path.split("/", 2)[2])
        self._answer(200 if name in self.bucket.names else 404, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("ETag", '"d41d8cd98f00b204e9800998ecf8427e"')
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that have gone."""


@contextlib.contextmanager
def list_server(names: Sequence[str] = ()) -> Iterator[ListServer]:
    """Run a server of these names."""
    bucket = ListServer(names)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"bucket": bucket}))
    bucket.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield bucket
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
