"""A folder of an object store as a location. Nothing is listed, but by `walk`, for packing."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from ..errors import DamageError, OptionError, StorageError
from . import ranges
from .base import SEAL_BYTES, KnownFile, Seal, is_right
from .cache import SMALL, CacheDirectory
from .cached_file import CachedFile
from .client import Request, RequestError
from .kept_file import KeptFile
from .listing import Listed, Page, check_order
from .ranges import Range, Released
from .remote_file import Ends, RemoteFile, read, wait
from .stores import Store
from .swept_file import SweptFile
from .upload import Upload


class RemoteLocation:
    """A folder of an object store. It can be pickled."""

    remote = True

    def __init__(self, store: Store, cache: CacheDirectory | None = None) -> None:
        """cache: keeps what is read, where what is opened is a dataset's."""
        self.store, self.cache = store, cache
        self.url = store.shown
        self.ends = Ends(store)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteLocation, (self.store, self.cache)

    def will_open(self, name: str, known: KnownFile, end: int) -> None:
        """Announce that an object will be opened soon, and its last `end` bytes read."""
        if self.cache is not None:
            cached = _open_cached(self.cache, known)
            missing = cached.missing(max(0, known.size - end), min(end, known.size))
            cached.close()
            if not missing:
                return
        self.ends.announce(name, known.size, end)

    def distrust_end(self, known: KnownFile, end: int) -> None:
        """Keep the last `end` bytes of an object no longer: they are damaged."""
        if self.cache is not None:
            cached = _open_cached(self.cache, known)
            size = cached.layout.range_bytes
            for number in range(max(0, known.size - end) // size, cached.layout.ranges):
                cached.distrust(number)
            cached.close()

    def let_go(self) -> None:
        """Let go of what was announced and not read: a pass has ended."""
        self.ends.let_go()

    def share(self, consumers: int) -> None:
        """Say how many processes of this machine read from it, this one included."""
        ranges.share(consumers)

    def open(self, name: str, known: KnownFile | None = None) -> RemoteFile:
        """Open an object. Where it is known, nothing is asked yet.

        Raises FileNotFoundError, StorageError.
        """
        if self.cache is None or known is None or not known.sha256:
            return RemoteFile(self.store, name, self.ends, known)
        cached = _open_cached(self.cache, known)
        return KeptFile(self.store, name, self.ends, known, cached)

    def sweep(self, name: str) -> SweptFile:
        """Open an object that is read once, nearly from front to back. As `open`."""
        return SweptFile(self.store, name, self.ends)

    def read(self, name: str, limit: int, *, seal: Seal = None) -> bytes:
        """Read a small object. Raises as `open`, and DamageError above `limit`.

        seal: what comes with a wrong one is asked for again. A cache keeps what has a right one by
        the SHA-256 in it, so that it is downloaded once for all that share the cache.
        """
        if seal is not None and (kept := self._read_kept(name, limit, seal)):
            return kept
        data = self._read(name, limit)
        return data if seal is None or is_right(data, seal) else self._read(name, limit)

    def _read(self, name: str, limit: int) -> bytes:
        request = Request(self.store, name, 0, limit, "whole")
        reply = read(request)
        if reply.size > limit:
            raise DamageError(
                f"{request.shown}: {reply.size:,} bytes, more than {limit:,} can be right"
            )
        return bytes(reply.data)

    def _read_kept(self, name: str, limit: int, seal: re.Pattern[bytes]) -> bytes:
        """Read a small object through the cache; b"": there is none, or this cannot be done."""
        if self.cache is None:
            return b""
        try:
            end = read(Request(self.store, name, 0, SEAL_BYTES, "end"))
            stated = seal.search(end.data)
            if stated is None or end.size > limit:
                return b""
            known = KnownFile(end.size, bytes.fromhex(stated[1].decode()), SMALL, 0)
            with contextlib.closing(self.open(name, known)) as file:
                file.will_need(0, file.size)
                data = file.read(0, file.size)
        except DamageError:  # the plain road says what is wrong
            return b""
        except StorageError as error:
            if isinstance(error.__cause__, RequestError) and error.__cause__.transient:
                raise  # its time is over
            return b""
        if is_right(data, seal) and data[-len(end.data) :] == end.data:
            return data
        self.distrust_end(known, known.size)
        return b""

    def put_request(self, name: str, upload: Upload) -> Request:
        """Return the request that writes an object; `ranges.send` sends it, and may do so again."""
        return Request(self.store.patient(), name, 0, upload.size, "put", upload)

    def write(self, name: str, data: bytes) -> None:
        """Write a small object, whole or not at all. Raises StorageError, OptionError."""
        seal = hashlib.sha256(data).digest()
        upload = Upload(data, len(data), seal, self.store.show(name))
        ranges.send(self.put_request(name, upload)).result()

    def remove(self, name: str) -> None:
        """Remove an object; one that is not there does no harm. Raises StorageError."""
        ranges.send(Request(self.store, name, what="remove")).result()

    def exists(self, name: str) -> bool:
        """Return True if an object of this name is there; "", the folder itself, always is."""
        if not name:
            return True
        try:
            self.open(name).close()
        except FileNotFoundError:
            return False
        return True

    def walk(self) -> Iterator[Listed]:
        """Yield all objects below the folder, as the store orders them: s3, gs, az bytewise.

        Markers of folders (objects called `x/`) are passed over. One page is held, and the next one
        asked for. Raises OptionError for stores that cannot be listed, StorageError.
        """
        if self.store.scheme in ("http", "https"):
            raise OptionError(
                f"{self.url}: {self.store.scheme}:// cannot be listed. Give a listing of the "
                "files, with this URL as --root, or copy them to a directory first"
            )
        for page in check_order(self._pages(), self.url):
            yield from self._without_markers(page.entries)

    def _pages(self) -> Iterator[Page]:
        """Yield the pages of the listing; the next one is asked for while one is used."""
        coming, after = self._ask_page(""), ""
        while True:
            try:
                page = Page.load(wait(coming).data)
            except Released:  # `ranges.close` has ended all that was under way
                page = Page.load(read(coming.request).data)
            except FileNotFoundError:
                if self.store.scheme == "hf":  # other stores have no folders that could be missing
                    return
                raise StorageError(
                    f"{self.url}: the server answered that it is not there"
                ) from None
            finally:
                coming.release()
            after = page.after
            if after:
                coming = self._ask_page(after)
            yield page
            if not after:
                return

    def _ask_page(self, after: str) -> Range:
        return ranges.ranges().announce(Request(self.store, "", what="list", after=after))

    def _without_markers(self, entries: list[Listed]) -> list[Listed]:
        """Return a page without markers of folders, which are listed as `x`, without bytes."""
        found = []
        doubtful: dict[int, Range] = {}  # by place
        for place, (one, following) in enumerate(zip_longest(entries, entries[1:])):
            if one.size or self.store.scheme == "hf":  # which has no markers
                continue
            if following is None or not following.path.startswith(f"{one.path}/"):
                request = Request(self.store, one.path, what="head")
                doubtful[place] = ranges.ranges().announce(request)
            else:
                found.append(place)
        for place, asked in doubtful.items():
            try:
                wait(asked)
            except Released:
                if not self.exists(entries[place].path):
                    found.append(place)
            except FileNotFoundError:  # it is `x/`
                found.append(place)
            finally:
                asked.release()
        markers = set(found)
        return [one for place, one in enumerate(entries) if place not in markers]

    def below(self, name: str) -> RemoteLocation:
        """Return the folder of this name in it."""
        return RemoteLocation(self.store.below(name), self.cache)

    def above(self) -> tuple[RemoteLocation, str]:
        """Return the folder that it lies in, and its name there; "": it is the top of a store."""
        store, name = self.store.above()
        return RemoteLocation(store, self.cache), name

    def is_network(self) -> bool:
        """Return True if reads leave this machine: with a cache the page cache can be trusted."""
        return self.cache is None


def _open_cached(cache: CacheDirectory, known: KnownFile) -> CachedFile:
    """Open what a cache has of a file."""
    return cache.open(known.sha256.hex(), known.size, known.dataset_id, known.shard)
