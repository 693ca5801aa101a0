"""`view`, the command: how it starts, what it says, how it ends."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support import LIMIT_S
from support.trees import environment, shardio
from support.viewing import Viewer


def test_ctrl_c_ends_it_at_once_whoever_is_there(out: Path) -> None:
    site = Viewer(out)
    clients = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(3)]
    clients[0].sendall(b"GET / HTTP/1.1\r\n")
    try:
        assert site.stop() == (0, "")
    finally:
        for client in clients:
            client.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", site.port))


def test_a_person_is_told_the_address_and_the_way_through_ssh(out: Path) -> None:
    command = [sys.executable, "-m", "shardio", "view", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True) as program:
        assert program.stdout is not None
        try:
            first, second, third = (program.stdout.readline() for _ in range(3))
        finally:
            program.terminate()
    found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=[\w-]{32,}\n", first)
    assert found is not None, first
    assert f"ssh -L {found[1]}:127.0.0.1:{found[1]} " in second
    assert third == "Ctrl-C ends it.\n"


def test_what_cannot_be_shown_is_one_line(tmp_path: Path, out: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments in ((tmp_path,), (out, "--split", "val"), (out, "--port", port)):
            done = shardio("view", *arguments, code=None)
            assert done.returncode in (1, 2)
            assert re.fullmatch(r"shardio: .+\n", done.stderr), done.stderr
            assert not done.stdout


def test_without_stdout_nothing_is_served_unseen(tmp_path: Path, out: Path) -> None:
    report = ("--html", tmp_path / "report.html")
    for more, code, said in ((), 2, "stdout is closed"), (report, 0, ""):
        words = map(str, (sys.executable, "-m", "shardio", "view", out, *more))
        done = subprocess.run(
            ["sh", "-c", 'exec "$@" >&-', "sh", *words],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            timeout=LIMIT_S,
        )
        assert (done.returncode, bool(done.stderr)) == (code, bool(said))
        assert said in done.stderr and "Traceback" not in done.stderr
    assert report[1].stat().st_size
