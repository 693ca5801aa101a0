"""One request to an object store, and its errors by kind.

A client is fast (its calls give up the GIL) and strict: it refuses a whole object in place of a
range, and a range other than the one asked for. It has one hazard: a process that used a client
and is forked leaves a child in which every request hangs. `ranges` decides who may hold one.

The client's own retries are off. They hide throttling, and `transfers` has to see every failure.
One failure is answered here: when a store that has answered refuses the credentials, they are
looked up anew, once, before it is told. So what is renewed while an epoch runs is used.

Source: https://developmentseed.org/obstore, https://docs.rs/object_store
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import ssl
import threading
import time
import urllib.error
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from ..errors import DamageError, OptionError, ShardioError, StorageError, printable
from . import credentials, stores
from .credentials import MissingError
from .listing import HubError, Lister, hub_page
from .stores import Opened, Store
from .upload import PIECE, Upload

# Of an upload: the name under which its SHA-256 is noted; parts that are sent at once.
_NOTED = "sha256"
_PARTS_AT_ONCE = 4
ABSENT = "absent"  # the mark of an object that is not there

# Failures that may be gone with the next attempt; all others are told at once.
TRANSIENT = frozenset(("throttled", "server", "timeout", "connect", "body", "range", "helper"))


class Request(NamedTuple):
    """Ask for `length` bytes from `start` of an object, or for what `what` says.

    what  "range"; "whole": all of the object, if it has at most `length` bytes, else none of them;
          "end": its last `length` bytes, or all; "head": just what its Reply says besides bytes;
          "marked": as "whole", and as its tag what "put" takes for `after`; "noted": as its tag,
          the SHA-256 that was noted when it was put, in hex, or ""; "put": write the object, from
          `upload`: if `after` is given, only in place of the content that has this mark, or where
          there is none (ABSENT); "remove": remove it, if it is there; "list": a Page of the objects
          below a folder, behind the token `after`, of the listing with the number `start`; "probe":
          the same, behind any path, with all that the store gives
    """

    store: Store
    path: str  # of the object, relative to the store's URL
    start: int = 0
    length: int = 0
    what: str = "range"
    upload: Upload | None = None
    after: str = ""

    @property
    def shown(self) -> str:
        """Return the object's URL, as messages print it."""
        return self.store.show(self.path)


class Reply(NamedTuple):
    """Hold the bytes of an answer, and what the store said of the whole object."""

    data: memoryview
    size: int  # of the object, bytes
    tag: str  # its ETag, or of the web its Last-Modified; "": the store gave none


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
    """Read ranges of the objects of one bucket, repository, or folder of the web.

    Threads may share a client; forks may not.
    """

    def __init__(self, store: Store) -> None:
        self._obstore = stores.load()
        self._store = store
        self._lock = threading.Lock()
        self._opened: Opened | None = None
        self._worked = False  # since it was opened
        self._region: str | None = None  # that S3 named
        self._is_web = store.scheme in stores.READ_ONLY
        self._lister = Lister(self._obstore)

    def send(self, request: Request) -> Reply:
        """Send one request, and wait for its answer. Raises RequestError."""
        opened = self._open()
        try:
            reply = self._ask(opened, request)
        except RequestError as error:
            again = self._open_again(opened, error)
            if again is None:
                raise
            try:
                reply = self._ask(again, request)
            except RequestError:
                self._opened = None  # the next request looks again
                raise
        self._worked = True
        return reply

    def _open(self) -> Opened:
        with self._lock:
            if self._opened is None:
                self._opened = self._look_up()
            return self._opened

    def _look_up(self) -> Opened:
        try:
            return stores.open_store(self._store, self._region)
        except MissingError as error:
            problem = str(error)
        raise RequestError("denied", problem)

    def _open_again(self, opened: Opened, error: RequestError) -> Opened | None:
        """Look the credentials, or the region, up anew; None: that does not help."""
        if error.kind not in ("denied", "region") or self._store.kind == "http":
            return None
        with self._lock:
            if self._opened is not None and self._opened is not opened:
                return self._opened  # another thread was first
            worked, self._worked, self._opened = self._worked, False, None
            if error.kind == "region":
                found = stores.find_region(self._store, opened)
                if not found or found == self._region:
                    return None
                self._region = found
            elif not worked:
                return None  # they were looked up just now; the next request does it again
            self._opened = self._look_up()
            return self._opened

    def _ask(self, opened: Opened, request: Request) -> Reply:
        obstore, start, length = self._obstore, request.start, request.length
        path = "/".join(filter(None, (request.store.address[1], request.path)))
        target, whole, failure = opened.target, request.what in ("whole", "marked"), None
        try:
            if request.what in ("list", "probe"):
                return self._list(opened, path, request)
            if self._is_web and not _is_plain(path):
                target, path = stores.open_odd(opened, path), ""
            if self._is_web and request.what in ("put", "remove"):
                raise OptionError(f"{self._store.shown}: {self._store.scheme}:// is read only")
            if request.upload is not None:
                return self._put(target, path, request.upload, request.after)
            if request.what == "remove":
                return self._remove(target, path)
            if request.what == "noted":
                result = obstore.get(target, path, options={"head": True})
                noted = str(result.attributes.get(_NOTED, ""))
                return Reply(memoryview(b""), result.meta["size"], noted)
            if request.what == "head":
                meta = obstore.head(target, path)
                return Reply(memoryview(b""), meta["size"], self._tag(meta))
            if request.what == "end":
                return _end(obstore, self._store, target, path, length)
            options = {} if whole else {"range": (start, start + length)}
            result = obstore.get(target, path, options=options)
            meta = result.meta
            tag = self._tag(meta, request.what)
            if whole and meta["size"] > length:
                return Reply(memoryview(b""), meta["size"], tag)
            data = memoryview(result.bytes())
        except ShardioError:  # of what is to be put
            raise
        except Exception as error:
            failure = self._explained(error, opened, path)
            if request.what == "end" and failure.kind == "range":
                failure.kind = "other"  # no server has to know such ranges
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            failure = RequestError("other", f"the client failed: {self._hidden(str(error))}")
        if failure is not None:  # raised here: as its context, the client's would have secrets
            raise failure
        expected = meta["size"] if whole else length
        if len(data) != expected:
            raise RequestError(
                "short" if start + length > meta["size"] and not whole else "body",
                f"the answer has {len(data):,} bytes of {expected:,}",
            )
        return Reply(data, meta["size"], tag)

    def _tag(self, meta: Any, what: str = "") -> str:
        """Return what tells an object from others: its ETag, or of the web, when it was changed.

        Asked for what is "marked": what a store takes as a condition.
        """
        if what == "marked":
            return _mark(meta)
        changed = meta["last_modified"]
        web = self._store.kind == "http" and changed.timestamp() > 0  # else not said
        return meta["e_tag"] or (changed.isoformat() if web else "")

    def _list(self, opened: Opened, folder: str, request: Request) -> Reply:
        """Return a page of the objects below a folder. Raises what obstore, and the Hub, do."""
        if self._store.scheme == "hf":
            page = hub_page(opened, folder, request.after)
        else:
            number, probe = request.start, request.what == "probe"
            page = self._lister.page(
                opened.target, folder, request.after, number=number, probe=probe
            )
        return Reply(memoryview(page.dump()), 0, "")

    def _put(self, target: Any, path: str, upload: Upload, mark: str) -> Reply:
        """Write an object, whole or not at all. Raises what obstore does, and `Upload.pieces`."""
        pieces = upload.pieces(_read_patiently)
        parts = upload.size > PIECE and not mark  # stores have conditions for one request
        done = self._obstore.put(
            target,
            path,
            pieces if parts else b"".join(pieces),
            attributes={_NOTED: upload.sha256.hex()},
            mode=_mode(mark),
            use_multipart=parts,
            chunk_size=upload.part_bytes,
            max_concurrency=_PARTS_AT_ONCE,
        )
        return Reply(memoryview(b""), upload.size, done["e_tag"] or "")

    def _remove(self, target: Any, path: str) -> Reply:
        with contextlib.suppress(FileNotFoundError):  # as GCS and Azure say; S3 does not
            self._obstore.delete(target, path)
        return Reply(memoryview(b""), 0, "")

    def plain_address(self, path: str) -> tuple[str, dict[str, str]]:
        """Return a URL, and headers, by which any client may read an object; "": there is none.

        Both hold secrets: a signature, or what the user gave.
        """
        opened = self._open()
        path = "/".join(filter(None, (self._store.address[1], path)))
        if not self._is_web:
            if opened.identity == stores.UNSIGNED:
                return "", {}
            signed = self._obstore.sign(opened.target, "GET", path, timedelta(minutes=2))
            return str(signed), {}
        parts = urlsplit(opened.base)
        whole = f"{parts.path.rstrip('/')}/{quote(path)}"
        return urlunsplit(parts._replace(path=whole, fragment="")), opened.headers

    def _explained(self, error: Exception, opened: Opened, path: str) -> RequestError:
        """Return the error of a request, by kind, in words that hold no secret."""
        if _is_of_credentials(str(error), path) and not self._is_web:
            return self._explain_credentials(error, opened.identity)
        found = _explain(self._obstore, error, self._store.scheme)
        text = self._hidden(found.text)
        if found.kind == "denied":
            text += f"; {self._say_whose(opened.identity)}"
        unreached = found.kind in ("connect", "name", "timeout")
        if unreached and (host := _host(str(error), opened.base)):
            text += f": {host}"  # behind what is hidden: a region, an account are no secrets there
        return RequestError(found.kind, text)

    def _hidden(self, text: str) -> str:
        """Return what obstore says without what is secret."""
        return credentials.hide(text, self._store.options)

    def _explain_credentials(self, error: Exception, identity: str) -> RequestError:
        """Return the error of a request for credentials.

        It may pass where there is somebody who gives them: one is named, did before, or is busy.
        """
        text, status = str(error), _STATUS.search(str(error))
        what = identity or "this machine's identity"
        if status and _kind_of(int(status[1])) in ("throttled", "server"):
            said = f"the source of the credentials, {what}, answered {status[1]}"
            return RequestError(_kind_of(int(status[1])), said)
        if identity or self._worked:
            if not status and ("kind: Connect" in text or "kind: Timeout" in text):
                said = f"the source of the credentials, {what}, does not answer"
                return RequestError("server", said)
            why = f"answered {status[1]}" if status else self._hidden(_first_line(error))
            if "External" in text:  # what a function said is not ours to show
                why = "an error of the function that looks them up"
                if "profile" in what:
                    why += "; a login by SSO is renewed by `aws sso login --profile NAME`"
            return RequestError("denied", f"no credentials came of {what}: {why}")
        return RequestError("denied", self._none_found())

    def _say_whose(self, identity: str) -> str:
        """Say which credentials were refused."""
        if identity == stores.UNSIGNED:
            return f"it was asked without credentials, because of {identity}"
        return f"the credentials are those of {identity}" if identity else self._none_found()

    def _none_found(self) -> str:
        """Say that there are no credentials, and where they would be."""
        kind = self._store.kind
        public = f". {credentials.PUBLIC}" if kind in ("s3", "gs", "az") else ""
        return f"no credentials were found. Looked for {credentials.LOOKED_FOR[kind]}{public}"


_CLIENTS: dict[str, Client] = {}
_LOCK = threading.Lock()


def client(store: Store) -> Client:
    """Return this process's client of a store. Raises DependencyError."""
    key = store.client_key
    with _LOCK:
        if key not in _CLIENTS:
            _CLIENTS[key] = Client(store)
        return _CLIENTS[key]


def _end(obstore: Any, store: Store, target: Any, path: str, length: int) -> Reply:
    """Return the last bytes of an object. Raises what obstore does."""
    options: dict[str, Any] = {"range": {"suffix": length}}
    if store.kind == "az":  # which knows no such ranges
        size = obstore.head(target, path)["size"]
        options = {"range": (max(0, size - length), size)}
    result = obstore.get(target, path, options=options)
    return Reply(memoryview(result.bytes()), result.meta["size"], "")


def _mark(meta: Any) -> str:
    """Return what a store tells the content of an object by, for a later put in its place."""
    return json.dumps({name: meta[name] for name in ("e_tag", "version") if meta[name]})


def _mode(mark: str) -> Any:
    """Return how obstore is to put an object in place of the content with this mark."""
    return ("create" if mark == ABSENT else json.loads(mark)) if mark else None


def _read_patiently(store: Store, path: str, start: int, length: int) -> memoryview:
    """Read a range for an upload, again while that fails for a reason that passes.

    Raises StorageError.
    """
    request, began, pause, attempts = Request(store, path, start, length), time.monotonic(), 0.2, 1
    while True:
        try:
            return client(store).send(request).data
        except RequestError as error:
            took = time.monotonic() - began
            if error.kind == "missing":
                raise DamageError(
                    f"{request.shown}: it is not there, and is to be copied"
                ) from None
            if not error.transient or took + pause > store.timeout_s:
                raise explain_failure(request, error, attempts, took) from None
        time.sleep(pause)
        pause, attempts = 2 * pause, attempts + 1


def _forget() -> None:
    global _LOCK
    _LOCK = threading.Lock()
    _CLIENTS.clear()


os.register_at_fork(after_in_child=_forget)


# What obstore's errors say, in the words of object_store and of reqwest beneath it.
_STATUS = re.compile(r"non-2xx status code: (\d{3}) ?([A-Za-z ]*)")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_SYSTEM = re.compile(r'message: "([^"]{1,120})"|error: "([^"]{1,160})"')
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
_ASKED = re.compile(r"Error performing [A-Z]+ (\S+) in ")
_ADDRESS = re.compile(r'connect error",\s+(\S+:\d+),')
_WHOLE = re.compile("RangeNotSupported|non-partial response when range requested")
_RANGE = re.compile(r"Requested \S+, got \S+|UnexpectedRange|CONTENT_RANGE|Content-Range")


# Of a status 404: what is missing is not the object, but where it would be.
_NO_BUCKET = {
    "NoSuchBucket": "there is no such bucket",
    "ContainerNotFound": "there is no such container",
    "AccountNotFound": "there is no such account",
}


def _is_plain(path: str) -> bool:
    """Return True for a path that obstore takes."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    parts = path.split("/")
    return not any(ord(c) < 32 or ord(c) == 127 for c in path) and not {"", ".", ".."} & {*parts}


def _is_of_credentials(text: str, path: str) -> bool:
    """Return True if what failed was not the request, but another one that asks who one is."""
    if "token request" in text or "token response" in text or "az account" in text:
        return True
    if "External" in text and "credential provider" in text:
        return True
    asked = _ASKED.search(text)
    if asked is None or asked[1] == "REDACTED":  # of a request with a signature in its URL
        return "service account" in text or "Access Key" in text
    if "performing list request" in text:
        return False
    return not unquote(asked[1].partition("?")[0]).endswith(f"/{path}")


def _host(text: str, base: str) -> str:
    """Return the host that was asked, and its, or a proxy's, address: minio:9000 at 10.0.0.7:80.

    text: what the client said. base: a URL, where it said nothing. "": neither names one.
    """
    asked, address = _ASKED.search(text), _ADDRESS.search(text)
    host = urlsplit(asked[1] if asked else base).netloc.rpartition("@")[2]
    found = {host: None} | ({address[1]: None} if address else {})
    return printable(" at ".join(filter(None, found)))


def _explain(obstore: Any, error: Exception, scheme: str) -> RequestError:
    """Return the error of a request, by kind."""
    text = str(error)
    errors = obstore.exceptions
    if isinstance(error, (HubError, urllib.error.URLError)):
        return _explain_hub(error)
    if isinstance(error, errors.AlreadyExistsError):  # a status of 409 or 412
        return RequestError("changed", "it is there already")
    if status := _STATUS.search(text):
        return _explain_status(status, text, scheme)
    if "redirect without LOCATION" in text:
        return RequestError("region", "the bucket is in another region")
    if isinstance(error, FileNotFoundError):
        return RequestError("missing", "it is not there")
    if isinstance(error, (errors.PermissionDeniedError, errors.UnauthenticatedError)):
        return RequestError("denied", "the server refused the credentials")
    if isinstance(error, errors.PreconditionError):
        return RequestError("changed", "the object has changed")
    if isinstance(error, NotImplementedError) or "MissingVersion" in text:
        return RequestError("other", "it has no conditional writes")
    if isinstance(error, UnicodeEncodeError) or "parse path" in text:
        return RequestError(
            "path",
            f"{scheme}:// takes only names in UTF-8, without control characters and empty parts",
        )
    if _WHOLE.search(text) or isinstance(error, errors.NotSupportedError):
        return RequestError(
            "range", "the server sent the whole object, although a range was asked for"
        )
    if "Content-Length Header missing" in text:
        return RequestError(
            "other", "the server does not say its size, as of a page that it makes, and no file"
        )
    if _RANGE.search(text):
        return RequestError("range", "the server sent another range than was asked for")
    return _explain_connection(error, text)


def _explain_status(status: re.Match[str], text: str, scheme: str) -> RequestError:
    """Return the error of a request that was answered so, by kind."""
    number, code = int(status[1]), _CODE.search(text)
    said = f"the server answered {number} {status[2].strip()}".rstrip()
    said += f" ({code[1]})" if code else ""
    kind = _kind_of(number)
    if kind == "missing":
        where = _NO_BUCKET.get(code[1]) if code else None
        where = where or (scheme == "hf" and _missing_of_hub(text)) or None
        return RequestError("bucket" if where else "missing", where or "it is not there")
    if code and code[1] == "ConditionalRequestConflict":  # S3's, of puts at once: try again
        return RequestError("server", said)
    if code and code[1] in ("AuthorizationHeaderMalformed", "PermanentRedirect"):
        return RequestError("region", "the bucket is in another region")
    if scheme == "hf" and number == 401:
        said += ": for these credentials there is no such repository; it may be private"
    return RequestError(kind, said)


def _explain_hub(error: HubError | urllib.error.URLError) -> RequestError:
    """Return the error of a request to the Hub that did not go by obstore, by kind."""
    if isinstance(error, urllib.error.URLError):
        why = error.reason
        if isinstance(why, ssl.SSLError):
            return RequestError("tls", "the server's certificate was not accepted")
        if isinstance(why, socket.gaierror):
            return RequestError("name", "the host's name is not known")
        if isinstance(why, TimeoutError):
            return RequestError("timeout", "no answer came in time, or it stalled")
        said = why.strerror if isinstance(why, OSError) else str(why)
        return RequestError("connect", printable(str(said or "no connection").lower(), 300))
    if error.code in _NO_REPOSITORY and error.status in (401, 403, 404):
        return RequestError("bucket", _NO_REPOSITORY[error.code])
    if not error.status:
        return RequestError("body", error.text)
    kind = _kind_of(error.status)
    if kind == "missing":
        return RequestError(kind, "it is not there")
    said = f"the server answered {error.status} {printable(error.text, 100)}".rstrip()
    return RequestError(kind, said)


_NO_REPOSITORY = {
    "RepoNotFound": "there is no such repository, or these credentials may not see it",
    "RevisionNotFound": "the repository has no such revision",
}


def _missing_of_hub(text: str) -> str:
    """Return what the Hub said of a status 404, if it is not just the file that is missing."""
    if re.search(r"404 Not Found: .{0,40}(Invalid rev|Revision not found)", text):
        return "the repository has no such revision"
    if re.search(r"404 Not Found: .{0,40}Repo\w* not found", text):
        return "there is no such repository, or these credentials may not see it"
    return ""


def _explain_connection(error: Exception, text: str) -> RequestError:
    """Return the error of a request that had no answer, or half of one."""
    lower = text.lower()
    if "builder error" in lower and "http://" in lower:
        return RequestError("other", "requests without TLS are not allowed for this URL")
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
    if status == 416:
        return "short"
    if status in (501, 505):  # not at this time nor later
        return "other"
    return "server" if status >= 500 or status in (408, 425) else "other"


def _first_line(error: Exception) -> str:
    """Return what an error says first, without URLs, which may hold signatures."""
    return printable(_URL.sub("[URL]", str(error).partition("\n")[0]), 300)


def explain_failure(
    request: Request, error: RequestError, attempts: int = 1, took_s: float = 0.0
) -> StorageError:
    """Return the error that users see for a request that failed. Its cause is `error`."""
    start, length = request.start, request.length
    verb = {"list": "list", "probe": "list", "put": "write"}.get(request.what, "read")
    what = f" bytes {start}-{start + length - 1}" if request.what == "range" else ""
    tried = f" ({attempts} attempts in {took_s:.0f} s)" if attempts > 1 else ""
    failure = StorageError(
        f"{request.shown}: cannot {verb}{what}: {error.text}{tried}.{_advice(error, verb)}"
    )
    failure.__cause__ = error
    return failure


_CHECK = " Check the endpoint or URL, a proxy (HTTPS_PROXY, NO_PROXY)"


def _advice(error: RequestError, verb: str) -> str:
    """Return what to do about a failure, with a blank before it; "": nothing is known."""
    if "Looked for" in error.text:
        return ""
    if error.kind == "timeout" and verb == "write":
        return " Each part of 8 MiB and more has timeout_s to arrive: raise it on a slow link"
    return {
        "denied": f" Check the credentials of this process, and what they may {verb}",
        "bucket": " Check the URL",
        "region": " Name it by options={'region': ...} or AWS_REGION",
        "tls": " A CA of your own is named by client_options={'root_certificate': PEM}",
        "connect": f"{_CHECK}, and whether its server runs, with TLS for https://",
        "name": f"{_CHECK}, and the network",
        "range": " A server or proxy on the way must support HTTP ranges",
        "changed": " Datasets in use must not be written over: pack to another place",
    }.get(error.kind, "")
