"""A network file system of this machine's own: sshd on loopback, and sshfs.

    with mounted(folder, scratch) as there: ...

A server of its own, with host key, user key, configuration and port of its own, which serves files
by sftp to who has that key; started, and stopped by its pid. `there` is the same folder, read
through it: the kernel's FUSE, the SSH protocol, a TCP connection. Nothing outside `scratch` is
written. Both programs are Debian's: `apt-get install sshfs openssh-server`.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from .harness import NotHere

SSHD = "/usr/sbin/sshd"  # it wants to be started by its full path
_PRIVILEGES = Path("/run/sshd")  # which sshd demands of root; its package makes it at boot
_LIMIT_S = 30.0

_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {home}/host
PidFile {home}/pid
AuthorizedKeysFile {home}/user.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
Subsystem sftp internal-sftp
AllowTcpForwarding no
ForceCommand internal-sftp
"""


@contextlib.contextmanager
def mounted(folder: Path, scratch: Path) -> Iterator[Path]:
    """The folder as a network file system shows it. Raises NotHere where none can be made."""
    missing = [name for name in ("sshfs", "ssh", "ssh-keygen") if shutil.which(name) is None]
    missing += [path for path in (SSHD, "/dev/fuse") if not os.path.exists(path)]
    if missing:
        raise NotHere(
            f"no network file system can be made here: {', '.join(missing)} not there "
            "(apt-get install sshfs openssh-server; in a container, --device /dev/fuse)"
        )
    with contextlib.ExitStack() as stack:
        home = scratch / f"sshd-{os.getpid()}-{time.monotonic_ns()}"
        home.mkdir(mode=0o700)
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        port = _serve(home, stack)
        there = home / "there"
        there.mkdir()
        options = {
            "port": port,
            "IdentityFile": home / "user",
            "IdentitiesOnly": "yes",
            "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": home / "known",
            "ssh_command": "ssh -F /dev/null",
        }
        user = pwd.getpwuid(os.getuid()).pw_name
        each = ",".join(f"{name}={value}" for name, value in options.items())
        # It comes back when the mount is there, and goes on in the background until the unmount.
        try:
            _run("sshfs", f"{user}@127.0.0.1:{folder.resolve()}", str(there), "-o", f"{each},ro")
        except NotHere as error:
            log = (home / "log").read_text(errors="replace").strip().splitlines()
            raise NotHere(f"{error}; the server: {log[-1] if log else 'nothing'}") from None
        stack.callback(_unmount, there)
        yield there


def _serve(home: Path, stack: contextlib.ExitStack) -> int:
    """Start the server; its port."""
    for name in ("host", "user"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name))
    with socket.socket() as free:  # until the server has it, nobody else is given it at once
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    (home / "known").write_text(f"[127.0.0.1]:{port} {(home / 'host.pub').read_text()}")
    (home / "config").write_text(_CONFIG.format(port=port, home=home))
    if os.geteuid() == 0:  # it stays, as its service leaves it: another server may need it now
        _PRIVILEGES.mkdir(mode=0o755, exist_ok=True)
    # It comes back when it listens.
    _run(SSHD, "-f", str(home / "config"), "-E", str(home / "log"))
    stack.callback(_stop, home / "pid")
    return port


def _stop(file: Path) -> None:
    until = time.monotonic() + _LIMIT_S
    while not file.exists() and time.monotonic() < until:  # written just after it came back
        time.sleep(0.01)
    pid = int(file.read_text())
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
    finally:
        os.close(handle)
    while file.exists() and time.monotonic() < until:  # it removes the file when it ends
        time.sleep(0.01)


def _unmount(there: Path) -> None:
    """At once if nobody has a file open there; else as soon as nobody has."""
    program = shutil.which("fusermount3") or "fusermount"
    done = subprocess.run([program, "-u", str(there)], capture_output=True)
    if done.returncode:
        subprocess.run([program, "-u", "-z", str(there)], check=True, capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=_LIMIT_S,
    )
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise NotHere(f"no network file system can be made here: {command[0]}: {said}")
