"""The process of the fault proxy: relays HTTP/1.1 to a store, slowly and wrongly where told so.

    python -m support.fault_relay DESCRIPTOR UPSTREAM_HOST UPSTREAM_PORT

The descriptor is one end of a socket pair; commands come over it as lines of JSON, and each is
answered by one line. `support.fault_proxy` has the other end. When that is closed, also by a kill,
the process ends.

An answer without a fault is passed on as it comes, through a buffer that is read into and sent from
(sock_recv_into, sock_sendall): 1.1-1.7 GB/s on one core, nginx alone 2.5. os.splice in threads did
1.6-2.7 GB/s; not taken, since the benchmarks need 0.3 (which costs 0.17 of a core), and one loop
needs no locks. An answer with a fault is read whole, altered (`support.faults`), and then sent.
"""

import asyncio
import contextlib
import json
import math
import re
import resource
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from support.faults import (
    OF_REPLIES,
    OF_REQUEST_BODIES,
    Answer,
    Choice,
    Fault,
    Head,
    Rule,
    alter,
    alter_request,
    reply,
)

BUFFER = 1 << 20
LEAST_PIECE = 1 << 14
PIECE_S = 0.004  # a piece is what passes in this time: the loop's timers tick by 1 ms
BURST_S = 0.010  # what a bucket saves up: what a timer came late, and no more
LONGEST_HEAD = 1 << 16

Take = Callable[[bytes | memoryview], Awaitable[None]]


class Gone(Exception):
    """The other end closed its connection, or broke it."""


class Bucket:
    """A token bucket that runs into debt, then waits until it is paid: no late timer is lost."""

    def __init__(self, rate: float) -> None:
        self.rate = rate  # bytes a second
        self._paid_at = 0.0

    async def pay(self, size: int) -> None:
        now = time.monotonic()
        self._paid_at = max(self._paid_at, now - BURST_S) + size / self.rate
        if self._paid_at > now:
            await asyncio.sleep(self._paid_at - now)

    def piece(self) -> int:
        return max(LEAST_PIECE, int(self.rate * PIECE_S))


class Peer:
    """One connection: its socket, and what was read from it ahead. Owned by one task."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self._bytes = bytearray(BUFFER)
        self._buffer = memoryview(self._bytes)
        self._begin = self._end = 0

    async def _more(self, most: int) -> int:
        try:
            got = await self._loop.sock_recv_into(self.sock, self._buffer[self._end :][:most])
        except OSError as error:
            raise Gone from error
        self._end += got
        return got

    async def until(self, mark: bytes) -> bytes:
        """Read up to a mark, and with it. Raises Gone where the end comes first."""
        while (at := self._bytes.find(mark, self._begin, self._end)) < 0:
            if self._begin:
                kept = bytes(self._buffer[self._begin : self._end])
                self._buffer[: len(kept)] = kept
                self._begin, self._end = 0, len(kept)
            if self._end > LONGEST_HEAD or not await self._more(LONGEST_HEAD):
                raise Gone
        found = bytes(self._buffer[self._begin : at + len(mark)])
        self._begin += len(found)
        return found

    async def some(self, most: int) -> memoryview:
        """Read up to `most` bytes; empty at the end. They hold until the next read."""
        if self._begin == self._end:
            self._begin = self._end = 0
            await self._more(most)
        found = self._buffer[self._begin : min(self._end, self._begin + most)]
        self._begin += len(found)
        return found

    async def send(self, data: bytes | memoryview) -> None:
        try:
            await self._loop.sock_sendall(self.sock, data)
        except OSError as error:
            raise Gone from error

    def is_idle(self) -> bool:
        """Return whether the connection is open, and nothing was sent that nobody asked for."""
        if self._begin != self._end:
            return False
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def hold(self) -> None:
        """Wait until the other end closes."""
        with contextlib.suppress(Gone):
            while len(await self.some(BUFFER)):
                pass

    def close(self, reset: bool = False) -> None:
        if reset:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


class Body:
    """The bytes after a head: so many, in chunks, or up to the end of the connection."""

    def __init__(self, peer: Peer, head: Head, of_request: str = "") -> None:
        """Take the framing from the head. of_request: the method that the head answers."""
        self._peer = peer
        self.chunked = "chunked" in head.get("Transfer-Encoding").lower()
        length = head.get("Content-Length")
        self.to_end = bool(of_request) and not length and not self.chunked
        if of_request == "HEAD" or (of_request and head.status in (204, 304)):
            self.length, self.chunked, self.to_end = 0.0, False, False
        else:
            self.length = math.inf if self.to_end else float(length or 0)

    async def relay(self, take: Take, piece: int) -> None:
        """Give the bytes to `take` as they are framed, in pieces of at most so many."""
        if not self.chunked:
            await self._relay(self.length, take, piece)
            return
        while True:
            line = await self._peer.until(b"\r\n")
            await take(line)
            size = int(line.split(b";")[0], 16)
            if not size:
                break
            await self._relay(size + 2, take, piece)
        while line != b"\r\n":
            line = await self._peer.until(b"\r\n")
            await take(line)

    async def _relay(self, left: float, take: Take, piece: int) -> None:
        while left:
            data = await self._peer.some(int(min(left, piece)))
            if not len(data):
                if left == math.inf:
                    return
                raise Gone
            await take(data)
            left -= len(data)
            await asyncio.sleep(0)  # where both ends are always ready, the others' turn

    async def whole(self) -> bytes:
        """Read all of it, without its framing."""
        found = bytearray()

        async def take(data: bytes | memoryview) -> None:
            found.extend(data)

        await self.relay(take, BUFFER)
        if not self.chunked:
            return bytes(found)
        plain, at = bytearray(), 0
        while True:
            end = found.index(b"\r\n", at)
            size = int(bytes(found[at:end]).split(b";")[0], 16)
            if not size:
                return bytes(plain)
            plain += found[end + 2 : end + 2 + size]
            at = end + 2 + size + 2


class Figures:
    """What went through the proxy."""

    def __init__(self) -> None:
        self.requests = self.connections = self.concurrent = self.most_concurrent = 0
        self.sent = self.received = 0  # bytes of bodies, to clients and from clients
        self.faults: Counter[str] = Counter()
        self.paths: dict[str, Counter[str]] = {}
        self.log: list[list[Any]] = []
        self._cpu = self._cpu_now()

    @staticmethod
    def _cpu_now() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    def of(self, path: str) -> Counter[str]:
        return self.paths.setdefault(path, Counter())

    def told(self) -> dict[str, Any]:
        names = ("requests", "connections", "concurrent", "most_concurrent", "sent", "received")
        names += ("faults", "paths", "log")
        cpu_s = self._cpu_now() - self._cpu
        return {name: getattr(self, name) for name in names} | {"cpu_s": cpu_s}


class Limits:
    """How fast the proxy is: see `support.fault_proxy`."""

    def __init__(
        self,
        latency_s: float = 0.0,
        bandwidth: float | None = None,
        connection_bandwidth: float | None = None,
        concurrency: int | None = None,
        busy_status: int | None = None,
        gather: int = 0,
        of: str = "",
    ) -> None:
        self.latency_s, self.connection_bandwidth = latency_s, connection_bandwidth
        self.busy_status, self.concurrency = busy_status, concurrency
        self.total = Bucket(bandwidth) if bandwidth else None
        self.slots = asyncio.Semaphore(concurrency) if concurrency else None
        self._gather, self._of = gather, of
        self._gathered: set[tuple[str, ...]] = set()
        self._gate = asyncio.Event()

    async def pass_gate(self, *request: str) -> None:
        """Hold a request (method, path, range) until enough different ones are held."""
        if self._gather and re.search(self._of, " ".join(request)):
            self._gathered.add(request)
            if len(self._gathered) >= self._gather:
                self.open_gate()
            await self._gate.wait()

    def open_gate(self) -> None:
        """Hold nothing, from now on."""
        self._gate.set()

    def buckets(self) -> list[Bucket]:
        """Return the buckets of a new connection."""
        own = [Bucket(self.connection_bandwidth)] if self.connection_bandwidth else []
        return own + ([self.total] if self.total else [])


class Connection:
    """One client's connection, with one of its own to the store."""

    def __init__(self, proxy: "Proxy", client: Peer) -> None:
        self._proxy, self._client = proxy, client
        self._upstream: Peer | None = None
        self._limits, self._buckets = proxy.limits, proxy.limits.buckets()

    async def serve(self) -> None:
        reset = True  # a client sees that its answer is not whole, however it is framed
        try:
            after = "keep"
            while after == "keep":
                after = await self._one(Head.parse(await self._client.until(b"\r\n\r\n")))
            reset = after == "reset"
        except Gone:
            pass
        finally:
            self._client.close(reset)
            self._drop(reset)

    def is_idle(self) -> bool:
        """Return whether the client is there, and has sent nothing more."""
        return self._client.is_idle()

    def _drop(self, reset: bool = False) -> None:
        if self._upstream is not None:
            self._upstream.close(reset)
            self._upstream = None

    async def _one(self, request: Head) -> str:
        """Answer one request, and say what comes after it."""
        proxy, figures = self._proxy, self._proxy.figures
        if self._limits is not proxy.limits:
            self._limits, self._buckets = proxy.limits, proxy.limits.buckets()
        method, path, _ = request.first.split(" ", 2)
        fault = proxy.choice(method, path, request.get("Range"))
        figures.requests += 1
        figures.of(path)["requests"] += 1
        figures.concurrent += 1
        figures.most_concurrent = max(figures.most_concurrent, figures.concurrent)
        entry = [method, path, request.get("Range"), None, 0, fault.kind if fault else None]
        figures.log.append(entry)
        if fault:
            figures.faults[fault.kind] += 1
            figures.of(path)["faults"] += 1
        proxy.tell_waiters()
        try:
            return await self._in_turn(request, method, fault, entry)
        finally:
            proxy.figures.concurrent -= 1  # others than before, if they were reset meanwhile
            proxy.tell_waiters()

    async def _in_turn(
        self, request: Head, method: str, fault: Fault | None, entry: list[Any]
    ) -> str:
        await self._limits.pass_gate(method, entry[1], entry[2])
        slots = self._limits.slots
        if slots is None:
            return await self._held(await self._answer(request, method, fault, entry))
        if slots.locked() and self._limits.busy_status:
            await Body(self._client, request).whole()
            return await self._send(reply(self._limits.busy_status, 1), entry)
        async with slots:
            return await self._held(await self._answer(request, method, fault, entry))

    async def _held(self, after: str) -> str:
        """Wait here, as a request in work, until the client of one without an end has gone."""
        if after == "hold":
            await self._client.hold()
        return after

    async def _answer(
        self, request: Head, method: str, fault: Fault | None, entry: list[Any]
    ) -> str:
        ready = time.monotonic() + self._limits.latency_s
        kind = fault.kind if fault else ""
        if kind in ("reset", "timeout"):
            return "reset" if kind == "reset" else "hold"
        if kind == "refused":
            assert fault is not None
            self._proxy.refuse(fault.rule.hold_s)
            return "reset"
        if request.get("Expect"):
            request.set("Expect", None)
            await self._client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault and kind in OF_REPLIES:
            await Body(self._client, request).whole()
            await self._wait_until(ready)
            return await self._send(reply(fault.status, fault.rule.retry_after), entry)
        asked = Head(request.first, list(request.fields))
        if fault:
            alter_request(fault, asked)
        try:
            struck = await self._forward(asked, kind)
            if struck:
                return struck
            assert self._upstream is not None
            head = Head.parse(await self._upstream.until(b"\r\n\r\n"))
        except (Gone, OSError):
            self._drop()
            await self._send(reply(502), entry)
            return "close"
        await self._wait_until(ready)
        body = Body(self._upstream, head, method)
        closes = body.to_end or "close" in head.get("Connection").lower()
        closes = closes or head.first.startswith("HTTP/1.0")
        if fault:
            return await self._send_wrong(fault, request, head, body, entry)
        entry[3] = head.status
        await self._client.send(bytes(head))
        await body.relay(self._to_client(entry), self._piece())
        return "close" if closes else "keep"

    async def _forward(self, asked: Head, kind: str) -> str:
        """Send the request to the store; what comes after, if it was struck on the way."""
        if self._upstream is not None and not self._upstream.is_idle():
            self._drop()
        if self._upstream is None:
            sock = socket.socket()
            sock.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(sock, self._proxy.upstream)
            except BaseException:
                sock.close()
                raise
            self._upstream = Peer(sock)
        upstream, figures = self._upstream, self._proxy.figures
        body = Body(self._client, asked)
        await upstream.send(bytes(asked))
        if kind in OF_REQUEST_BODIES and (body.length or body.chunked):
            data = await body.whole()
            await upstream.send(data[: len(data) // 2])
            self._drop(reset=True)
            return "reset" if kind == "reset_midway" else "hold"

        async def take(data: bytes | memoryview) -> None:
            for bucket in self._buckets:
                await bucket.pay(len(data))
            figures.received += len(data)
            await upstream.send(data)

        await body.relay(take, self._piece())
        return ""

    async def _send_wrong(
        self, fault: Fault, request: Head, head: Head, body: Body, entry: list[Any]
    ) -> str:
        if fault.kind == "lost":
            await body.whole()
            return "reset"
        data = await body.whole()
        if body.chunked or body.to_end:
            head.set("Transfer-Encoding", None)
            head.set("Content-Length", str(len(data)))
        if fault.kind == "slow":
            self._buckets = [Bucket(fault.rule.rate), *self._buckets]
        after = await self._send(alter(fault, request, head, data), entry)
        if fault.kind == "slow":
            del self._buckets[0]
        return "close" if after == "keep" and body.to_end else after

    async def _send(self, answer: Answer, entry: list[Any]) -> str:
        entry[3] = answer.head.status
        await self._client.send(bytes(answer.head))
        take, view = self._to_client(entry), memoryview(answer.body)
        piece = min((int(one.rate * PIECE_S) + 1 for one in self._buckets), default=BUFFER)
        for begin in range(0, len(view), piece):
            await take(view[begin : begin + piece])
        return answer.after

    def _to_client(self, entry: list[Any]) -> Take:
        client, buckets, figures = self._client, self._buckets, self._proxy.figures
        of_path = figures.of(entry[1])

        async def take(data: bytes | memoryview) -> None:
            for bucket in buckets:
                await bucket.pay(len(data))
            await client.send(data)
            figures.sent += len(data)
            of_path["sent"] += len(data)
            entry[4] += len(data)
            self._proxy.tell_waiters()

        return take

    def _piece(self) -> int:
        return min((one.piece() for one in self._buckets), default=BUFFER)

    @staticmethod
    async def _wait_until(when: float) -> None:
        late = when - time.monotonic()
        if late > 0:
            await asyncio.sleep(late)


class Proxy:
    """Listens, holds what all connections share, and does what the control channel says."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.upstream = upstream
        self.limits, self.choice, self.figures = Limits(), Choice(), Figures()
        # Bound, but not listening: the port stays ours while connections to it are refused.
        self._port_holder = socket.socket()
        self._port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._port_holder.bind(("127.0.0.1", 0))
        self.port = int(self._port_holder.getsockname()[1])
        self._listening: asyncio.Task[None] | None = None
        self._connections: dict[asyncio.Task[None], Connection] = {}
        self._changed = asyncio.Event()

    def listen(self) -> None:
        if self._listening is not None:
            return
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", self.port))
        sock.listen(1024)
        sock.setblocking(False)
        self._listening = asyncio.create_task(self._accept(sock))

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with sock:
            while True:
                client, _ = await loop.sock_accept(sock)
                self.figures.connections += 1
                connection = Connection(self, Peer(client))
                task = asyncio.create_task(connection.serve())
                self._connections[task] = connection
                task.add_done_callback(self._connections.pop)

    def refuse(self, hold_s: float | None = None) -> None:
        """Listen no more, and break the connections that are idle or at work."""
        if self._listening is not None:
            self._listening.cancel()
            self._listening = None
        current = asyncio.current_task()
        for task in self._connections:
            if task is not current:
                task.cancel()
        if hold_s is not None:
            asyncio.get_running_loop().call_later(hold_s, self.listen)

    def tell_waiters(self) -> None:
        self._changed.set()

    async def _until(self, wanted: dict[str, Any]) -> None:
        """Wait until each of these figures is at least so high."""
        while True:
            self._changed.clear()
            now = {**self.figures.told(), "faults": self.figures.faults.total()}
            if all(now[name] >= least for name, least in wanted.items()):
                return
            await self._changed.wait()

    async def _settle(self) -> None:
        """Wait until no request is in work, or has been sent by a client and not been read."""
        while True:
            await asyncio.sleep(0.005)  # in which what came before this command is taken up
            busy = (not one.is_idle() for one in self._connections.values())
            if not self.figures.concurrent and not any(busy):
                return

    async def obey(self, command: dict[str, Any]) -> Any:
        name, given = command["do"], command.get("with", {})
        if name == "limits":
            self.limits.open_gate()
            self.limits = Limits(**given)
        elif name == "rules":
            self.choice = Choice([Rule(**rule) for rule in given])
        elif name == "figures":
            return self.figures.told()
        elif name == "reset":
            now, self.figures = self.figures, Figures()
            self.figures.concurrent = self.figures.most_concurrent = now.concurrent
        elif name == "wait":
            await self._until(given)
        elif name == "settle":
            await self._settle()
        elif name == "refuse":
            self.refuse()
        elif name == "listen":
            self.listen()
        return None

    async def run(self, control: socket.socket) -> None:
        self.listen()
        reader, writer = await asyncio.open_connection(sock=control)
        writer.write(json.dumps({"port": self.port}).encode() + b"\n")
        while line := await reader.readline():
            answer = await self.obey(json.loads(line))
            writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()


def main() -> None:
    descriptor, host, port = sys.argv[1:]

    async def run() -> None:
        await Proxy((host, int(port))).run(socket.socket(fileno=int(descriptor)))

    asyncio.run(run())


if __name__ == "__main__":
    main()
