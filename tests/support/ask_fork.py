"""The small program of warm_python: asks its server for a fork, and ends as the fork does.

The fork gets all descriptors that this program was given, under their numbers. It is started
hundreds of times, so it imports only what is built into Python: 15 ms of CPU.

    ask_fork.py SOCKET ARGUMENT...
"""

import _signal
import _socket
import marshal
import os
import sys

KILLS = _signal.SIGUSR2  # as SIGKILL would, and this program ends when the fork has ended
HANDED_ON = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, KILLS)
RIGHTS = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS)


def given() -> list[int]:
    """Return the descriptors that this program was started with."""
    names = [int(name) for name in os.listdir("/proc/self/fd")]
    found = []
    for number in sorted(names):
        try:
            os.fstat(number)
        except OSError:  # the listing's own
            continue
        found.append(number)
    return found


def ask(at: str, arguments: list[str]) -> None:
    """Have a fork run, and end as it does."""

    def hand_on(number: int, frame: object) -> None:
        try:
            if number == KILLS:
                os.kill(pid, _signal.SIGKILL)
            else:
                (os.killpg if number == _signal.SIGINT else os.kill)(pid, number)
        except ProcessLookupError:
            pass

    _signal.pthread_sigmask(_signal.SIG_BLOCK, HANDED_ON)  # until there is who gets them
    numbers = given()
    asked = (arguments, dict(os.environ), os.getcwd(), numbers)
    data = marshal.dumps(asked)
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    server.connect(at)
    rights = b"".join(number.to_bytes(4, sys.byteorder) for number in numbers)
    server.sendmsg([len(data).to_bytes(4, "little")], [(*RIGHTS, rights)])
    server.sendall(data)
    for number in numbers:
        if number > 2:  # the fork alone has them now
            os.close(number)
    pid = int.from_bytes(server.recv(4), "little")
    for number in HANDED_ON:
        _signal.signal(number, hand_on)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, HANDED_ON)
    code = os.waitstatus_to_exitcode(int.from_bytes(server.recv(4), "little"))
    if code < 0:
        try:  # noqa: SIM105
            _signal.signal(-code, _signal.SIG_DFL)
        except OSError:  # SIGKILL has no other way
            pass
        os.kill(os.getpid(), -code)
    os._exit(code)


ask(sys.argv[1], sys.argv[2:])
