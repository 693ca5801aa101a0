"""What a command shows: its result on stdout, as text or JSON; its progress on stderr."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import math
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from .exit_codes import DONE

_TELL_S = 5.0
# What tqdm writes: while nothing is counted, and then.
_STAGE = "{desc} ..."
_COUNTING = (
    "{desc}: {percentage:3.0f}%|{bar}| {n_fmt} of {total_fmt}{unit}, {rate_fmt}, {remaining} left"
)
STYLES = {"bad": "31", "good": "32", "hint": "2"}  # red, green, dim: as the terminal has them


@dataclasses.dataclass(frozen=True)
class Output:
    """How much a command shows: all, nothing but errors, or one JSON object."""

    json: bool
    quiet: bool

    def show(self, result: object, facts: Any = None, brief: str = "") -> int:
        """Print a result, or with --quiet what is `brief`. Return the exit code 0.

        facts: what JSON shows of it; default: its fields.
        """
        if self.json:
            print(as_json(result if facts is None else facts))
        elif not self.quiet:
            print(result)
        elif brief:
            print(brief)
        return DONE

    def announce(self, line: str) -> None:
        """Print a line to stderr, before the work begins."""
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    @property
    def is_watched(self) -> bool:
        """Return True if a person sees what is told while the work runs."""
        return not self.quiet and not self.json and sys.stderr.isatty()

    def teller(self) -> Callable[[str], None]:
        """Return a function that prints a line to stderr, every few seconds at most.

        Processes that are forked later share it.
        """
        last = memoryview(mmap.mmap(-1, 8)).cast("d")

        def tell(line: str) -> None:
            if time.monotonic() - last[0] > _TELL_S:
                last[0] = time.monotonic()
                with contextlib.suppress(OSError, ValueError):
                    print(f"\r{line}\x1b[K", file=sys.stderr, flush=True)  # over a bar

        return tell

    @contextlib.contextmanager
    def progress(
        self, *stages: str, unit: str = "B", delay_s: float = 0
    ) -> Iterator[Callable[[int, int], None] | None]:
        """Show a bar on stderr, when a person looks at it and it takes longer than `delay_s`.

        stages  what is done while it counts; or that, and in its place what is done before and
                after: "listing", "packing", "committing"
        unit    of what is counted: "B", or a word with a blank before it, such as " records"
        """
        if not self.is_watched:
            yield None
            return
        from tqdm import tqdm

        before, main, after = stages if len(stages) == 3 else stages * 3
        tqdm.monitor_interval = 0  # else it starts a thread, and we fork
        with tqdm(
            desc=before,
            bar_format=_STAGE,
            unit=unit,
            unit_scale=unit == "B",  # by 1,000, as in the MB/s of summaries
            leave=False,
            delay=delay_s,
            dynamic_ncols=True,
        ) as bar:

            def show(done: int, total: int) -> None:
                if bar.total != total:
                    bar.total, bar.desc, bar.bar_format = total, main, _COUNTING
                    if not delay_s:
                        bar.reset()  # the rate begins now, and it is shown now
                bar.update(done - bar.n)
                if done == total and after != main:
                    bar.desc, bar.bar_format = after, _STAGE
                    bar.refresh()

            yield show

    def took(self, what: str, count: int, noun: str, size: int, began: float) -> None:
        """Tell a person who looks how long something took that began at this monotonic time."""
        if self.is_watched:
            seconds = max(time.monotonic() - began, 1e-3)
            each = f"{count / seconds:,.0f} {noun}s/s"
            rate = f"{size / seconds / 1e6:,.0f} MB/s"
            self.announce(paint(f"{what} in {seconds:,.1f} s, {each}, {rate}", "hint", sys.stderr))


def paint(text: str, style: str, stream: TextIO) -> str:
    """Return a text in a style, one of STYLES, if a person looks at the stream and wants colours.

    That is, on a terminal that has them, and without NO_COLOR (https://no-color.org).
    """
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if plain or not text or not stream.isatty():
        return text
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def facts_of(done: Any) -> dict[str, Any]:
    """Return the fields of a result for JSON, with what was left out as objects."""
    left_out = [{"key": key, "reason": why} for key, why in done.rejected]
    return {**vars(done), "rejected": left_out}


def as_json(value: Any) -> str:
    """Return a value as JSON, with dataclasses as objects, and bytes as {"base64": ...}.

    What is no number (NaN, infinities) is null, since JSON has no name for it.
    """
    return json.dumps(_plain(value), allow_nan=False)


def as_base64(value: bytes) -> str:
    """Return bytes as text."""
    return base64.b64encode(value).decode("ascii")


def _plain(value: Any) -> Any:
    """Return what JSON can hold of a value, also of what is in arrays: complex numbers, times."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, bytes):
        return {"base64": as_base64(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)
