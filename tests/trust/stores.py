"""Commands that write into an object store, killed at a request, or whose requests fail.

P2: readers see the old version or the new one, whole, and the same command, run again, goes on.
"""

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from support import object_stores
from support.fault_proxy import fault_proxy
from support.faults import Rule
from support.packing import grouped
from support.trees import images, plant
from support.uploading import kill_held

import shardio
from shardio.errors import NotPackedError
from shardio.storage import ranges
from trust.commands import Commands
from trust.section import Section, told, words

# By name: the words behind the command's, and whether a dataset is there before.
COMMANDS = {
    "pack": ("pack SRC OUT --max-records 2 --jobs 1", False),
    "append": ("append MORE OUT --on-duplicate skip --jobs 1", True),
    "update": ("update MORE OUT --jobs 1", True),
    "drop": ("drop OUT --keys KEYS --missing ignore", True),
    "annotate": ("annotate OUT VALUES.csv --missing none", True),
    "compact": ("compact OUT --jobs 1", True),
    "copy": ("copy PACKED OUT", False),
}
OFTEN = ("503", "500", "reset", "lost", "reset_midway")  # these a client gets over
FOR_GOOD = "403"


class Stores(Section):
    """Runs a command through a proxy that fails, or that holds a request until it is killed."""

    name = "stores"
    promise = "P2"
    goal = 280

    def prepare(self) -> None:
        os.environ["SOURCE_DATE_EPOCH"] = "1750000000"
        os.environ["XDG_CACHE_HOME"] = str(self.folder / "caches")
        self.ends = contextlib.ExitStack()
        self.store = self.ends.enter_context(object_stores.s3())
        self.proxy = self.ends.enter_context(fault_proxy(self.store.port))
        given = self.store.through(self.proxy.port).options
        names = {"endpoint": "AWS_ENDPOINT_URL", "region": "AWS_REGION"}
        names |= {one: f"AWS_{one}".upper() for one in ("access_key_id", "secret_access_key")}
        os.environ.update({names[one]: value for one, value in given.items()})
        self.commands = Commands(self.folder)
        self.ends.callback(self.commands.close)
        self.ends.callback(ranges.close)
        plant(self.folder / "SRC", images(2, 3, 200))
        plant(self.folder / "MORE", images(3, 3, 200))
        values = b"key,caption\nclass0/001.jpg,new\nclass1/002.jpg,words\n"
        plant(self.folder, {"KEYS": b"class0/001.jpg\nclass1/002.jpg\n", "VALUES.csv": values})
        self.packed = self.folder / "PACKED"
        options = grouped({"jobs": 1, "max_records": 1})
        shardio.pack(self.folder / "SRC", self.packed, **options)
        self.requests: dict[str, int] = {}
        self.states: dict[str, tuple[Any, Any]] = {}  # old, new

    def state(self, url: str) -> Any:
        """Return what users see of a dataset; None where none is there."""
        try:
            samples = list(shardio.open(url, decode=None))
        except NotPackedError:
            return None
        return sorted((sorted(one.items()) for one in samples), key=repr)

    def begun(self, name: str, number: int | str) -> tuple[str, list[str]]:
        """Return the URL of a dataset as it is before a command, and the command's words."""
        line, there = COMMANDS[name]
        if there:
            self.store.put_folder(self.packed, f"{number}-{name}/out/")
        url = f"{self.store.url}/{number}-{name}/out"
        paths = {one: str(self.folder / one) for one in line.split() if one[0].isupper()}
        return url, [(paths | {"OUT": url}).get(one, one) for one in line.split()]

    def rehearse(self, name: str) -> None:
        if name in self.requests:
            return
        url, line = self.begun(name, "first")
        old = self.state(url)
        self.proxy.reset()
        done = self.commands.run(*line)
        assert done.returncode == 0, done
        self.requests[name] = self.proxy.figures().requests
        self.states[name] = (old, self.state(url))

    def case(self, number: int) -> str:
        draw, name = self.draw(number), [*COMMANDS][number % len(COMMANDS)]
        self.rehearse(name)
        url, line = self.begun(name, number)
        how = ("killed", "each", "fails")[number // len(COMMANDS) % 3]
        at = draw.randrange(self.requests[name])
        old, new = self.states[name]
        self.proxy.reset()
        with told(f"{name}: {how} at request {at} of {self.requests[name]}"):
            try:
                if how == "killed":
                    self.proxy.rules(Rule("timeout", numbers=[at], times=1))
                    kill_held(self.proxy, *line)
                elif how == "each":  # each k-th request fails once
                    kind, each = draw.choice(OFTEN), draw.randrange(2, 12)
                    self.proxy.rules(Rule(kind, numbers=[*range(each - 1, 2_000, each)]))
                    done = self.commands.run(*line)
                    assert done.returncode in (0, 1), done
                    assert done.returncode == 0 or url in done.stderr, done
                else:
                    self.proxy.rules(Rule(FOR_GOOD, numbers=[*range(at, 2_000)]))
                    done = self.commands.run(*line)
                    assert done.returncode == 1 and url in done.stderr, done
            finally:
                self.proxy.settle()
                self.proxy.rules()
            found = self.state(url)
            assert found in (old, new), "neither the old version nor the new one"
            assert how != "each" or done.returncode or found == new, "it had ended well"
            if found is not None:
                assert not shardio.verify(url, sha256=True, jobs=1).damages
            done = self.commands.run(*line)
            late = found == new and name in ("pack", "copy") and done.returncode == 1
            assert done.returncode == 0 or late, done
            assert self.state(url) == new, "run again, it ended in something else"
            assert not shardio.verify(url, sha256=True, jobs=1).damages
        self.sums["requests"] += self.requests[name]
        self.store.delete([one for one in self.store.sizes() if one.startswith(f"{number}-")])
        return f"{name}: {how}"

    def close(self) -> None:
        if hasattr(self, "ends"):
            self.ends.close()

    @classmethod
    def done(cls, kinds: Mapping[str, int], figures: Mapping[str, float]) -> str:
        rows = [one.split(": ") for one in kinds if ": " in one]
        killed = sum(count for one, count in kinds.items() if one.endswith("killed"))
        return (
            f"{len(words(row[0] for row in rows))} commands into an object store: {killed} killed "
            f"at a request, {sum(kinds.values()) - killed} whose requests failed; each run again"
        )
