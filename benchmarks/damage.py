"""The same damage to what seven libraries store: what is told, and what is handed out anyway?

A few hundred small JPEGs, each with a number beside it, are stored by each library's own writer
(damage_stores.py has the settings). A copy is damaged in one place, the same way for all, and read
by the library's own reader, an epoch in order, in a process of its own. JPEGs are not decoded: the
bytes and the number of each record are compared with what was packed. Each read counts once, as the
first of these that is true:

    memory    it took 1 GiB more than it began with, or all that it was allowed
    hang      it did not end within 60 s, or it ended by a signal
    wrong     it handed out a pair of image and number that was not packed, or one twice, even if
              an error came later
    missing   no error, fewer records, and not a word
    error     an error ended it: one that says the name of the damaged file, in what it raised,
              logged or printed, or one that does not
    went_on   fewer records, no error, and a warning, or a line in the log or on stderr
    whole     all records came: the damage was where nobody looks, or it was made good

A damage is chosen by a seed, the library and its number. Where a library has no such place (a tar
has no index file; HDF5 is one file, which cannot be swapped), it is not made.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .damage_stores import BY_TITLE, STORES, Store, images_in, value_of
from .data import CIFAR, Data, remove
from .harness import BenchmarkError, EntryProcess, Result, show
from .rivals.base import ENVIRONMENTS

SEED = 38
IMAGES = 128  # of each kind: made ones, and those of CIFAR
CASES, QUICK_CASES = 3, 1
AT_ONCE = 7  # libraries: most of the time, they wait
STARTING_S = 600.0
PAGE = 4096
PIECE = 16  # bytes of an image that are looked for; Snappy may store its beginning elsewhere
MEMORY = 1 << 30
OUTCOMES = {
    "whole": "all came", "went_on": "fewer, and told", "named": "error with the file",
    "unnamed": "error without", "missing": "fewer, not a word", "wrong": "wrong records",
    "hang": "hang or crash", "memory": "memory",
}  # fmt: skip
BAD = ("missing", "wrong", "hang", "memory")

Damage = Callable[["Place", random.Random], "list[str] | None"]


class Place:
    """A copy of what a library stored, to be damaged: its files, and where records are in them."""

    def __init__(self, store: Store, path: Path, images: list[bytes]) -> None:
        self.path = path
        self.data = sorted(path.rglob(store.data))
        self.index = sorted(path.rglob(store.index)) if store.index else []
        self.beside = sorted(path.rglob(store.beside)) if store.beside else []
        self.images = images
        self.known: dict[Any, list[tuple[Path, int, int]]] = {}

    def spans(self, wanted: Callable[[bytes], list[bytes]]) -> list[tuple[Path, int, int]]:
        """Return where these byte strings of each image were at first: file, start, stop."""
        if wanted not in self.known:  # looking takes longer than reading
            self.known[wanted] = found = []
            for path in {*self.data, *self.index, *self.beside}:
                content = path.read_bytes()
                for piece in (piece for image in self.images for piece in wanted(image)):
                    at = content.find(piece)
                    if at >= 0:
                        found.append((path, at, at + len(piece)))
            found.sort()
        return self.known[wanted]


def pieces(image: bytes) -> list[bytes]:
    """Return some bytes of the middle of an image."""
    middle = len(image) // 2
    return [image[middle : middle + PIECE]]


def values(image: bytes) -> list[bytes]:
    """Return the number beside an image, as any of the formats writes it."""
    value = value_of(image)
    return [value.to_bytes(8, "little"), value.to_bytes(8, "big"), b"%d" % value]


def image_and_values(image: bytes) -> list[bytes]:
    return [image, *values(image)]


def flip(path: Path, at: int, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def a_file(paths: list[Path], draw: random.Random) -> Path:
    """Return one of the files, each as likely as it is large."""
    return draw.choices(paths, [path.stat().st_size for path in paths])[0]


def in_spans(spans: list[tuple[Path, int, int]], draw: random.Random) -> list[str] | None:
    if not spans:
        return None
    path, start, stop = draw.choice(spans)
    flip(path, draw.randrange(start, stop), draw)
    return [path.name]


def image_bit(place: Place, draw: random.Random) -> list[str] | None:
    """A bit of an image; where all is compressed, in the inner eight tenths of a file."""
    spans = place.spans(pieces)
    if not spans:
        path = a_file(place.data, draw)
        size = path.stat().st_size
        spans = [(path, size // 10, size - size // 10)]
    return in_spans(spans, draw)


def label_bit(place: Place, draw: random.Random) -> list[str] | None:
    return in_spans(place.spans(values), draw)


def other_bit(place: Place, draw: random.Random) -> list[str] | None:
    """A bit of a file with records, but of no image or label: lengths, names, sums, padding."""
    taken = place.spans(image_and_values)
    if not any(stop - start > PIECE + 8 for _, start, stop in taken):
        return None  # all is compressed
    path = a_file(place.data, draw)
    free = bytearray(b"\1" * path.stat().st_size)
    for where, start, stop in taken:
        if where == path:
            free[start:stop] = bytes(stop - start)
    flip(path, draw.choice([at for at, one in enumerate(free) if one]), draw)
    return [path.name]


def index_bit(place: Place, draw: random.Random) -> list[str] | None:
    if not place.index:
        return None
    path = a_file(place.index, draw)
    flip(path, draw.randrange(path.stat().st_size), draw)
    return [path.name]


def zeros(place: Place, draw: random.Random) -> list[str] | None:
    path = a_file(place.data, draw)
    content = bytearray(path.read_bytes())
    at = draw.randrange(-(-len(content) // PAGE)) * PAGE
    content[at : at + PAGE] = bytes(len(content[at : at + PAGE]))
    path.write_bytes(content)
    return [path.name]


def cut(place: Place, draw: random.Random) -> list[str] | None:
    path = a_file(place.data, draw)
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])
    return [path.name]


def swapped(place: Place, draw: random.Random) -> list[str] | None:
    if len(place.data) < 2:
        return None
    one, other = draw.sample(place.data, 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return [one.name, other.name]


def missing(place: Place, draw: random.Random) -> list[str] | None:
    path = draw.choice(place.data)
    path.unlink()
    return [path.name]


def longer(place: Place, draw: random.Random) -> list[str] | None:
    path = draw.choice(place.data)
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.randint(1, 2 * PAGE)))
    return [path.name]


DAMAGES: dict[str, Damage] = {
    "bit of an image": image_bit, "bit of a label": label_bit, "bit elsewhere": other_bit,
    "bit of the index file": index_bit, "4 KB zeros": zeros, "cut": cut, "two swapped": swapped,
    "a file missing": missing, "garbage behind": longer,
}  # fmt: skip


# --- the benchmark --------------------------------------------------------------------------------


def run(source: Data, result: Result) -> None:
    folder = source.scratch / "images"
    images = _images(source, folder, result)
    cases = QUICK_CASES if source.quick else CASES
    here = [store for store in STORES if _there(store, source, result)]
    size = sum(map(len, images))
    result.data(records=len(images), payload_bytes=size, cases_of_each_kind=cases, seed=SEED)
    found: dict[str, list[dict[str, Any]]] = {store.title: [] for store in here}

    def one_library(rival: str) -> None:
        with _process(rival, folder, source.scratch) as process:
            for store in here:
                if store.rival != rival:
                    continue
                try:
                    found[store.title] = _attack(store, process, images, source.scratch, cases)
                except BenchmarkError as error:
                    if not rival:
                        raise
                    result.note(f"{store.title} was not measured: {error}")
                    del found[store.title]
                    continue
                show(f"  {store.title}: {_line(found[store.title])}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one_library, dict.fromkeys(store.rival for store in here)))
    _report(result, found, {store.package: _version(store) for store in here})


def _there(store: Store, source: Data, result: Result) -> bool:
    if not store.rival or (source.rivals and _python(store).exists()):
        return True
    if source.rivals:
        result.note(f"{store.package}: not there: benchmarks/setup_rivals {store.rival}")
    return False


def _python(store: Store) -> Path:
    return ENVIRONMENTS / store.rival / "bin" / "python"


def _images(source: Data, folder: Path, result: Result) -> list[bytes]:
    """Write small JPEGs into a folder: made ones of 0.6 to 10 KB, and some of CIFAR."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True)
    draw = np.random.default_rng(SEED)
    images = []
    for i in range(IMAGES):
        side = int(draw.integers(24, 128))
        coarse = draw.integers(0, 256, (side // 8 + 1, side // 8 + 1, 3), np.uint8)
        path = folder / f"{i:04d}.jpg"
        Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(
            path, quality=92
        )
    if (source.archives / CIFAR).exists():
        known = sorted(source.cifar(IMAGES).rglob("*.jpg"))[:IMAGES]
        for i, path in enumerate(known, IMAGES):
            shutil.copyfile(path, folder / f"{i:04d}.jpg")
    else:
        result.note(f"{CIFAR} is not there: only JPEGs that this script made")
    images = images_in(str(folder))
    assert len(set(images)) == len(images)
    return images


def _process(rival: str, folder: Path, scratch: Path) -> EntryProcess:
    options: dict[str, Any] = {"rival": rival, "folder": str(folder)}
    if rival:
        python = _python(next(store for store in STORES if store.rival == rival))
        options |= {"python": python, "home": str(scratch / f"home-{rival}")}
    return EntryProcess("damage_stores:library", **options)


def _attack(
    store: Store, process: EntryProcess, images: list[bytes], scratch: Path, cases: int
) -> list[dict[str, Any]]:
    """Store, damage and read again and again; return what was found of each case."""
    stored = scratch / f"stored-{STORES.index(store)}"
    asked: dict[str, Any] = {"title": store.title, "limit_s": STARTING_S}  # it imports, at first
    written = process.round(**asked, path=str(stored), write=True)
    process.round(**asked, path=str(stored))
    whole = process.round(**asked, path=str(stored))
    if "files" not in written or outcome(whole, len(images), []) != "whole" or whole["told"]:
        said = whole["ended"] or whole["error"].rpartition("/")[2] or whole["told"]
        raise BenchmarkError(f"{store.title}: undamaged, it is not read well: {said}")
    found = []
    copy, place = scratch / f"copy-{STORES.index(store)}" / stored.name, None
    for kind, damage in DAMAGES.items():
        for number in range(cases):
            shutil.copytree(stored, copy)
            place = place or Place(store, copy, images)
            draw = random.Random(f"{SEED} {store.title} {kind} {number}")
            names = damage(place, draw)
            if names is not None:
                one_read = process.round(title=store.title, path=str(copy))
                result = outcome(one_read, len(images), names)
                found.append({"kind": kind, "outcome": result, "names": names, **one_read})
            remove(copy)
    remove(stored)
    return found


def outcome(read: dict[str, Any], records: int, names: list[str]) -> str:
    """Return what a read came to: a key of OUTCOMES. names: of the files that were damaged."""
    if read.get("out_of_memory") or read.get("memory", 0) > MEMORY:
        return "memory"
    if read["ended"]:
        return "hang"
    if read["wrong"]:
        return "wrong"
    if read["error"]:
        said = "\n".join((read["error"], *read["told"], read["noise"]))
        return "named" if any(name in said for name in names) else "unnamed"
    if read["right"] == records:
        return "whole"
    return "went_on" if read["told"] or read["noise"].strip() else "missing"


def _counts(found: list[dict[str, Any]], of: tuple[str, ...] = tuple(OUTCOMES)) -> dict[str, int]:
    return {name: sum(one["outcome"] == name for one in found) for name in of}


def _line(found: list[dict[str, Any]]) -> str:
    return ", ".join(f"{name} {count}" for name, count in _counts(found).items() if count)


def _report(
    result: Result, found: dict[str, list[dict[str, Any]]], versions: dict[str, str]
) -> None:
    result.facts["versions"] |= versions
    rows = {title: [{"reads": len(cases), **_counts(cases)}] for title, cases in found.items()}
    result.table("One damage each: what came of reading", rows, {"reads": "reads", **OUTCOMES})
    silent: dict[str, list[dict[str, Any]]] = {}
    for title, cases in found.items():
        of = {kind: [one for one in cases if one["kind"] == kind] for kind in DAMAGES}
        silent[title] = [
            {kind: sum(_counts(ones, BAD).values()) for kind, ones in of.items() if ones}
        ]
    title = "Reads of each damage that were wrong, or lacked records without a word, or did not end"
    result.table(title, silent, {kind: kind for kind in DAMAGES})
    result.raw("examples", {title: _examples(cases) for title, cases in found.items()})
    for title, cases in found.items():
        if not BY_TITLE[title].rival:
            bad_ones = sum(_counts(cases, BAD).values())
            result.target(
                f"{title}: wrong, missing without a word, hang, memory", bad_ones, 0, unit=""
            )
            unnamed = _counts(cases)["unnamed"]
            result.target(f"{title}: errors that do not name the file", unnamed, 0, unit="")


def _examples(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the first read of each kind and outcome, without the places of this machine."""
    examples: dict[str, dict[str, Any]] = {}
    for one in found:
        key = f"{one['kind']}: {one['outcome']}"
        if key in examples:
            examples[key]["count"] += 1
            continue
        lines = [
            line.rpartition("/")[2] for line in one.get("error", "").splitlines() if line.strip()
        ]
        examples[key] = {
            **{name: one.get(name) for name in ("names", "ended", "right", "wrong")},
            "count": 1, "error": lines[:1],
        }  # fmt: skip
    return examples


def page_text(found: dict[str, Any]) -> str:
    """Return what docs/reliability.md has of the stored result: what ran, and a table."""
    outcomes, silent = found["tables"]
    names = dict.fromkeys(store.package for store in STORES)
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in names)
    what = f"`{found['command']}`, {found['time'][:10]}:\n{versions}."
    lines = [
        "| stored by | reads | " + " | ".join(OUTCOMES.values()) + " | the last four, by damage |"
    ]
    lines.append("|---|" + "---:|" * (len(OUTCOMES) + 1) + "---|")
    for row, kinds in zip(outcomes["rows"], silent["rows"], strict=True):
        counts = [f"{row[key]['median']:.0f}" for key in ("reads", *OUTCOMES)]
        bad = [
            f"{kind} {kinds[kind]['median']:.0f}"
            for kind in silent["columns"]
            if kinds[kind] and kinds[kind]["median"]
        ]
        lines.append(f"| {row['name']} | " + " | ".join(counts) + f" | {', '.join(bad) or '-'} |")
    return "\n".join((what, "", *lines))


def _version(store: Store) -> str:
    import subprocess
    import sys

    code = f"import importlib.metadata as m; print(m.version({store.package!r}))"
    code = code.replace("'shardio'", "'shardio-torch'")
    python = _python(store) if store.rival else sys.executable
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    return done.stdout.strip()
