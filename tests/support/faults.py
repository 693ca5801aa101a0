"""What the fault proxy does wrong, and to which requests: arithmetic and bytes alone, no sockets.

A `Rule` says which requests it is for (by path, method, range, number or a seeded part of them)
and what happens to them. `Choice` finds the rule of one request. `alter` makes, of the right
answer, the wrong one. Without sockets, so that both the proxy's process and the tests import it.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# The kinds of faults, in the order in which a request meets them.
KINDS = {
    "refused": "resets the connection and listens no more, until told to, or for `hold_s`",
    "reset": "resets the connection (RST) before anything is forwarded",
    "timeout": "reads the request and never answers",
    "5xx": "answers 500, 502 or 503, drawn by the seed",
    "500": "answers 500 with the XML of S3's InternalError",
    "502": "answers 502 with a page of HTML, as a balancer does",
    "503": "answers 503 with the XML of S3's SlowDown; with Retry-After if `retry_after` is given",
    "429": "answers 429; with Retry-After if `retry_after` is given",
    "403": "answers 403 with the XML of S3's ExpiredToken",
    "404": "answers 404 with the XML of S3's NoSuchKey",
    "wrong_range": "forwards the request without its Range: 200 with the whole body",
    "shifted": "forwards another range: 206 with another Content-Range, and the bytes of that",
    "shifted_silently": "answers the right Content-Range with bytes that are moved by one place",
    "changed": "answers other bytes under another ETag; 412 to an If-Match of the right one",
    "garbage": "flips one bit, at a place drawn by the seed, in a body of the right length",
    "short": "sends half of the body that Content-Length promises, then closes",
    "reset_midway": "sends half of the body (forwards half of an upload), then resets",
    "stall": "sends half of the body (forwards half of an upload), then nothing more",
    "slow": "sends the body at `rate` bytes a second",
    "lost": "forwards all, so that the store does it, then resets instead of answering",
}
OF_REPLIES = {"5xx", "500", "502", "503", "429", "403", "404"}  # answered without the store
OF_REQUEST_BODIES = {"reset_midway", "stall"}  # strike an upload in its own body


@dataclass(frozen=True)
class Rule:
    """Says what goes wrong with which requests. Each rule counts the requests that fit it, from 0.

    path, range:  regular expressions, searched in the path (with its query) and in the Range header
                  ("" without one); method: the whole method, or "" for all
    numbers:      which of the requests that fit; None: all, of which `fraction` is drawn by `seed`
    times:        how often at most; None: always
    """

    kind: str
    path: str = ""
    method: str = ""
    range: str = ""
    numbers: Sequence[int] | None = None
    fraction: float = 1.0
    seed: int = 0
    times: int | None = None
    retry_after: float | None = None
    rate: float = 1000.0
    hold_s: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no fault is called {self.kind!r}; there are {', '.join(KINDS)}")

    def fits(self, method: str, path: str, range: str) -> bool:
        return (
            self.method in ("", method)
            and re.search(self.path, path) is not None
            and re.search(self.range, range) is not None
        )

    def wants(self, number: int) -> bool:
        if self.numbers is not None:
            return number in self.numbers
        return self.draw(number).random() < self.fraction

    def draw(self, number: int) -> random.Random:
        """Return the numbers by chance for one request: the same in every run."""
        return random.Random(f"{self.seed}/{self.kind}/{number}")


class Fault(NamedTuple):
    """A rule that strikes a request: the `number`-th of those that fit it."""

    rule: Rule
    number: int

    @property
    def kind(self) -> str:
        return self.rule.kind

    @property
    def status(self) -> int:
        if self.kind == "5xx":
            return self.rule.draw(self.number).choice((500, 502, 503))
        return int(self.kind)


class Choice:
    """Finds for each request the first rule that strikes it."""

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        self._rules = list(rules)
        self._seen = [0] * len(rules)
        self._given = [0] * len(rules)

    def __call__(self, method: str, path: str, range: str) -> Fault | None:
        found = None
        for i, rule in enumerate(self._rules):
            if rule.fits(method, path, range):
                number = self._seen[i]
                self._seen[i] += 1  # also if another rule strikes: numbers do not depend on it
                left = rule.times is None or self._given[i] < rule.times
                if found is None and left and rule.wants(number):
                    self._given[i] += 1
                    found = Fault(rule, number)
        return found


# -------------------------------------------------------------------------------------- of messages


class Head:
    """The first line and the fields of an HTTP/1.1 message; names without regard to case."""

    def __init__(self, first: str, fields: list[tuple[str, str]]) -> None:
        self.first, self.fields = first, fields

    @classmethod
    def parse(cls, data: bytes) -> "Head":
        first, *lines = data.decode("latin-1").rstrip("\r\n").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return cls(first, [(name.strip(), value.strip()) for name, _, value in pairs])

    def get(self, name: str) -> str:
        """Return the value of a field, or "" where it is not there."""
        return next((value for key, value in self.fields if key.lower() == name.lower()), "")

    def set(self, name: str, value: str | None) -> None:
        """Set a field, at the end; None removes it."""
        self.fields = [one for one in self.fields if one[0].lower() != name.lower()]
        if value is not None:
            self.fields.append((name, value))

    @property
    def status(self) -> int:
        return int(self.first.split(" ", 2)[1])

    def __bytes__(self) -> bytes:
        lines = [self.first, *(f"{name}: {value}" for name, value in self.fields), "", ""]
        return "\r\n".join(lines).encode("latin-1")


class Answer(NamedTuple):
    """A whole answer, and what comes after it: "keep", "close", "reset" or "hold"."""

    head: Head
    body: bytes
    after: str = "keep"


REASONS = {
    403: ("Forbidden", "ExpiredToken", "The provided token has expired."),
    404: ("Not Found", "NoSuchKey", "The specified key does not exist."),
    412: ("Precondition Failed", "PreconditionFailed", "At least one precondition did not hold."),
    429: ("Too Many Requests", "TooManyRequests", "Please reduce your request rate."),
    500: ("Internal Server Error", "InternalError", "We encountered an internal error."),
    502: ("Bad Gateway", "", ""),
    503: ("Service Unavailable", "SlowDown", "Please reduce your request rate."),
}


def reply(status: int, retry_after: float | None = None) -> Answer:
    """Make an answer of the proxy's own, with the body that S3 gives with this status."""
    reason, code, text = REASONS[status]
    if code:
        kind = "application/xml"
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{text}</Message></Error>"
    else:
        kind, body = "text/html", f"<html><h1>{status} {reason}</h1></html>"
    fields = [("Content-Type", kind), ("Content-Length", str(len(body)))]
    if retry_after is not None:
        fields.append(("Retry-After", f"{retry_after:g}"))
    return Answer(Head(f"HTTP/1.1 {status} {reason}", fields), body.encode())


def other_range(asked: str) -> str:
    """Return a range that begins one byte before the one asked for; after it, where that is 0."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", asked)
    if not found:
        return asked
    first, last = found.groups()
    if not first:
        return f"bytes=-{int(last) + 1}"
    by = -1 if int(first) else 1
    return f"bytes={int(first) + by}-" + (str(int(last) + by) if last else "")


def alter_request(fault: Fault, head: Head) -> None:
    """Change what is forwarded."""
    if fault.kind == "wrong_range":
        head.set("Range", None)
        head.set("If-Range", None)
    elif fault.kind == "shifted":
        head.set("Range", other_range(head.get("Range")))


def alter(fault: Fault, request: Head, head: Head, body: bytes) -> Answer:
    """Make the wrong answer of the right one. `head` tells the length of `body` already."""
    half = len(body) // 2
    if fault.kind == "garbage" and body:
        wrong, draw = bytearray(body), fault.rule.draw(fault.number)
        wrong[draw.randrange(len(wrong))] ^= 1 << draw.randrange(8)
        body = bytes(wrong)
    elif fault.kind == "shifted_silently":
        body = body[1:] + body[:1]
    elif fault.kind == "changed":
        if request.get("If-Match"):
            return reply(412)
        head.set("ETag", '"another-' + head.get("ETag").strip('"') + '"')
        body = bytes(len(body))
    elif fault.kind == "short":
        return Answer(head, body[:half], "close")
    elif fault.kind == "reset_midway":
        return Answer(head, body[:half], "reset")
    elif fault.kind == "stall":
        return Answer(head, body[:half], "hold")
    return Answer(head, body)
