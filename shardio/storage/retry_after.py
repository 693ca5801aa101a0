"""How long a server wants to be left alone: the Retry-After of an answer 429 or 503.

obstore (0.12) does not tell the headers of an error. So the object is asked for once more, for its
first byte alone, by a plain request of Python's own, and the header is read from that answer. Where
the object has no plain address (no key to sign one), or the answer does not come, nothing is known.

Source: RFC 9110, 10.2.3
"""

from __future__ import annotations

import base64
import email.utils
import time
import urllib.error
import urllib.request
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from .client import Client, Request

_LIMIT_S = 5.0  # for an answer
_THROTTLES, _REFUSED = (429, 503), (400, 401, 403)


class Asked(NamedTuple):
    """Say what a server answered when it was asked again."""

    throttled: bool  # it still wants fewer requests
    after_s: float | None = None  # seconds that it wants to be left alone; None: it did not say


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follow nothing: another host is not to see the headers."""

    def redirect_request(self, *_: Any) -> None:
        """Return None: the redirect is the answer."""


def ask(client: Client, request: Request) -> Asked | None:
    """Ask for the first byte of an object. None: no answer came, or there is no way to ask."""
    url, headers = client.plain_address(request.path)
    if not url:
        return None
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    headers = {"User-Agent": "shardio", **headers, "Range": "bytes=0-0"}
    if at:
        basic = base64.b64encode(unquote(user).encode()).decode()
        headers.setdefault("Authorization", f"Basic {basic}")
    plain = urllib.request.Request(urlunsplit(parts._replace(netloc=host)), headers=headers)
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        opener.open(plain, timeout=_LIMIT_S).close()
    except urllib.error.HTTPError as error:
        with error:
            if error.code in _THROTTLES:
                return Asked(True, seconds(error.headers.get("Retry-After", "")))
            # A refusal of the signature, or a failure, says nothing of how busy the store is.
            # obstore 0.12 signs names that are quoted in a URL wrongly for Azure.
            return None if error.code in _REFUSED or error.code >= 500 else Asked(False)
    except Exception:
        return None
    return Asked(False)


def seconds(said: str) -> float | None:
    """Return the seconds that a Retry-After says, by number or by date; None: nothing of sense."""
    if said.strip().isascii() and said.strip().isdigit():
        return float(said.strip()[:9])
    try:
        when = email.utils.parsedate_to_datetime(said)
    except (TypeError, ValueError):
        return None
    return max(0.0, when.timestamp() - time.time())
