"""Whatever a store does: the right bytes, or within a bounded time an error that says what failed.

The 12 faults are those that users of other loaders met. `support.faults` says what each does.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fault_proxy import FaultProxy
from support.faults import Rule
from support.url_datasets import served, write_images
from support.url_reader import UrlReader, digest, url_reader

RECORDS = 80
FAULTS = (
    *("timeout", "reset", "5xx", "429", "short", "wrong_range"),
    *("shifted", "stall", "changed", "403", "404", "refused"),
)
MORE = ("reset_midway", "shifted_silently", "garbage")
PASSES = frozenset(FAULTS) - {"403", "404"}  # these are told at once
TARGETS = ("manifest", "index", "range", "whole")
CAUSES = {
    "timeout": "no answer came in time",
    "reset": "connection broke|connection reset",
    "reset_midway": "connection broke|connection reset",
    "5xx": "answered 50[023]",
    "429": "answered 429",
    "short": "connection broke",
    "wrong_range": "whole object",
    "shifted": "another range",
    "stall": "no answer came in time, or it stalled",
    "403": "answered 403",
    "404": "not there|not packed",
    "refused": "connection refused|connection broke|no connection|connection reset",
}
TOLD = ("StorageError", "DamageError", "NotPackedError")
# Bytes that are wrong, in an answer that looks right: it takes a checksum to see it.
WRONG_BYTES = ("changed", "garbage", "shifted_silently")


def image(number: int) -> bytes:
    return b"\xff\xd8\xff" + np.random.default_rng(number).bytes(
        110_000 + 100 * number
    )  # more than a range of 8 MiB in all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("www")
    write_images(folder / "data", RECORDS, image, "16MiB")
    return folder


@pytest.fixture(scope="module")
def proxy_of_all(folder: Path) -> Iterator[FaultProxy]:
    with served(folder) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def holder() -> Iterator[UrlReader]:
    with url_reader(holds_client=True) as reader:
        yield reader


@pytest.fixture(scope="module")
def helped() -> Iterator[UrlReader]:
    with url_reader(holds_client=False) as reader:
        yield reader


def rule(folder: Path, kind: str, target: str, transient: bool) -> Rule:
    """Return the rule of a fault that strikes the first requests of a kind, or all."""
    last = next((folder / "data").glob("*.shard")).stat().st_size - 1
    where = {
        "manifest": {"path": "manifest"},
        "index": {"path": r"\.shard", "range": f"-{last}$"},
        "range": {"path": r"\.shard", "range": rf"^bytes=\d+-(?!{last}$)"},
        "whole": {"path": r"\.shard", "range": rf"^bytes=\d+-(?!{last}$)"},
    }[target]
    few = kind in WRONG_BYTES  # these are asked for again once
    times = (1 if few else 2) if transient else None
    if kind == "refused" and transient:
        return Rule(kind, **where, times=1, hold_s=0.2)
    return Rule(kind, **where, times=times)


def check(
    reader: UrlReader, proxy: FaultProxy, folder: Path, case: Any, cache: Path | None = None
) -> None:
    """Read with a fault; what comes of it is as the module says."""
    kind, target, transient = case
    # An attempt takes at most a quarter of it. What is told at once, or comes, takes no time of it.
    retried = kind in PASSES or kind == "reset_midway"
    timeout_s = 2.0 if retried and not transient else 20.0
    if kind in ("timeout", "stall"):
        timeout_s = 8.0 if transient else 2.0
    options: dict[str, Any] = {"timeout_s": timeout_s}
    if cache is not None:
        options |= {"cache": str(cache), "cache_bytes": 1 << 30}
    url = f"{proxy.url}/data"
    proxy.rules(rule(folder, kind, target, transient))
    if target == "whole":
        shard = next((folder / "data").glob("*.shard"))
        right = [hashlib.sha256(shard.read_bytes()).hexdigest()]
        done = reader.read("whole", f"{url}/{shard.name}", **options)
        # Who asks for the sum compares it. A second request may have brought the right bytes.
        if kind in WRONG_BYTES and not done["error"] and done["digests"] != right:
            done["error"], done["text"] = "DamageError", url
    else:
        right = [digest(image(3)), digest(image(77))]
        done = reader.read("records", url, [3, 77], **options)
    assert proxy.figures().faults, "the fault did not strike"
    # Not how fast this machine is: a bound that a wait without one would exceed.
    assert done["took_s"] < 60
    if done["error"]:
        assert done["error"] in TOLD, done["text"]
    else:
        assert done["digests"] == right
    if transient and kind in (*PASSES, *MORE) and not (kind in WRONG_BYTES and target == "whole"):
        assert not done["error"], done["text"]
    never = kind in ("wrong_range", "shifted") and target == "manifest"  # it is read without one
    if not transient and not never:
        tell(done, kind, target, url)
    proxy.rules()
    proxy.listen()
    again = reader.read("records", url, [5], **options | {"timeout_s": 20.0})
    assert again["digests"] == [digest(image(5))], again["text"]
    assert not again["in_flight"]


def tell(done: Any, kind: str, target: str, url: str) -> None:
    """Compare the words of an error with what a user has to know."""
    text = done["text"]
    if kind == "garbage" and not done["error"]:
        return  # the bit was flipped beside what was wanted, which is right
    assert done["error"], "a fault that was not met"
    assert url in text and "obstore" not in text and "Debug" not in text
    assert text.isprintable() or "\n" in text
    if kind in WRONG_BYTES:
        assert done["error"] in ("DamageError", "NotPackedError")
        return
    busy = "no answer came in time"  # where this machine is busy, of any that have a body
    assert re.search(f"{CAUSES[kind]}|{busy}|broke before the last byte", text.lower()), text
    if target != "manifest" and (kind, target) != ("404", "index"):  # which is not there at all
        assert re.search(r"cannot read bytes \d+-\d+: ", text), text
    if kind in PASSES:
        assert re.search(r"\(\d+ attempts in \d+ s\)", text), text


# The fast suite has all of the manifest's, since an answer to it has no checksum of its own.
OF_MANIFEST = sorted(set(FAULTS + MORE) - {"wrong_range", "shifted"})  # it is read as a whole


@pytest.mark.parametrize("kind", [kind for kind in OF_MANIFEST if kind not in ("403", "404")])
def test_a_fault_of_the_manifest_that_passes_changes_nothing(
    holder: UrlReader, proxy: FaultProxy, folder: Path, kind: str
) -> None:
    check(holder, proxy, folder, (kind, "manifest", True))


@pytest.mark.parametrize("kind", OF_MANIFEST)
def test_a_fault_of_the_manifest_that_stays_is_told(
    holder: UrlReader, proxy: FaultProxy, folder: Path, kind: str
) -> None:
    check(holder, proxy, folder, (kind, "manifest", False))


CASES = [
    (kind, target, transient)
    for kind in (*FAULTS, *MORE)
    for target in TARGETS
    for transient in (True, False)
]


@pytest.mark.slow
@pytest.mark.parametrize("with_cache", [False, True], ids=["", "cache"])
@pytest.mark.parametrize("who", ["holder", "helped"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_fault_gives_right_bytes_or_an_error(
    request: pytest.FixtureRequest,
    proxy: FaultProxy,
    folder: Path,
    tmp_path: Path,
    case: Any,
    who: str,
    with_cache: bool,
) -> None:
    reader = request.getfixturevalue(who)
    check(reader, proxy, folder, case, tmp_path / "cache" if with_cache else None)


@pytest.mark.parametrize("transient", [True, False])
@pytest.mark.parametrize("kind", [*FAULTS, *MORE])
def test_a_fault_of_each_kind_gives_right_bytes_or_an_error(
    request: pytest.FixtureRequest,
    proxy: FaultProxy,
    folder: Path,
    tmp_path: Path,
    kind: str,
    transient: bool,
) -> None:
    """Where it strikes, and who reads, is drawn; the slow test tries all."""
    draw = random.Random(f"{kind} {transient}")
    reader = request.getfixturevalue(draw.choice(("holder", "helped")))
    cache = tmp_path / "cache" if draw.random() < 0.5 else None
    target = draw.choice(("index", "range") if transient else TARGETS[1:])
    check(reader, proxy, folder, (kind, target, transient), cache)


# --- many reads -----------------------------------------------------------------------------------

# Of these a read gets over; 403 and 404 are told at once, and `refused` breaks all connections.
OFTEN = tuple(kind for kind in (*FAULTS, *MORE) if kind not in ("403", "404", "refused"))
PART = 0.1  # of the requests


def soak(reader: UrlReader, proxy: FaultProxy, reads: int, seed: int) -> None:
    """Read records at random while a tenth of all requests fails in one way or another."""
    url = f"{proxy.url}/data"
    each = PART / len(OFTEN)
    proxy.rules(*(Rule(kind, path=r"\.shard", fraction=each, seed=seed) for kind in OFTEN))
    draw = random.Random(seed)
    numbers = [draw.randrange(RECORDS) for _ in range(reads)]
    done = reader.read("records", url, numbers, timeout_s=8.0)
    assert not done["text"]
    right = [digest(image(number)) for number in range(RECORDS)]
    wrong = [n for n, one in zip(numbers, done["digests"], strict=True) if one != right[n]]
    assert not wrong and len(done["digests"]) == reads
    figures = proxy.figures()
    faults = sum(figures.faults.values())
    print(f"{reads} reads, {figures.requests} requests, {faults} faults: {done['figures']}")
    assert faults > PART * reads / 2
    assert figures.requests <= 1.3 * reads + 20  # which open the dataset
    hedges = done["figures"]["hedges"]
    assert hedges <= 0.02 * done["figures"]["requests"] + 5
    assert not done["in_flight"]


@pytest.mark.parametrize("holds_client", [True, False], ids=["holder", "helped"])
def test_reads_are_right_while_a_tenth_of_the_requests_fails(
    proxy: FaultProxy, holds_client: bool
) -> None:
    with url_reader(holds_client=holds_client, threads=8) as reader:
        soak(reader, proxy, 300, seed=1)


@pytest.mark.stress
@pytest.mark.parametrize("holds_client", [True, False], ids=["holder", "helped"])
def test_ten_thousand_reads_are_right(proxy: FaultProxy, holds_client: bool) -> None:
    with url_reader(holds_client=holds_client, threads=8) as reader:
        soak(reader, proxy, 10_000, seed=2)
