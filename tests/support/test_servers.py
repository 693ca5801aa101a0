"""The tests' own servers of files answer as they are meant to, and leave nothing."""

import base64
import http.client
import shutil
import socket
import ssl
import sys
import tempfile
from pathlib import Path

import pytest

from support import LIMIT_S, programs, servers
from support.leftovers import nothing_left

BODY = bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "x").write_bytes(BODY)
    return tmp_path


def test_nginx_serves_ranges_on_one_connection_and_tells_each_request(folder: Path) -> None:
    with nothing_left(), servers.nginx(folder) as web:
        client = http.client.HTTPConnection("127.0.0.1", web.port)
        for asked, expected in (("bytes=3-9", BODY[3:10]), ("bytes=-5", BODY[-5:])):
            client.request("GET", "/a%20folder/x", headers={"Range": asked})
            own = client.sock  # the same for both, else http.client makes another
            answer = client.getresponse()
            assert (answer.status, answer.read()) == (206, expected)
            assert client.sock is own
        client.request("HEAD", "/none?a=b")
        assert client.getresponse().status == 404
        assert web.requests() == [
            ("GET", "/a%20folder/x", "bytes=3-9", 206, 7),
            ("GET", "/a%20folder/x", "bytes=-5", 206, 5),
            ("HEAD", "/none?a=b", "", 404, 0),
        ]
        client.close()


def test_nginx_with_tls_is_trusted_by_its_own_authority_alone(folder: Path) -> None:
    with nothing_left(), servers.nginx(folder, tls=True, user="me", password="word") as web:
        token = base64.b64encode(b"me:word").decode()
        client = http.client.HTTPSConnection(
            "127.0.0.1", web.port, context=ssl.create_default_context(cafile=web.ca)
        )
        for headers, status in (({}, 401), ({"Authorization": f"Basic {token}"}, 200)):
            client.request("GET", "/a%20folder/x", headers=headers)
            answer = client.getresponse()
            assert (answer.status, answer.read() == BODY) == (status, status == 200)
        client.close()
        other = http.client.HTTPSConnection(
            "127.0.0.1", web.port, context=ssl.create_default_context()
        )
        with pytest.raises(ssl.SSLCertVerificationError):
            other.request("GET", "/a%20folder/x")
        other.close()


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo no such option >&2; exit 3"]
    with (
        nothing_left(),
        pytest.raises(RuntimeError, match=r"exit code 3 .*\n.*no such option"),
        servers.running(command, servers.free_port(), tmp_path),
    ):
        pass


def test_a_server_ends_with_a_test_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("NOT TESTED HERE: no setpriv (apt-get install util-linux)")
    servers.skip_without("nginx", package="nginx-light")
    program = """if True:
        import os, sys
        from pathlib import Path
        from support import programs, servers
        with servers.nginx(Path(sys.argv[1])) as web:
            os.kill(os.getpid(), 9)
    """
    with tempfile.TemporaryDirectory() as scratch:  # where the killed one leaves its own
        monkeypatch.setenv("TMPDIR", scratch)
        done = programs.run("-c", program, tmp_path, limit_s=LIMIT_S)
    assert (done.code, done.left) == (-9, [])


def test_a_port_that_is_held_is_its_servers_alone(tmp_path: Path) -> None:
    port = servers.free_port(hold=True)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    command = [sys.executable, "-m", "http.server", "-b", "127.0.0.1", str(port)]
    with servers.running(command, port, tmp_path) as process:
        assert process.poll() is None
