"""The process of one entry: prepares, then runs a round for each line on stdin.

python -m benchmarks.entry_process MODULE:FUNCTION JSON-OPTIONS  (harness.EntryProcess starts it)
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys


def main() -> None:
    # Answers go to the real stdout; what a rival prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, _, name = sys.argv[1].partition(":")
    prepare = getattr(importlib.import_module(f"benchmarks.{module}"), name)
    options = json.loads(sys.argv[2])
    if members := options.pop("members", None):  # a control group: this process, and its own
        with open(members, "w") as file:
            file.write("0")
    one_round = prepare(**options)
    for line in sys.stdin:
        asked = json.loads(line)
        gc.collect()
        found = {} if asked.get("ready") else one_round(**asked)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":  # and not when a spawned worker imports it
    main()
