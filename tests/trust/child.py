"""A section in a process of its own: what it attacks may kill that process, or make it wait.

    python -m trust.child SECTION SEED FOLDER

Reads "go SECONDS COUNT FIRST STEP" from stdin, and answers by lines of JSON: what was done since
the last one, and at the end where it stopped. The number of the case in work stands in FOLDER/at.
"""

import gc
import json
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from trust.section import Section
from trust.sections import section as section_of

SAID_S = 0.5  # between two lines


def main(name: str, seed: str, folder: str) -> None:
    answers = os.dup(1)
    log = os.open(os.path.join(folder, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    at = os.open(os.path.join(folder, "at"), os.O_RDWR | os.O_CREAT, 0o600)
    warnings.filterwarnings("ignore")
    section = section_of(name)(Path(folder), int(seed))

    def say(**what: Any) -> None:
        os.write(answers, json.dumps(what).encode() + b"\n")

    try:
        section.prepare()
        gc.collect()
        gc.freeze()  # what was imported is not gone through again, by forks neither
        say(ready=True, goal=section.goal)
        for line in sys.stdin:
            seconds, *numbers = line.split()[1:]
            _go(section, at, say, float(seconds), *map(int, numbers))
    finally:
        section.close()


def _go(
    section: Section, at: int, say: Any, seconds: float, count: int, first: int, step: int
) -> None:
    until, said, number = time.monotonic() + seconds, 0.0, first
    kinds: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    for number in range(first, first + count * step, step):
        if time.monotonic() > until:
            break
        os.pwrite(at, b"%20d" % number, 0)
        try:
            kinds[section.case(number)] += 1
        except Exception as error:
            kinds["failed"] += 1
            text = "".join(traceback.format_exception(error))
            failures.append({"case": number, "error": f"{error!r}"[:2000], "text": text[-8000:]})
        if failures or time.monotonic() > said + SAID_S:
            say(kinds=kinds, failures=failures, sums=section.sums)
            said, kinds, failures = time.monotonic(), Counter(), []
            section.sums.clear()
    else:
        number = first + count * step
    say(kinds=kinds, failures=failures, sums=section.sums, stopped=number, most=section.most())
    section.sums.clear()


if __name__ == "__main__":
    main(*sys.argv[1:])
