"""Requests of Python's own, for what obstore does not tell: headers of errors, pages of the Hub."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

AGENT = "shardio"


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follow redirects of a host to itself: another one is not to see the headers."""

    def redirect_request(self, request: Any, *given: Any) -> Any:
        """Return the request that a redirect asks for, or None."""
        if urlsplit(given[-1])[:2] != urlsplit(request.full_url)[:2]:
            return None
        return super().redirect_request(request, *given)


def ask(
    url: str,
    timeout_s: float,
    headers: Mapping[str, str],
    *,
    method: str = "GET",
    authorities: Any = None,
) -> Any:
    """Return the answer, also one of an error, as urllib has it; the caller closes it.

    authorities: to trust besides the system's, as PEM. Raises OSError, ValueError, HTTPException.
    """
    context = ssl.create_default_context()
    if authorities:
        is_bytes = isinstance(authorities, bytes)
        context.load_verify_locations(cadata=authorities.decode() if is_bytes else authorities)
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _SameHost)
    request = urllib.request.Request(url, method=method, headers={"User-Agent": AGENT, **headers})
    try:
        return opener.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        return error
