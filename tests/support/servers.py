"""Servers of files over HTTP for the tests: started on loopback, stopped by their process id.

    with servers.nginx(folder) as web:
        ... read from web.url ...
        web.requests()  # what was asked, in order

Each runs in the foreground as a child of the test, in a scratch folder and on a port of its own.
What it says goes into a file, and into the message where it does not start. Stores of objects are
in `support.object_stores`, the Hugging Face Hub in `support.hub_server`, faults in
`support.fault_proxy`.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from support import LIMIT_S

_HELD: "dict[int, socket.socket]" = {}  # sockets by which ports are held, each until it is used


def free_port(*, hold: bool = False) -> int:
    """Find a port that nobody has. The kernel does not give it to anybody else at once.

    hold: nor later, until a server listens there (`running`): it takes a while to start
    """
    free = socket.socket()
    free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, which bind it, too
    free.bind(("127.0.0.1", 0))
    port = int(free.getsockname()[1])
    if hold:
        _HELD[port] = free
    else:
        free.close()
    return port


# A test that is killed cannot stop its servers: the kernel does it, where this program is (Linux).
_END_WITH_PARENT = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []


@contextlib.contextmanager
def running(
    command: Sequence[str | Path],
    port: int,
    home: Path,
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in the foreground, from when it listens on its port until it has ended.

    home: its working directory; `log` in it holds what it says. It ends with the thread that
    starts it, at the latest.
    """
    with started(command, home, env) as process:
        try:
            _wait_until_it_listens(process, port, home / "log")
        finally:
            while _HELD:  # those of a second server of this program, too
                _HELD.popitem()[1].close()
        yield process


@contextlib.contextmanager
def started(
    command: Sequence[str | Path], home: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server as `running` does, but wait for nothing before it is used."""
    with (home / "log").open("wb") as said:
        process = subprocess.Popen(
            [*_END_WITH_PARENT, *(os.fspath(part) for part in command)],
            cwd=home,
            env=None if env is None else {**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,  # a Ctrl-C that a test sends is not for it
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            # What it started itself, too: they are in its group.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), LIMIT_S).close()
            return
        time.sleep(0.01)  # nothing tells when a port begins to listen
    code = process.poll()
    ended = "does not listen" if code is None else f"ended with exit code {code}"
    said = log.read_text("utf-8", "replace")
    raise RuntimeError(f"{process.args!r} {ended} on port {port}; it said:\n{said}")


def skip_without(*programs: str, package: str) -> None:
    """Skip the test, loudly, where a program is not installed."""
    missing = [name for name in programs if find_program(name) is None]
    if missing:
        pytest.skip(f"NOT TESTED HERE: {', '.join(missing)} not there: apt-get install {package}")


def find_program(name: str) -> str | None:
    """Return the path of a program; also of one for root, which users' PATH does not have."""
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    return shutil.which(name, path=path)


# -------------------------------------------------------------------------------------------- nginx


class Request(NamedTuple):
    """One line of the access log."""

    method: str
    path: str  # with its query
    range: str  # the Range header, or ""
    status: int
    bytes: int  # of the body, as far as it was sent


class Web:
    """A running nginx."""

    def __init__(self, port: int, home: Path, ca: Path | None, pid: int) -> None:
        self.port, self.pid = port, pid
        self.ca = ca  # the certificate that clients are to trust, as a file; None: no TLS
        self.url = f"{'https' if ca else 'http'}://127.0.0.1:{port}"
        self._home = home

    def requests(self) -> list[Request]:
        """Return all requests until now, in the order in which they ended.

        A client may have all of its answer before nginx writes the line. But nginx is one process,
        which writes it before it turns to anything else; so it is first asked for something else.
        """
        with socket.socket(socket.AF_UNIX) as other:
            other.settimeout(LIMIT_S)
            other.connect(str(self._home / "other"))
            other.sendall(b"GET / HTTP/1.0\r\n\r\n")
            while other.recv(1 << 16):
                pass
        lines = (self._home / "access").read_text().splitlines()
        return [Request(*json.loads(line)) for line in lines]


# One process, in the foreground, which is the same for root as for others; all that it writes is in
# its home. `other` is there for `Web.requests`.
_NGINX = """\
daemon off;
master_process off;
pid {home}/pid;
error_log stderr warn;
events {{ worker_connections 4096; }}
http {{
    log_format json escape=json
        '["$request_method","$request_uri","$http_range",$status,$body_bytes_sent]';
    client_body_temp_path {home}/body;
    proxy_temp_path {home}/proxy;
    fastcgi_temp_path {home}/fastcgi;
    uwsgi_temp_path {home}/uwsgi;
    scgi_temp_path {home}/scgi;
    default_type application/octet-stream;
    sendfile on;
    tcp_nopush on;
    keepalive_timeout 600;
    keepalive_requests 1000000;
    server {{
        listen 127.0.0.1:{port}{ssl};
        access_log {home}/access json;
        root "{root}";
        {lines}
    }}
    server {{
        listen unix:{home}/other;
        access_log off;
        return 204;
    }}
}}
"""


@contextlib.contextmanager
def nginx(
    root: Path,
    *,
    tls: bool = False,
    user: str | None = None,
    password: str = "",
    lines: Sequence[str] = (),
) -> Iterator[Web]:
    """Serve a folder over HTTP, with ranges and without lists of names. Skips where nginx is not.

    tls:  over HTTPS, by a certificate for 127.0.0.1 and localhost of an authority made for it
    user: asked for with its password, by the basic scheme
    lines: more of its configuration, such as "etag off;"
    """
    skip_without("nginx", *(["openssl"] if tls else []), package="nginx-light openssl")
    with tempfile.TemporaryDirectory(prefix="shardio-nginx-") as scratch:
        home, port, lines = Path(scratch), free_port(hold=True), [*lines]
        ca = None
        if tls:
            ca, certificate, key = make_certificates(home)
            lines += [f"ssl_certificate {certificate};", f"ssl_certificate_key {key};"]
        if user is not None:
            (home / "users").write_text(f"{user}:{{PLAIN}}{password}\n")
            lines += ['auth_basic "test";', f"auth_basic_user_file {home}/users;"]
        names = {"home": home, "port": port, "root": root.resolve(), "lines": " ".join(lines)}
        text = _NGINX.format(**names, ssl=" ssl" if tls else "")
        (home / "config").write_text(text)
        program = find_program("nginx") or "nginx"
        command = [program, "-p", home, "-c", home / "config", "-e", "stderr"]
        with running(command, port, home) as process:
            yield Web(port, home, ca, process.pid)


def make_certificates(home: Path) -> tuple[Path, Path, Path]:
    """Make an authority, and a server's certificate and key: (authority, certificate, key)."""
    ca, certificate, key = home / "ca.pem", home / "server.pem", home / "server.key"
    new = ["req", "-x509", "-days", "2", "-nodes", "-newkey", "ec"]
    new += ["-pkeyopt", "ec_paramgen_curve:prime256v1"]
    signs = ["-addext", "keyUsage=critical,keyCertSign"]  # Python 3.13 is strict about it
    _openssl(*new, *signs, "-subj", "/CN=shardio tests", "-keyout", home / "ca.key", "-out", ca)
    # Not the authority itself: clients that are strict take none for a server's.
    own = ["-CA", ca, "-CAkey", home / "ca.key", "-subj", "/CN=localhost"]
    own += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    own += ["-addext", "basicConstraints=critical,CA:FALSE"]
    _openssl(*new, *own, "-keyout", key, "-out", certificate)
    return ca, certificate, key


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(
        ["openssl", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"openssl {arguments[0]}: {done.stderr}")
