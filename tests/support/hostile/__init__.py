"""Inputs that somebody wrote to do harm, and how each of them must end.

A family is all hostile inputs of one kind, made by rule: each number of a binary layout is set to
each of NUMBERS, each value of a tree to each of JUNK, and what needs a thought of its own is
written out. `tests/golden/hostile/FAMILY.txt` keeps how each case ends: in an error, by its
message without numbers, or in values. tests/golden/make_hostile.py writes these files.

    own     the files of a dataset of ours, plans, states, caches
    others  files that other tools write, archives, tables
"""

import ctypes
import json
import re
import resource
import signal
import struct
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from shardio.errors import ShardioError
from support.conformance import same
from support.forging import in_child, paths, put

GOLDEN = Path(__file__).parent.parent.parent / "golden"
TABLES = GOLDEN / "hostile"
ALLOWED, TIMES = 64 << 20, 48  # bytes that an input may take: docs/reliability.md
CPU_S = 20  # of one case, however slow the machine is: most take some milliseconds
AS_IT_WAS, OTHERWISE = "read as the original", "read, as what it says"


@dataclass
class Case:
    """One input: what reads it, and what an error must name, any of these words."""

    name: str
    size: int  # bytes
    read: Callable[[], Any]
    names: Sequence[str]
    original: Any = None  # what is read where nothing is changed


Family = Callable[[Path], Iterator[Case]]


# --- values ---------------------------------------------------------------------------------------

DEEP = 100_000  # beyond what any Python's stack takes
# As JSON has them: most are of a wrong type wherever they stand.
JSON_JUNK = {
    "null": "null",
    "true": "true",
    "-1": "-1",
    "0": "0",
    "1": "1",
    "2^31": str(1 << 31),
    "2^63": str(1 << 63),
    "2^64": str(1 << 64),
    "10^400": "1" + "0" * 400,
    "1.5": "1.5",
    "1e999": "1e999",
    "NaN": "NaN",
    '""': '""',
    "text": '"x"',
    "up": '"../../x"',
    "a host": '"http://evil.example/x"',
    "a scheme": '"s3://evil/x"',
    "NUL": '"a\\u0000b"',
    "escapes": '"\\u001b]0;x\\u0007<script>"',
    "half a character": '"\\ud800"',
    "long text": '"' + "n" * 70_000 + '"',
    "[]": "[]",
    "[1]": "[1]",
    '["x"]': '["x"]',
    "[[]]": "[[]]",
    "{}": "{}",
    '{"a":1}': '{"a":1}',
    "deep lists": "[" * DEEP + "]" * DEEP,
    "deep maps": '{"a":' * DEEP + "1" + "}" * DEEP,
}
SHORT_JUNK = {
    name: JSON_JUNK[name]
    for name in ("null", "-1", "2^64", "1.5", "text", "up", "half a character", "[[]]", "{}")
}
_MARK = "put something here"


def brief(name: str | bytes) -> str:
    """Write a name that may be long."""
    return repr(name) if len(name) < 40 else f"{name[:9]!r} ... ({len(name)})"


def shown(path: Sequence[Any]) -> str:
    """Write the path of a part."""
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in path)


def json_cases(
    value: Any,
    junk: Mapping[str, str] = JSON_JUNK,
    dumps: Callable[[Any], str] = json.dumps,
) -> Iterator[tuple[str, str]]:
    """Yield texts in which one part is junk, left out, or there twice, and what was done."""
    for path in paths(value):
        if not path:
            continue
        marked = dumps(put(value, path, [_MARK]))
        for name, text in junk.items():
            yield f"{shown(path)} = {name}", marked.replace(json.dumps(_MARK), text)
        yield f"{shown(path)} left out", dumps(put(value, path, None))
        if isinstance(path[-1], str):
            twice = f"7, {json.dumps(path[-1])}: 8"
            yield f"{shown(path)} twice", marked.replace(json.dumps(_MARK), twice)


@dataclass
class Raw:
    """Bytes that stand in a msgpack value as they are."""

    data: bytes


def pack(value: Any) -> bytes:
    """Pack a value as msgpack, with Raw parts."""
    if isinstance(value, Raw):
        return value.data
    if isinstance(value, dict):
        parts = [pack(one) for pair in value.items() for one in pair]
        return bytes(msgpack.Packer().pack_map_header(len(value))) + b"".join(parts)
    if isinstance(value, list | tuple):
        return bytes(msgpack.Packer().pack_array_header(len(value))) + b"".join(map(pack, value))
    return bytes(msgpack.packb(value))


MSGPACK_JUNK: Mapping[str, Any] = {
    "nil": None,
    "true": True,
    "-1": -1,
    "0": 0,
    "1": 1,
    "2^31": 1 << 31,
    "2^63": 1 << 63,
    "2^64 - 1": (1 << 64) - 1,
    "-2^63": -1 << 63,
    "1.5": 1.5,
    "NaN": float("nan"),
    '""': "",
    "text": "x",
    "up": "../../x",
    "escapes": "\x1b]0;x\a<script>",
    "no UTF-8": Raw(b"\xa2\xc3\x28"),
    "long text": "n" * 70_000,
    "no bytes": b"",
    "bytes": b"x",
    "[]": [],
    "[1]": [1],
    "[[]]": [[]],
    "{}": {},
    "{a: 1}": {"a": 1},
    "{1: 1}": Raw(b"\x81\1\1"),
    "a name twice": Raw(b"\x82\xa1a\1\xa1a\2"),
    "deep lists": Raw(b"\x91" * DEEP + b"\x90"),
    "deep maps": Raw(b"\x81\xa1a" * DEEP + b"\xc0"),
    "2^32 - 1 items": Raw(b"\xdd\xff\xff\xff\xff"),
    "2^32 - 1 pairs": Raw(b"\xdf\xff\xff\xff\xff"),
    "2^32 - 1 bytes": Raw(b"\xc6\xff\xff\xff\xff"),
    "empty maps": Raw(b"\xdd" + struct.pack(">I", 500_000) + b"\x80" * 500_000),
    "an extension": Raw(b"\xc7\4\1\x93\xa1x\xc0\xc0"),
    "an array": Raw(b"\xc7\x0a\1\x93\xa3|u1\x91\2\xc4\2ab"),
    "a huge array": Raw(b"\xc7\x0f\1\x93\xa3<i8\x91\xcf\x0f\xff\xff\xff\xff\xff\xff\xff\xc0"),
    "an object": Raw(b"\xc7\x08\1\x93\xa2|O\x91\1\xc4\0"),
    "another extension": Raw(b"\xd4\5\0"),
    "a time": Raw(b"\xd6\xff\0\0\0\0"),
    "nothing": Raw(b""),
    "no msgpack": Raw(b"\xc1"),
}


def msgpack_cases(
    value: Any, junk: Mapping[str, Any] = MSGPACK_JUNK
) -> Iterator[tuple[str, bytes]]:
    """Yield values in which one part is junk, or left out, packed, and what was done."""
    for path in paths(value):
        for name, one in junk.items():
            yield f"{shown(path)} = {name}", pack(put(value, path, [one]) if path else one)
        if path:
            yield f"{shown(path)} left out", pack(put(value, path, None))


# --- numbers of a layout --------------------------------------------------------------------------


def numbers(true: int, kind: str, *more: int) -> Iterator[tuple[str, int]]:
    """Yield other numbers for a field of this kind of struct, with names."""
    bits = 8 * struct.calcsize(kind)
    least, most = (-1 << bits - 1, (1 << bits - 1) - 1) if kind.islower() else (0, (1 << bits) - 1)
    given = {
        "0": 0,
        "1": 1,
        "itself - 1": true - 1,
        "itself + 1": true + 1,
        "twice": 2 * true,
        "2^16": 1 << 16,
        "2^31": 1 << 31,
        "2^40": 1 << 40,
        "half of all": 1 << bits - 1,
        "most - 60": most - 60,
        "most": most,
        "least": least,
        **{str(one): one for one in more},
    }
    seen = {true}
    for name, one in given.items():
        if one not in seen and least <= one <= most:
            seen.add(one)
            yield name, one


def number_cases(
    data: bytes, fields: Mapping[str, tuple[int, str]], *more: int
) -> Iterator[tuple[str, bytes]]:
    """Yield the bytes with another number in one of these fields, (place, kind of struct)."""
    for field, (at, kind) in fields.items():
        order = kind[0] if kind[0] in "<>" else "<"
        letter = kind[-1]
        (true,) = struct.unpack_from(order + letter, data, at)
        for name, one in numbers(true, letter, *more):
            changed = bytearray(data)
            struct.pack_into(order + letter, changed, at, one)
            yield f"{field} = {name}", bytes(changed)


def cuts(data: bytes, places: Iterable[int]) -> Iterator[tuple[str, bytes]]:
    """Yield the bytes, cut before each of these places, and with bytes behind the end."""
    for at in sorted({*places}):
        if 0 <= at < len(data):
            yield f"cut at {at}", data[:at]
    yield "a byte more", data + b"\0"
    yield "a page more", data + bytes(4096)


# --- how a case ends ------------------------------------------------------------------------------


class TooLongError(BaseException):
    """Ends a case that computes for too long."""


def _too_long(*_: object) -> None:
    raise TooLongError


# What Python and libraries say, of which each version has its own words.
_OF_OTHERS = re.compile(
    r"(?P<kept>\b(TypeError|AttributeError|UnicodeDecodeError|JSONDecodeError|RecursionError): ).*"
    r"|\S* ?object is not .*|cannot unpack .*|(not enough|too many) values .*|non-hexadecimal .*"
    r"|Expecting .*|\S+ exceeds max_.*|\S+ codec can't .*|Unpack failed.*|unpack\(b\) .*"
    r"|Exceeds the limit .*|the JSON object must be .*|Extra data.*|(?<=npy header: ).*"
    r"|int is not allowed .*|Invalid datetime .*|unhashable .*|cannot reshape .*|buffer is .*"
)
_VALUES = (
    (r"(?<!\w)b?('(\\'|[^'])*('|$)|\"(\\\"|[^\"])*(\"|$))", "..."),
    (r"\b(ExtType|Timestamp)\([^)]*\)?", "..."),
    (r"\b0x[0-9a-f]+\b|\b(?=[0-9a-f]*[0-9])[0-9a-f]{8,64}\b", "#"),
    (r"-?\b\d+(,\d{3})*(\.\d+)?(e[+-]?\d+)?\b(\.\.\.)?", "#"),
    (r"(?<=[ (\[])(None|True|False|-?inf|nan|\[.{0,9}\]|\{.{0,12}\})(?!\w)", "..."),
    (r"(is|of dtype|version|records:|dataset:|buffer:) #", r"\1 ..."),
    (r": [^:]{1,80} (is no [^:]*)", r": ... \1"),
)


def plain(text: str, top: Path) -> str:
    """Return what is the same of a message in each run: its first line, without values."""
    text = text.replace(f"{top}/", "").replace(str(top), "TOP").split("\n")[0][:300]
    text = _OF_OTHERS.sub(lambda found: f"{found['kept'] or ''}...", text)
    for pattern, instead in _VALUES:
        text = re.sub(pattern, instead, text)
    return text if len(text) <= 140 else text[:140].rstrip() + " ..."


def ends(case: Case, top: Path) -> str:
    """Read a case, in bounded memory and time; how it ended. What must never be begins with "!"."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    room = pages * 4096 + ALLOWED + TIMES * case.size
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    resource.setrlimit(resource.RLIMIT_AS, (room, hard))
    try:
        found = case.read()
    except ShardioError as error:
        text = str(error)
        told = any(name in text for name in case.names)
        odd = [one for one in text.replace("\n", "") if not one.isprintable()]
        if not told or odd or len(text) > 100_000 or "MemoryError" in text:
            return f"! a bad message: {type(error).__name__}: {text[:400]!r}"
        return f"{type(error).__name__}: {plain(text, top)}"
    except (Exception, TooLongError) as error:
        return f"! {type(error).__name__}: {str(error)[:200]!r}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)
    return AS_IT_WAS if same(found, case.original) else OTHERWISE


def outcomes(family: Family, top: Path, part: Callable[[int], bool] = lambda _: True) -> Any:
    """Return how the cases of a family end, by name; of those whose number is in the part.

    All are read in one process, which dies in the place of this one.
    """
    told = top / "told.json"

    def work() -> None:
        signal.signal(signal.SIGPROF, _too_long)
        # A thread's own arena takes 64 MB of address space, which would count.
        ctypes.CDLL(None).mallopt(-8, 1)
        there = top / "there"
        there.mkdir()
        found: dict[str, str] = {}
        for number, case in enumerate(family(there)):
            assert case.name not in found, case.name
            if part(number):
                told.write_text(case.name)  # which one it was that ended the process
                found[case.name] = ends(case, there)
        told.write_text(json.dumps(found))

    def noisy() -> None:
        try:
            work()
        except BaseException:
            traceback.print_exc()  # in_child ends without
            raise

    status = in_child(noisy)
    text = told.read_text() if told.exists() else "nothing"
    assert status == 0, f"{family.__name__}: it ended by {status} at: {text}"
    return json.loads(text)


# --- the tables -----------------------------------------------------------------------------------


def families() -> dict[str, Family]:
    """Return all families by name."""
    from support.hostile import others, own

    return own.FAMILIES | others.FAMILIES


def dump(found: Mapping[str, str]) -> str:
    """Write how cases end: each end once, its cases below it."""
    cases = defaultdict(list)
    for name, end in found.items():
        cases[end].append(name)
    parts = (end + "".join(f"\n    {name}" for name in cases[end]) for end in sorted(cases))
    return "\n".join(parts) + "\n"


def load(text: str) -> dict[str, str]:
    """Read what `dump` wrote."""
    found, end = {}, ""
    for line in text.splitlines():
        if line.startswith("    "):
            found[line[4:]] = end
        else:
            end = line
    return found


def table(name: str) -> Path:
    """Return where the ends of a family are kept."""
    return TABLES / f"{name}.txt"


def write(folder: Path, only: Sequence[str] = ()) -> dict[str, int]:
    """Write the tables of all families, or of these, again; of how many cases each is."""
    counts = {}
    for name, family in families().items():
        if only and name not in only:
            continue
        (folder / name).mkdir()
        found = outcomes(family, folder / name)
        counts[name] = len(found)
        table(name).write_text(dump(found))
    return counts
