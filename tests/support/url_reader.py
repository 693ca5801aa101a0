"""A process that reads datasets by URL as it is told, with a client of its own or by a helper.

    with url_reader(holds_client=True) as reader:
        reader.tell("records", url, [3, 77], timeout_s=2.0)  # starts to read
        reader.answer()  # {"error": "", "text": "", "digests": [...], ...}

The test's own process must not hold a client: all tests after it would read by helpers alone.
"""

import contextlib
import gc
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support import LIMIT_S

TESTS = Path(__file__).resolve().parent.parent


class UrlReader:
    """The test's end of such a process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.pid = process.pid

    def tell(self, what: str, url: str, numbers: Sequence[int] = (), **storage: Any) -> "UrlReader":
        """Start to read "records" of these numbers, or the SHA-256 of a "whole" file.

        storage: as Storage has.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, url, list(numbers), storage]) + "\n")
        self.process.stdin.flush()
        return self

    def answer(self) -> dict[str, Any]:
        """Return what came of it: error (a type), text, digests, took_s, requests, figures."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"the reader has ended with {self.process.wait()}")
        return json.loads(line)  # type: ignore[no-any-return]

    def read(self, what: str, url: str, numbers: Sequence[int] = (), **storage: Any) -> Any:
        """Read, and return what came of it."""
        return self.tell(what, url, numbers, **storage).answer()


@contextlib.contextmanager
def url_reader(*, holds_client: bool, threads: int = 1) -> Iterator[UrlReader]:
    """Start such a process, and end it. threads: by which it reads records."""
    arguments = [str(int(holds_client)), str(threads)]
    process = subprocess.Popen(
        [sys.executable, "-m", "support.url_reader", *arguments],
        cwd=TESTS,
        env={"PYTHONPATH": f"{TESTS}:{TESTS.parent}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield UrlReader(process)
    finally:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(LIMIT_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def digest(data: bytes) -> str:
    """Return a short name of bytes."""
    return hashlib.blake2s(data, digest_size=8).hexdigest()


def main(holds_client: str, threads: str) -> None:
    """Do what the lines of stdin say."""
    from concurrent.futures import ThreadPoolExecutor

    import shardio
    from shardio.storage import ranges
    from shardio.storage.location import locate

    if int(holds_client):
        ranges.hold_client()
    with ThreadPoolExecutor(int(threads)) as pool:
        for line in sys.stdin:
            what, url, numbers, storage = json.loads(line)
            start = time.monotonic()
            done: dict[str, Any] = {"error": "", "text": "", "digests": []}
            try:
                options = shardio.Storage(**storage)
                if what == "whole":
                    folder, _, name = url.rpartition("/")
                    done["digests"] = [locate(folder, options).open(name).sha256().hex()]
                else:
                    there = shardio.open(url, decode=None, storage=options)
                    found = pool.map(there.__getitem__, numbers)
                    done["digests"] = [digest(record["image"]) for record in found]
            except Exception as error:  # whatever it is: the test compares its type
                done |= {"error": type(error).__name__, "text": str(error)}
            figures = ranges.figures()
            done["took_s"] = time.monotonic() - start
            done["figures"] = {} if figures is None else vars(figures)
            there = found = None
            limit = time.monotonic() + LIMIT_S
            while (left := ranges.ranges().in_flight) and time.monotonic() < limit:
                gc.collect()  # an error may hold frames, and they files
                time.sleep(0.005)
            done["in_flight"] = left
            print(json.dumps(done), flush=True)
    ranges.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
