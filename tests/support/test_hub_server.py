"""The tests' own Hugging Face Hub redirects to signed URLs, which end, and leaves nothing."""

import contextlib
import http.client
import urllib.parse
from pathlib import Path

from support import LIMIT_S
from support.hub_server import Request, hub
from support.leftovers import nothing_left

BODY = bytes(range(256))


def ask(url: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    parts = urllib.parse.urlsplit(url)
    client = http.client.HTTPConnection(parts.netloc, timeout=LIMIT_S)
    with contextlib.closing(client):
        client.request("GET", f"{parts.path}?{parts.query}", headers=headers)
        answer = client.getresponse()
        return answer.status, dict(answer.headers), answer.read()


def test_the_hub_redirects_who_may_read_to_a_url_that_ends(tmp_path: Path) -> None:
    folder = tmp_path / "me" / "set" / "main" / "a b"
    folder.mkdir(parents=True)
    (folder / "x").write_bytes(BODY)
    with nothing_left(), hub(tmp_path, token="secret", uses=2) as there:
        path = "/datasets/me/set/resolve/main/a%20b/x"
        status, headers, _ = ask(there.url + path)
        assert (status, headers["X-Error-Code"]) == (401, "RepoNotFound")
        status, headers, _ = ask(there.url + path, Authorization="Bearer secret")
        assert (status, headers["X-Linked-Size"]) == (302, "256")
        signed = headers["Location"]
        assert urllib.parse.urlsplit(signed).port == there.cdn_port
        status, headers, body = ask(signed, Range="bytes=-3")
        assert (status, body) == (206, BODY[-3:])
        assert headers["Content-Range"] == "bytes 253-255/256"
        assert ask(signed)[::2] == (200, BODY)
        assert ask(signed)[0] == 403
        there.set(token=None, uses=None)
        signed = ask(there.url + path)[1]["Location"]
        assert [ask(signed)[0] for _ in range(4)] == [200] * 4
        there.expire()
        assert ask(signed)[0] == 403
        for wrong, code in (
            (path + "y", "EntryNotFound"),
            (path.replace("main", "v2"), "RevisionNotFound"),
            (path.replace("set/", "other/"), "RepoNotFound"),
        ):
            status, headers, _ = ask(there.url + wrong)
            assert (status, headers["X-Error-Code"]) == (404, code)
        cdn = [one for one in there.requests() if one.server == "cdn"]
        assert cdn[0] == Request("cdn", "GET", "/me/set/main/a%20b/x", "bytes=-3", 206)
        assert [one.status for one in cdn] == [206, 200, 403, 200, 200, 200, 200, 403]
