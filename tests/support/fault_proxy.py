"""A proxy before a store's server, slow and wrong as told, in a process of its own.

    with servers.nginx(folder) as web, fault_proxy(web.port, latency_s=0.05) as proxy:
        proxy.rules(Rule("503", path="manifest", times=2), Rule("stall", fraction=0.01))
        ... read from proxy.url ...
        proxy.figures().faults  # {"503": 2, "stall": 3}

`support.faults` lists the faults; `support.fault_relay` is the process. It listens when the
context is entered, and is gone when it is left; also when the test is killed, since its control
channel is a socket that ends with the test. It passes the Host header on as it is. Redirects lead
past it.
"""

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from support import LIMIT_S
from support.faults import Rule

TESTS = Path(__file__).resolve().parent.parent


class Request(NamedTuple):
    """One request, as the proxy saw it."""

    method: str
    path: str  # with its query
    range: str  # the Range header, or ""
    status: int | None  # None: it was not answered
    sent: int  # bytes of the body that the client was sent
    fault: str | None


class Figures(NamedTuple):
    """What went through the proxy since it began, or since `reset`."""

    requests: int
    connections: int
    concurrent: int  # requests not answered yet; those that wait for their turn, too
    most_concurrent: int
    sent: int  # bytes of bodies to clients
    received: int  # and from clients to the store
    faults: dict[str, int]  # by kind
    paths: dict[str, dict[str, int]]  # requests, faults, sent: by path
    log: list[Request]
    cpu_s: float  # CPU seconds that the proxy used

    @property
    def needed(self) -> int:
        """Bytes of bodies, each range of an object once: second requests are left out."""
        most: Counter[tuple[str, str]] = Counter()
        for one in self.log:  # one that nobody waited for any more ended before its body did
            most |= Counter({(one.path, one.range): one.sent})
        return most.total()


class FaultProxy:
    """The test's side of a running proxy. Its methods return when the proxy has obeyed."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._lines = control, control.makefile("rb")
        self.port: int = self._answer()["port"]
        self.url = f"http://127.0.0.1:{self.port}"

    def rules(self, *rules: Rule) -> None:
        """Replace the rules: from now on requests are counted from 0 again."""
        self._do("rules", [dataclasses.asdict(rule) for rule in rules])

    def limits(
        self,
        *,
        latency_s: float = 0.0,
        bandwidth: float | None = None,
        connection_bandwidth: float | None = None,
        concurrency: int | None = None,
        busy_status: int | None = None,
        gather: int = 0,
        of: str = "",
    ) -> None:
        """Replace the limits, from each connection's next request on.

        latency_s:             from the request to the first byte of the answer, at the least
        bandwidth:             bytes a second of all bodies, both ways; None: no limit
        connection_bandwidth:  the same for each connection
        concurrency:           requests in work at once; more wait their turn, or are answered
                               `busy_status` (429 or 503) with `Retry-After: 1`
        gather:                no request in whose "METHOD PATH RANGE" `of` is found, a regular
                               expression, goes on before there are so many different ones
        """
        given = {name: value for name, value in locals().items() if name != "self"}
        self._do("limits", given)

    def figures(self) -> Figures:
        """Return what went through so far."""
        found = self._do("figures")
        found["log"] = [Request(*one) for one in found["log"]]
        return Figures(**found)

    def reset(self) -> None:
        """Begin the figures anew."""
        self._do("reset")

    def wait(self, **figures: int) -> None:
        """Wait until figures are at least so high: `wait(requests=3)`, `wait(faults=1)`."""
        self._do("wait", figures)

    def settle(self) -> None:
        """Wait until no request is in work: what clients that are gone asked for is done."""
        self._do("settle")

    def refuse(self) -> None:
        """Stop to listen, and break all connections. The port stays the proxy's."""
        self._do("refuse")

    def listen(self) -> None:
        """Listen again after `refuse`, or after the fault "refused"."""
        self._do("listen")

    def _do(self, name: str, given: Any = None) -> Any:
        line = json.dumps({"do": name} | ({} if given is None else {"with": given}))
        self._control.sendall(line.encode() + b"\n")
        return self._answer()

    def _answer(self) -> Any:
        try:
            line = self._lines.readline()
        except TimeoutError:
            self.close()  # what comes later would be taken for the next answer
            raise
        if not line:
            raise EOFError("the proxy has ended")
        return json.loads(line)

    def close(self) -> None:
        """Close the control channel, upon which the proxy ends."""
        self._lines.close()
        self._control.close()


@contextlib.contextmanager
def fault_proxy(upstream_port: int, *rules: Rule, **limits: Any) -> Iterator[FaultProxy]:
    """Start a proxy before a port of loopback, and stop it. limits: as `FaultProxy.limits` has."""
    ours, theirs = socket.socketpair()
    ours.settimeout(LIMIT_S)
    with tempfile.TemporaryFile() as log, ours, theirs:
        command = [sys.executable, "-m", "support.fault_relay"]
        process = subprocess.Popen(
            [*command, str(theirs.fileno()), "127.0.0.1", str(upstream_port)],
            cwd=TESTS,
            env={"PYTHONPATH": str(TESTS)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a Ctrl-C that a test sends is not for it
        )
        theirs.close()
        try:
            with contextlib.closing(FaultProxy(ours)) as proxy:
                proxy.rules(*rules)
                proxy.limits(**limits)
                yield proxy
            code: int | None = process.wait(LIMIT_S)
        except EOFError:
            code = process.wait(LIMIT_S)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        said = log.read().decode("utf-8", "replace")
        if code or said:
            raise AssertionError(f"the fault proxy ended with {code}, and said:\n{said}")
