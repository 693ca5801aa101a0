"""All objects below a folder of a store, by many requests at once.

A store gives a thousand objects a request, in bytewise order of their names, from behind any name
that it is given. So a listing that goes on is split at a guess, in the middle of the names that may
still come: one request goes on as before, up to there, and another one begins there. Each part may
be split again. A guess behind which nothing lies costs a request, and the next guess is a better
one.

Nothing is lost at a border, in whatever order a store lists: what the upper part finds first must
be what the lower part ends at, or another request has to find it there, since objects come and go.
Else, and where a store does not begin behind the name that it was given, the listing begins anew,
one page after the other. So do all listings, and small buckets need no more requests than pages.

The Hub says with each page where the next one begins, and nothing else: its pages come one after
the other.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest

from ..errors import StorageError
from . import ranges
from .client import Reply, Request
from .listing import PAGE, ObjectEntry, Page, SortCheck
from .ranges import Range, ReleasedError
from .remote_file import read, wait
from .stores import Store

MOST_REQUESTS = 16  # at once: at 0.1 s each, they bring what a process reads (6 ms of CPU a page)
FIRST = 4  # pages that come one after the other
_SAMPLED = 50  # objects, of which one says what characters names have


_NUMBERS = itertools.count()  # of the listings of this process


class _UnorderedError(Exception):
    """Say that the parts of a listing do not meet."""


class _Border:
    """A name where one part of a listing ends, and the next one begins."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._found: str | None = None

    def meet(self, path: str) -> bool:
        """Take note of what one of both parts found first behind it. Did both find the same?"""
        self._found = path if self._found is None else self._found
        return self._found == path


class _KeyRange:
    """The objects between two borders, page by page. None: there is no border."""

    def __init__(self, lower: _Border | None = None, upper: _Border | None = None) -> None:
        self.lower, self.upper = lower, upper
        self.order = SortCheck(lower.key if lower else "")
        self.begun = self.ended = False
        self.doubtful: str | None = None  # what it ended at, where the next part began elsewhere

    def take(self, page: Page) -> list[ObjectEntry]:
        """Return what lies in it of its next page. Raises _UnorderedError."""
        if self.doubtful is not None:
            if _first(page.entries) != self.doubtful:
                raise _UnorderedError
            self.ended = True
            return []
        self.order.follow(page)
        if self.lower and not self.begun and not self.lower.meet(_first(page.entries)):
            raise _UnorderedError
        self.begun, self.ended = True, not page.after
        if not self.order.is_kept and (self.lower or self.upper):
            raise _UnorderedError
        if self.upper and (self.ended or self.order.last > self.upper.key):
            end = _first(page.entries, self.upper.key)
            self.ended = self.upper.meet(end)
            self.doubtful = None if self.ended else end
        if self.upper is None:
            return page.entries
        return [one for one in page.entries if one.path <= self.upper.key]


def _first(entries: Iterable[ObjectEntry], behind: str = "") -> str:
    """Return the first path behind another one that is no marker; "": there is none."""
    return next((one.path for one in entries if one.size and one.path > behind), "")


def walk(store: Store, forget: Callable[[], object]) -> Iterator[ObjectEntry]:
    """Yield all objects below a folder, in no order, without markers of folders: objects `x/`.

    forget: called where all that was yielded does not count, and comes again. Raises StorageError.
    """
    try:
        yield from _Walk(store, 1 if store.scheme == "hf" else MOST_REQUESTS).objects()
    except _UnorderedError:
        forget()
        yield from _Walk(store, 1).objects()


class _Walk:
    """One listing of a folder: its parts, each with a page that is asked for."""

    def __init__(self, store: Store, most_requests: int) -> None:
        self._store, self._most_requests = store, most_requests
        self._number = next(_NUMBERS)
        self._pending: deque[tuple[_KeyRange, Range]] = deque()
        self._pages = 0
        self._wasted = 0  # guesses that brought little, or were not answered yet
        self._letters: set[str] = set()  # that names have

    def objects(self) -> Iterator[ObjectEntry]:
        """Yield all objects, a page as soon as the next one is asked for."""
        self._ask(_KeyRange(), "list", "")
        try:
            while self._pending:
                part, coming = self._pending.popleft()
                page = self._answer(coming)
                is_guess = part.lower is not None and not part.begun
                entries = part.take(page)
                self._pages += 1
                self._wasted -= is_guess and len(entries) > PAGE // 2
                self._check(part)
                if part.doubtful is not None and not part.ended:  # it came, or went, meanwhile
                    self._ask(part, "probe", part.upper.key if part.upper else "")
                elif not part.ended:
                    self._ask(part, "list", page.after)
                    self._split(part, page)
                yield from self._without_markers(entries)
        finally:
            for _, coming in self._pending:
                coming.release()

    def _ask(self, part: _KeyRange, what: str, after: str) -> None:
        request = Request(self._store, "", self._number, what=what, after=after)
        self._pending.append((part, ranges.ranges().announce(request)))

    def _answer(self, coming: Range) -> Page:
        """Wait for a page. Raises StorageError."""
        try:
            return Page.load(_wait(coming).data)
        except FileNotFoundError:
            if self._store.scheme == "hf":  # other stores have no folders that could be missing
                return Page([], "")
        raise StorageError(f"{self._store.shown}: the server answered that it is not there")

    def _check(self, part: _KeyRange) -> None:
        """Raise StorageError where objects may have been left out; split nothing out of order."""
        if part.order.is_kept:
            return
        self._most_requests = 1
        if part.order.anew:
            raise StorageError(
                f"{self._store.shown}: a request of the listing failed, and this store does not "
                "list in order, so that it cannot go on where it was. Run it again"
            )

    def _split(self, part: _KeyRange, page: Page) -> None:
        """Have the upper half of what is left of a part listed by a request beside it."""
        self._letters.update(*(one.path for one in page.entries[::_SAMPLED]))
        if self._pages < FIRST or self._wasted > self._pages // 2:
            return
        if len(self._pending) >= self._most_requests:
            return
        letters = sorted(filter(str.isalnum, self._letters))
        key = between(part.order.last, part.upper.key if part.upper else None, letters)
        if key is not None:
            border = _Border(key)
            self._ask(_KeyRange(border, part.upper), "probe", key)
            part.upper = border
            self._wasted += 1

    def _without_markers(self, entries: list[ObjectEntry]) -> list[ObjectEntry]:
        """Return a page without markers of folders, which are listed as `x`, without bytes."""
        found = []
        doubtful: dict[int, Range] = {}  # by place
        for place, (one, following) in enumerate(zip_longest(entries, entries[1:])):
            if one.size or self._store.scheme == "hf":  # which has no markers
                continue
            if following is None or not following.path.startswith(f"{one.path}/"):
                request = Request(self._store, one.path, what="head")
                doubtful[place] = ranges.ranges().announce(request)
            else:
                found.append(place)
        for place, asked in doubtful.items():
            try:
                _wait(asked)
            except FileNotFoundError:  # it is `x/`
                found.append(place)
        markers = set(found)
        return [one for place, one in enumerate(entries) if place not in markers]


def _wait(asked: Range) -> Reply:
    """Wait for an answer, also where others let go of it. Raises FileNotFoundError and others."""
    try:
        return wait(asked)
    except ReleasedError:  # `ranges.close` has ended all that was under way
        return read(asked.request)
    finally:
        asked.release()


def between(low: str, high: str | None, letters: list[str]) -> str | None:
    """Return a name about in the middle of two, which ends with one of the letters.

    high: None: there is no end. Returns None where it finds no such name.
    """
    at = 0
    while at <= len(low):
        here, limit = low[at : at + 1], high[at : at + 1] if high else None
        if here and here == limit:
            at += 1
            continue
        first = bisect_right(letters, here)
        stop = len(letters) if limit is None else bisect_left(letters, limit)
        if first < stop:
            return low[:at] + letters[(first + stop) // 2]
        if not here:
            return None
        at, high = at + 1, None  # all that goes on as `low` does lies below `high`
    return None
