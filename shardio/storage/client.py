"""The only door to obstore: one request to an object store, and its errors by kind.

A client is fast (its calls give up the GIL) and strict: it refuses a whole object in place of a
range, and a range other than the one asked for. It has one hazard: a process that used a client
and is forked leaves a child in which every request hangs. `requests` decides who may hold one.

The client's own retries are off. They hide throttling, and `transfers` has to see every failure.

Source: https://developmentseed.org/obstore, https://docs.rs/object_store
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit, urlunsplit

from ..errors import DependencyError, OptionError, StorageError, printable

SCHEMES = ("s3", "gs", "az", "hf", "http", "https")
READ_ONLY = ("hf", "http", "https")

TIMEOUT_S = 120.0  # of a request and all that are sent again for it
# Of one attempt, and at most a part of the time of all: seconds until a connection stands (a
# quarter at most), without a byte of an answer (a quarter), and until the last byte (a half), which
# is 8 MiB at 140 KB/s.
CONNECT_S, STALL_S, BODY_S = 5.0, 10.0, 60.0
_AGENT = "shardio"

# Failures that may be gone with the next attempt; all others are told at once.
TRANSIENT = frozenset(("throttled", "server", "timeout", "connect", "body", "range", "helper"))


@dataclass(frozen=True)
class Store:
    """Name one object store, and how it is reached. It can be pickled.

    url        of the folder that all paths are relative to; never shown with its query
    options    of the store, by obstore's names: endpoint, region, skip_signature ...
    timeout_s  seconds from a request's first attempt to the error, while attempts fail
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S

    @property
    def scheme(self) -> str:
        """Return the scheme of its URL."""
        return self.url.partition("://")[0].lower()

    @property
    def shown(self) -> str:
        """Return the URL as messages print it: without a query or a password."""
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        return printable(urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", "")), 4096)


class Request(NamedTuple):
    """Ask for `length` bytes from `start` of an object, or for what `what` says.

    what  "range"; "whole": all of the object, if it has at most `length` bytes, else none of them;
          "head": just what its Reply says besides bytes
    """

    store: Store
    path: str  # of the object, relative to the store's URL
    start: int = 0
    length: int = 0
    what: str = "range"

    @property
    def shown(self) -> str:
        """Return the object's URL, as messages print it."""
        return f"{self.store.shown}/{quote_path(self.path)}"


class Reply(NamedTuple):
    """Hold the bytes of an answer, and what the store said of the whole object."""

    data: memoryview
    size: int  # of the object, bytes
    tag: str  # its ETag; "": the store gave none


class RequestError(Exception):
    """Report one request that failed. kind: a word of TRANSIENT, or another; text: the cause."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text

    @property
    def transient(self) -> bool:
        """Return True if another attempt may succeed."""
        return self.kind in TRANSIENT


class Client:
    """Read ranges of the objects of one store. Threads may share a client; forks may not."""

    def __init__(self, store: Store) -> None:
        self._obstore = _load()
        self._store = store
        try:
            self._target = _connect(self._obstore, store)
        except (ValueError, self._obstore.exceptions.BaseError) as error:
            raise OptionError(f"{store.shown}: {_first_line(error)}") from None

    def send(self, request: Request) -> Reply:
        """Send one request, and wait for its answer. Raises RequestError."""
        obstore, path, start, length = self._obstore, *request[1:4]
        try:
            if request.what == "head":
                meta = obstore.head(self._target, path)
                return Reply(memoryview(b""), meta["size"], meta["e_tag"] or "")
            whole = request.what == "whole"
            options = {} if whole else {"range": (start, start + length)}
            result = obstore.get(self._target, path, options=options)
            meta = result.meta
            if whole and meta["size"] > length:
                return Reply(memoryview(b""), meta["size"], "")  # the caller knows the limit
            data = memoryview(result.bytes())
        except Exception as error:
            raise _explained(obstore, error) from None
        expected = meta["size"] if whole else length
        if len(data) != expected:
            raise RequestError(
                "short" if start + length > meta["size"] and not whole else "body",
                f"the answer has {len(data):,} bytes of {expected:,}",
            )
        return Reply(data, meta["size"], meta["e_tag"] or "")

    def plain_address(self, path: str) -> tuple[str, dict[str, str]]:
        """Return a URL, and headers, by which any client may read an object; "": there is none.

        Both hold secrets: a signature, or what the user gave.
        """
        store = self._store
        if store.scheme not in ("http", "https"):
            if str(store.options.get("skip_signature", "")).lower() in ("true", "1", "yes"):
                return "", {}  # or credentials would be looked for
            try:
                signed = self._obstore.sign(self._target, "GET", path, timedelta(minutes=2))
            except Exception:  # a public bucket, or credentials that sign nothing
                return "", {}
            return str(signed), {}
        parts = urlsplit(store.url)
        whole = f"{parts.path.rstrip('/')}/{quote(path)}"
        given = dict(store.options.get("client_options", {})).get("default_headers", {})
        headers = {str(name): str(value) for name, value in dict(given).items()}
        return urlunsplit(parts._replace(path=whole, fragment="")), headers


_CLIENTS: dict[tuple[str, str], Client] = {}
_LOCK = threading.Lock()


def client(store: Store) -> Client:
    """Return this process's client of a store. Raises OptionError, DependencyError."""
    key = store.url, repr((sorted(store.options.items()), store.timeout_s))
    with _LOCK:
        if key not in _CLIENTS:
            _CLIENTS[key] = Client(store)
        return _CLIENTS[key]


def _forget() -> None:
    global _LOCK
    _LOCK = threading.Lock()
    _CLIENTS.clear()


os.register_at_fork(after_in_child=_forget)


def _load() -> Any:
    try:
        import obstore
        import obstore.store
    except ImportError:
        raise DependencyError(
            "reading from URLs needs the package obstore: pip install 'shardio-torch[remote]'"
        ) from None
    return obstore


def _connect(obstore: Any, store: Store) -> Any:
    """Return obstore's object for a store."""
    options = dict(store.options)
    client_options = {
        "connect_timeout": _duration(store, CONNECT_S, 4),
        "read_timeout": _duration(store, STALL_S, 4),
        "timeout": _duration(store, BODY_S, 2),
        "user_agent": _AGENT,
        **options.pop("client_options", {}),
    }
    common: dict[str, Any] = {"client_options": client_options, "retry_config": {"max_retries": 0}}
    kinds = obstore.store
    scheme = store.scheme
    if scheme in ("http", "https"):
        client_options["allow_http"] = scheme == "http"
        _refuse_options(store, options)
        return kinds.HTTPStore.from_url(store.url, **common)
    if str(options.get("endpoint", "")).startswith("http://"):
        client_options.setdefault("allow_http", True)
    builder = {"s3": kinds.S3Store, "gs": kinds.GCSStore, "az": kinds.AzureStore}[scheme]
    return builder.from_url(store.url, **common, **options)


def _duration(store: Store, most_s: float, part: int) -> str:
    """Return a time of one attempt, as obstore takes it."""
    return f"{min(most_s, store.timeout_s / part) * 1000:.0f}ms"


def _refuse_options(store: Store, options: Mapping[str, Any]) -> None:
    if options:
        raise OptionError(
            f"{store.shown}: {store.scheme}:// has no options but client_options; found "
            f"{printable(', '.join(options))}"
        )


# What obstore's errors say, in the words of object_store and of reqwest beneath it.
_STATUS = re.compile(r"non-2xx status code: (\d{3}) ?([A-Za-z ]*)")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_SYSTEM = re.compile(r'message: "([^"]{1,120})"|error: "([^"]{1,160})"')
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
_RANGE = re.compile(r"Requested \S+, got \S+|UnexpectedRange|CONTENT_RANGE|Content-Range")


def _explained(obstore: Any, error: Exception) -> RequestError:
    """Return the error of a request, by kind, in words that hold no secret."""
    text = str(error)
    errors = obstore.exceptions
    if status := _STATUS.search(text):
        number, code = int(status[1]), _CODE.search(text)
        said = f"the server answered {number} {status[2].strip()}".rstrip()
        return RequestError(_kind_of(number), said + (f" ({code[1]})" if code else ""))
    if isinstance(error, FileNotFoundError):
        return RequestError("missing", "it is not there")
    if isinstance(error, (errors.PermissionDeniedError, errors.UnauthenticatedError)):
        return RequestError("denied", "the server refused the credentials")
    if isinstance(error, errors.PreconditionError):
        return RequestError("changed", "the object has changed")
    if "RangeNotSupported" in text or isinstance(error, errors.NotSupportedError):
        return RequestError(
            "range", "the server sent the whole object, although a range was asked for"
        )
    if _RANGE.search(text):
        return RequestError("range", "the server sent another range than was asked for")
    lower = text.lower()
    if any(word in lower for word in ("certificate", "tls", "ssl", "unknownissuer")):
        return RequestError("tls", "the server's certificate was not accepted")
    if "dns error" in lower:
        return RequestError("name", "the host's name is not known")
    if "kind: Timeout" in text or "timed out" in lower:
        return RequestError("timeout", "no answer came in time, or it stalled")
    if "kind: Connect" in text:
        system = _SYSTEM.search(text)
        why = next(filter(None, system.groups())).lower() if system else "no connection"
        return RequestError("connect", printable(why))
    if "kind: Interrupted" in text or "body error" in lower or "sending request" in lower:
        return RequestError("body", "the connection broke before the last byte")
    if "credential" in lower or "metadata" in lower or "token" in lower:
        return RequestError("denied", f"no credentials were found: {_first_line(error)}")
    return RequestError("other", _first_line(error))


def _kind_of(status: int) -> str:
    """Return the kind of an HTTP status."""
    if status in (429, 503):
        return "throttled"
    if status in (401, 403, 407):
        return "denied"
    if status in (404, 410):
        return "missing"
    if status == 412:
        return "changed"
    return "server" if status >= 500 or status in (408, 425) else "other"


def _first_line(error: Exception) -> str:
    """Return what an error says first, without URLs, which may hold signatures."""
    return printable(_URL.sub("[URL]", str(error).partition("\n")[0]), 300)


def quote_path(path: str) -> str:
    """Return a path as a URL has it, for messages."""
    return printable(quote(path, safe="/~!$&'()*+,;=:@-._"), 4096)


def explain_failure(
    request: Request, error: RequestError, attempts: int = 1, took_s: float = 0.0
) -> StorageError:
    """Return the error that users see for a request that failed. Its cause is `error`."""
    start, length = request.start, request.length
    what = f" bytes {start}-{start + length - 1}" if request.what == "range" else ""
    tried = f" ({attempts} attempts in {took_s:.0f} s)" if attempts > 1 else ""
    failure = StorageError(
        f"{request.shown}: cannot read{what}: {error.text}{tried}.{_advice(error)}"
    )
    failure.__cause__ = error
    return failure


def _advice(error: RequestError) -> str:
    """Return what to do about a failure, with a blank before it; "": nothing is known."""
    return {
        "denied": " Check the credentials of this process, and what they may read",
        "tls": " A CA of your own is named by client_options={'root_certificate': PEM}",
        "name": " Check the URL and the network",
        "range": " A server or proxy on the way must support HTTP ranges",
        "changed": " Datasets in use must not be written over: pack to another place",
    }.get(error.kind, "")
