"""How long a server wants to be left alone: the Retry-After of an answer 429 or 503.

obstore (0.12) does not tell the headers of an error. So the object is asked for once more, for its
first byte alone, by a plain request of Python's own, and the header is read from that answer. Where
the object has no plain address (no key to sign one), or the answer does not come, nothing is known.

Source: RFC 9110, 10.2.3
"""

from __future__ import annotations

import email.utils
import time
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

from . import credentials, plain_http
from .client import Client, Request

_LIMIT_S = 5.0  # for an answer
_THROTTLES, _REFUSED = (429, 503), (400, 401, 403)


class Asked(NamedTuple):
    """Say what a server answered when it was asked again."""

    throttled: bool  # it still wants fewer requests
    after_s: float | None = None  # seconds that it wants to be left alone; None: it did not say


def ask(client: Client, request: Request) -> Asked | None:
    """Ask for the first byte of an object. None: no answer came, or there is no way to ask."""
    url, headers = client.plain_address(request.path)
    if not url:
        return None
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    headers = {**headers, "Range": "bytes=0-0"}
    if user:
        headers.setdefault("Authorization", credentials.basic(user))
    try:
        answer = plain_http.ask(urlunsplit(parts._replace(netloc=host)), _LIMIT_S, headers)
    except Exception:
        return None
    with answer:
        if answer.status in _THROTTLES:
            return Asked(True, seconds(answer.headers.get("Retry-After", "")))
        # A refusal of the signature, or a failure, says nothing of how busy the store is.
        # obstore 0.12 signs names that are quoted in a URL wrongly for Azure.
        return None if answer.status in _REFUSED or answer.status >= 500 else Asked(False)


def seconds(said: str) -> float | None:
    """Return the seconds that a Retry-After says, by number or by date; None: nothing of sense."""
    if said.strip().isascii() and said.strip().isdigit():
        return float(said.strip()[:9])
    try:
        when = email.utils.parsedate_to_datetime(said)
    except (TypeError, ValueError):
        return None
    return max(0.0, when.timestamp() - time.time())
