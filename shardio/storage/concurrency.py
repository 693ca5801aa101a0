"""How many requests to one store run at once: as many as make it faster, and no more.

How it works. Few run at first, and each answer lets one more run, while answers take no longer than
the first ones did. Where they do, requests wait for each other: more of them bring no more bytes,
but each one takes longer, and one that stalls is noticed later. So some less run then, down to a
half, and on as long as that helps. If answers take as long in spite of it for many rounds, it is
the store that has become slower: what they take now is the measure of those that follow.

A failure takes away a part of them at once. A server that asks for fewer requests gets one, and up
to half as many as before by one more an answer, however long these take.
"""

from __future__ import annotations

import math
import statistics

# Requests of a machine that run at once: at least, at first, at most. Its processes share them.
LEAST, FIRST, MOST = 4, 8, 64
FIRST_SMALL = 24  # of small ones, which fill no link
_START_BYTES = 2 << 20  # an answer of so many bytes takes as long again as its first byte, about
_ROUND = 16  # answers, at least, whose lower quartile says what they take; of the first ones LEAST
# Times what answers take alone: up to there, each lets one more run; from there on, fewer run.
_FREE, _CROWDED = 1.25, 1.5
# Of the limit, after one crowded round, and after many at least; requests more after an answer
_LESS, _HALF, _MORE = 0.85, 0.5, 0.25
_DRIFT = 1.02  # of what answers take alone, a crowded round: some came fast by chance
_PATIENCE, _SAME = 20, 0.9  # crowded rounds after which answers that take as long are a measure
_DECREASE = 0.7  # of the limit after a failure
_SETTLE_S = 1.0  # between two decreases


class Limit:
    """Say how many requests of one kind may run at once.

    consumers  processes of this machine that share its requests, this one included
    first      requests of a machine that run at first; then, as an attribute, of this process
    most       of this process at most
    """

    def __init__(self, consumers: int, first: int = FIRST) -> None:
        self._first_of_all = first
        self._least = self.first = self.most = 0
        self._value = 0.0
        self.share(consumers)
        self._starting = True  # it grows by one request an answer
        self._regain = 0.0  # up to which it does so, too, after a throttle
        self._decreased = -math.inf
        # What answers take, in seconds a byte, of which an answer has some more than it has.
        self._round: list[float] = []
        self._round_ends = max(LEAST, self.first)
        self._alone = math.inf  # where they do not wait for each other
        self._crowded: list[tuple[float, float]] = []  # rounds: the limit, and what answers took

    @property
    def allowed(self) -> int:
        """Return the number of requests."""
        return max(1, int(self._value))

    def share(self, consumers: int) -> None:
        """Take this process's part of the machine's requests. What was learned holds."""
        before = self.first
        self._least, self.first, self.most = parts(consumers, self._first_of_all)
        value = self._value * self.first / before if before else self.first
        self._value = max(1.0, min(self.most, value))

    def answer(self, took_s: float, size: int, *, full: bool) -> None:
        """Learn from an answer of `size` bytes. full: as many requests as allowed were running."""
        found = took_s / (size + _START_BYTES)
        self._round.append(found)
        if len(self._round) >= self._round_ends:
            self._end_round()
        if not full:
            return
        is_free = self._starting and found <= _FREE * self._alone
        if self._value < self._regain or is_free:
            self._grow(1)
        elif self._value < self.first or found <= _CROWDED * self._alone:
            self._grow(_MORE)

    def _grow(self, by: float) -> None:
        self._value = min(self.most, self._value + by)

    def _end_round(self) -> None:
        usual = statistics.quantiles(self._round, n=4)[0]
        self._round, self._round_ends = [], max(_ROUND, 2 * self.allowed)
        if usual <= _CROWDED * self._alone:
            self._crowded = []
            self._alone = min(self._alone, usual)
            return
        self._starting = False
        self._alone *= _DRIFT
        self._crowded.append((self._value, usual))
        begun = self._crowded[0][0]
        if len(self._crowded) > _PATIENCE:
            # The first round has answers of before, too.
            then = statistics.median(took for _, took in self._crowded[1:6])
            self._crowded = []
            if usual > _SAME * then:
                self._alone, self._value = usual, max(self._value, begun)
                return
        least = max(self.first, _HALF * begun)
        self._value = min(self._value, max(least, _LESS * self._value))

    def _begin_anew(self) -> None:
        """Compare no answers of before with those that follow."""
        self._starting = False
        self._round, self._round_ends, self._crowded = [], _ROUND, []

    def fail(self, now: float) -> None:
        """Send fewer requests at once after a failure."""
        if now - self._decreased >= _SETTLE_S and self._value > self._least:
            self._decreased = now
            self._value = max(self._least, self._value * _DECREASE)
            self._begin_anew()

    def throttle(self, *, again: bool) -> None:
        """Send one request at once. again: it was asked for before, and nothing came since."""
        if not again:
            self._regain = max(self._least, self._value / 2)
        self._value = 1
        self._begin_anew()

    def resume(self) -> None:
        """Send half as many as before: the server, asked again, did not ask for fewer."""
        self._value = min(self.most, max(self._value, self._regain))


def parts(consumers: int, first: int = FIRST) -> tuple[int, int, int]:
    """Return how many requests one of some processes sends: at least, at first, at most."""
    return max(1, LEAST // consumers), max(2, first // consumers), max(2, MOST // consumers)
