"""The objects below a folder of a store, page by page.

A page is a request like others. Where it goes on, a token says: of s3, gs and az the last path of
the page before, of the Hub what that has given. Who asks for the next page gets it from the stream
that the page before came from; after a failure, from a new one that begins behind the token.

Two traps. obstore tells a folder's marker, `x/`, by the name `x`: such entries have no bytes, and
no page ends with one, or the next page could not begin behind it. And where a store does not list
in bytewise order, a new stream may leave something out: `Page.anew` says that there was one.

Source: https://huggingface.co/docs/hub/api
"""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections import OrderedDict
from datetime import datetime, timezone
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from . import plain_http
from .stores import STALL_S, Opened

PAGE = 1000  # objects: what stores give at once
_STREAMS = 64  # that are kept for their next page
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_RESOLVE = re.compile(r"(.*)/datasets/([^/]+/[^/]+)/resolve/([^/]+)")
_NEXT = re.compile(r"<([^>]*)>\s*;[^,]*rel=\"?next")


class ObjectEntry(NamedTuple):
    """Say what a listing knows of an object."""

    path: str  # relative to the folder that was listed
    size: int  # bytes
    mtime_ns: int  # when it was written, in ns; 0 where the store does not say
    tag: str  # that another content would not have, plain; "": the store gives none


class Page(NamedTuple):
    """Hold some objects in the order of the store, and the token of those that follow."""

    entries: list[ObjectEntry]
    after: str  # "": nothing follows
    anew: bool = False  # it is from a stream that began behind a token

    def dump(self) -> bytes:
        """Return it as bytes, for the way between processes."""
        return json.dumps([self.entries, self.after, self.anew]).encode()

    @classmethod
    def load(cls, data: Any) -> Page:
        """Return the page that `dump` made bytes of."""
        entries, after, anew = json.loads(bytes(data))
        return cls([ObjectEntry(*one) for one in entries], after, anew)


class HubError(Exception):
    """Report an answer of the Hub that is no page. status: 0 where none came."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(status, code, text)
        self.status, self.code, self.text = status, code, text


class SortCheck:
    """Follow the pages of a listing: do they come in bytewise order?"""

    def __init__(self, last: str = "") -> None:
        self.last = last  # path
        self.is_kept, self.anew = True, False

    def follow(self, page: Page) -> None:
        """Take note of the next page."""
        self.anew = self.anew or page.anew
        for one in page.entries:
            if one.size:  # else it may be a marker, which sorts as `x/`
                self.is_kept = self.is_kept and self.last <= one.path
                self.last = one.path


def plain_tag(tag: str) -> str:
    """Return an ETag as all answers of a store have it: some quote it, and others do not."""
    return tag.removeprefix("W/").strip('"')


class Lister:
    """List the objects of one bucket. Threads may share it."""

    def __init__(self, obstore: Any) -> None:
        self._obstore = obstore
        self._lock = threading.Lock()
        self._streams: OrderedDict[tuple[int, str], Any] = OrderedDict()  # by listing and token

    def page(
        self, target: Any, folder: str, after: str, *, number: int = 0, probe: bool = False
    ) -> Page:
        """Return the objects behind a token, "": from the first. Raises what obstore does.

        number  of the listing: another one does not go on with what this one found
        probe   say also what a store gives that is not behind the token
        """
        with self._lock:
            stream = self._streams.pop((number, after), None)
        anew = stream is None and bool(after)
        if stream is None:
            behind = f"{folder}/{after}" if folder else after
            stream = self._obstore.list(
                target, folder or None, offset=behind if after else None, chunk_size=PAGE
            )
        found: list[ObjectEntry] = []
        ended = False
        while not ended and not (found and found[-1].size):
            chunk = next(stream, None)
            ended = chunk is None or len(chunk) < PAGE
            entries = (_listed(one, folder) for one in chunk or ())
            # Azurite, and Azure by an older API, begin at the first object whatever is asked for.
            skipped = after if anew and not probe else ""
            found += [one for one in entries if one.path > skipped]
        if ended:
            return Page(found, "", anew)
        with self._lock:
            self._streams[number, found[-1].path] = stream
            while len(self._streams) > _STREAMS:
                self._streams.popitem(last=False)
        return Page(found, found[-1].path, anew)


def _listed(meta: Any, folder: str) -> ObjectEntry:
    path = meta["path"]
    written = meta["last_modified"] - _EPOCH
    mtime = (written.days * 86_400 + written.seconds) * 10**9 + written.microseconds * 1000
    relative = path[len(folder) + 1 :] if folder else path
    return ObjectEntry(relative, meta["size"], mtime, plain_tag(meta["e_tag"] or ""))


# ------------------------------------------------------------------------------------------ the Hub


def hub_page(opened: Opened, folder: str, after: str) -> Page:
    """Return a page of the Hub's tree of a repository. Raises HubError, OSError, ValueError."""
    found = _RESOLVE.fullmatch(opened.base)
    assert found is not None
    endpoint, repository, revision = found.groups()
    place = "".join(f"/{quote(part, safe='')}" for part in folder.split("/") if part)
    query = {"recursive": "true", "limit": str(PAGE)} | ({"cursor": after} if after else {})
    url = f"{endpoint}/api/datasets/{repository}/tree/{revision}{place}?{urlencode(query)}"
    answer, link = _get(url, opened)
    entries = []
    for one in json.loads(answer):
        if one["type"] != "file":
            continue
        path, kept = one["path"], one.get("lfs") or {}
        relative = path[len(folder) + 1 :] if folder else path
        entries.append(ObjectEntry(relative, int(one["size"]), 0, kept.get("oid") or one["oid"]))
    following = _NEXT.search(link)
    cursor = parse_qs(urlsplit(following[1]).query).get("cursor") if following else None
    return Page(entries, cursor[0] if cursor else "")


def _get(url: str, opened: Opened) -> tuple[bytes, str]:
    """Return the body of an answer, and its header Link."""
    options = opened.common["client_options"]
    wait_s = min(STALL_S, _seconds(options.get("read_timeout")))
    authorities = options.get("root_certificate")
    try:
        with plain_http.ask(url, wait_s, opened.headers, authorities=authorities) as answer:
            if answer.status >= 300:
                code = answer.headers.get("X-Error-Code") or ""
                raise HubError(answer.status, code, str(answer.reason))
            return answer.read(), answer.headers.get("Link") or ""
    except (http.client.HTTPException, ConnectionError):
        raise HubError(0, "", "the connection broke before the last byte") from None


def _seconds(duration: Any) -> float:
    """Return the seconds of a duration as obstore takes it, if it is one in ms."""
    found = re.fullmatch(r"(\d+)ms", str(duration))
    return int(found[1]) / 1000 if found else STALL_S
