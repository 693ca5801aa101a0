"""Who may ask the viewer's server, and for how long."""

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from support import LIMIT_S

from shardio.errors import OptionError
from shardio.viewer.address import Fields
from shardio.viewer.server import Answer, Server


def site(path: str, fields: Fields) -> Answer:
    """What a page would be: it says what was asked."""
    if path == "bug":
        raise RuntimeError("of ours <b>\x1b[2J")
    return Answer(f"path={path} fields={fields}".encode(), "text/plain")


@contextlib.contextmanager
def running(**options: float) -> Iterator[Server]:
    with Server(site, **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as found:
        yield found


def ask(
    server: Server,
    path: str = "/",
    method: str = "GET",
    *,
    cookie: str | None = None,
    **headers: str,
) -> tuple[http.client.HTTPResponse, str]:
    """Send a request; cookie: None for the right one."""
    named = {"Cookie": f"{server.cookie}={server.token}" if cookie is None else cookie}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, LIMIT_S)) as connection:
        connection.request(method, path, headers=named)
        answer = connection.getresponse()
        return answer, answer.read().decode()


def test_a_page_is_answered_to_who_has_the_cookie(server: Server) -> None:
    answer, text = ask(server, "/a/b?c=1&c=&d=%ff")
    assert answer.status == 200
    assert text == "path=a/b fields={'c': ['1', ''], 'd': ['\\udcff']}"


@pytest.mark.parametrize("path", ["/", "/image/0", "/nowhere", "/?token=wrong", "/?token=%ff"])
def test_without_the_token_nothing_is_told(server: Server, path: str) -> None:
    for cookie in ("", "a=b", f"{server.cookie}=wrong", f"{server.cookie}=\xe9", "\x01=;;;="):
        answer, text = ask(server, path, cookie=cookie)
        assert answer.status == 403
        assert "path=" not in text and server.token not in text
        assert answer.headers["Set-Cookie"] is None


def test_the_token_is_exchanged_for_a_cookie_that_only_this_site_gets(server: Server) -> None:
    answer, text = ask(server, f"/record/3?a=%22%3E&token={server.token}", cookie="")
    assert answer.status == 200
    assert answer.headers["Set-Cookie"] == (
        f"shardio-{server.port}={server.token}; Path=/; HttpOnly; SameSite=Strict"
    )
    assert 'content="0; url=/record/3?a=%22%3E"' in text
    assert server.token not in text


def test_the_token_leads_to_no_other_site(server: Server) -> None:
    _, text = ask(server, f"//evil.example/?token={server.token}")
    assert "url=/evil.example/" in text and "//evil" not in text


def test_tokens_differ() -> None:
    with Server(site) as one, Server(site) as other:
        assert one.token != other.token
        assert len(one.token) >= 32


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "evil.example:80"])
def test_other_names_of_this_host_are_refused(server: Server, host: str) -> None:
    answer, text = ask(server, Host=host)
    assert answer.status == 421
    assert "path=" not in text


@pytest.mark.parametrize("host", ["127.0.0.1:9", "localhost:9000", "localhost"])
def test_any_port_is_right_because_ssh_may_use_another(server: Server, host: str) -> None:
    assert ask(server, Host=host)[0].status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_port_gets_nothing_though_it_has_the_cookie(
    server: Server, site: str
) -> None:
    """Cookies know no ports: a page of another local server sends this one's. Links work."""
    for mode, status in {"no-cors": 403, "cors": 403, "websocket": 403, "navigate": 200}.items():
        answer, text = ask(server, "/a", Sec_Fetch_Site=site, Sec_Fetch_Mode=mode)
        assert (answer.status, "path=" in text) == (status, status == 200)
    for own in ("same-origin", "none"):
        assert ask(server, "/a", Sec_Fetch_Site=own, Sec_Fetch_Mode="no-cors")[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(server: Server, method: str) -> None:
    answer, text = ask(server, method=method)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD"
    assert "path=" not in text


def test_a_request_with_a_body_is_refused(server: Server) -> None:
    assert ask(server, Content_Length="0")[0].status == 400
    assert ask(server, Transfer_Encoding="chunked")[0].status == 400


def test_head_is_get_without_the_page(server: Server) -> None:
    answer, text = ask(server, method="HEAD")
    assert (answer.status, text) == (200, "")
    assert int(answer.headers["Content-Length"]) == len(ask(server)[1])


def test_an_address_that_is_too_long_is_refused(server: Server) -> None:
    assert ask(server, "/?a=" + "x" * (20 << 10))[0].status == 414
    assert ask(server, "/?a=" + "x" * (100 << 10))[0].status == 414


def test_browsers_are_told_to_load_nothing_from_elsewhere(server: Server) -> None:
    for path in ("/", "/bug", "/static/viewer.css"):
        headers = ask(server, path)[0].headers
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET / HTTP/9.9", 505),
        ("GET / HTTP/x", 400),
        ("BREW / HTTP/1.1", 501),
        ("BREW\x1b[2J<b> / HTTP/1.1", 501),
        ("GET /" + "x" * (1 << 16) + " HTTP/1.1", 414),
        ("GET / HTTP/1.1\r\n" + "A: b\r\n" * 200, 431),
    ],
    ids=lambda value: str(value)[:16].encode("unicode_escape").decode(),
)
def test_what_python_s_own_server_refuses_is_a_page_like_all_others(
    server: Server, request_line: str, status: int
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as client:
        client.sendall(f"{request_line}\r\n\r\n".encode())
        answer = http.client.HTTPResponse(client)
        answer.begin()
        text = answer.read().decode()
    assert answer.status == status
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none';")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Connection"] == "close"
    assert "/static/viewer.css" in text and "\x1b" not in text and "<b>" not in text


def test_a_fault_of_ours_is_one_line_and_a_page(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    answer, text = ask(server, "/bug")
    assert answer.status == 500
    assert "RuntimeError: of ours &lt;b&gt;" in text
    assert capsys.readouterr().err == "shardio: view: RuntimeError: of ours <b>\\x1b[2J\n"
    assert ask(server)[0].status == 200


def test_clients_that_go_away_are_not_spoken_of(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    for request in (
        b"",
        b"GET",
        b"GET / HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as client:
                client.sendall(request)
                linger = b"\x01\0\0\0\0\0\0\0"  # closing it is a reset
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    assert ask(server)[0].status == 200
    assert capsys.readouterr().err == ""


def test_a_client_that_does_not_ask_is_sent_away() -> None:
    with (
        running(request_s=0.2) as server,
        socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as client,
    ):
        client.sendall(b"GET / HTTP/1.1\r\n")
        assert client.recv(1) == b""


def test_more_clients_than_threads_wait_for_their_turn() -> None:
    with running(request_s=0.5) as server, contextlib.ExitStack() as stack:
        for _ in range(80):  # of 64 at once
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), LIMIT_S))
        assert ask(server)[0].status == 200


def test_a_port_that_is_taken_is_named() -> None:
    with Server(site) as server, pytest.raises(OptionError, match=f"--port {server.port}: "):
        Server(site, server.port)
    with pytest.raises(OptionError, match="--port 70000: "):
        Server(site, 70000)


def test_what_goes_wrong_is_said_unless_the_connection_was_closed_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C may come just when a client's thread begins: the connection is closed under it."""
    one, other = socket.socketpair()
    with Server(site) as server, other:
        for closed in (False, True):
            if closed:
                one.close()
            try:
                raise OSError(9, "Bad file descriptor")
            except OSError:
                server.handle_error(one, ("127.0.0.1", 1))
    assert capsys.readouterr().err == "shardio: view: OSError: [Errno 9] Bad file descriptor\n"
