"""The command line, with a packing that builds so many shards and then waits, until it is ended.

    python -m support.held_packing COUNT pack SRC OUT ...

So a test that interrupts or kills it knows where it is.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

from shardio.cli.main import main
from shardio.packing import build_shard


def held(count: int) -> Callable[..., Any]:
    """Return what builds the first shards, and waits instead of building others."""
    build = build_shard.build_or_keep

    def build_or_wait(work: Any, number: int, add: Callable[[int], None]) -> Any:
        while number >= count:
            add(0)  # looks whether to stop, as what builds does
            time.sleep(0.01)
        return build(work, number, add)

    return build_or_wait


if __name__ == "__main__":
    build_shard.build_or_keep = held(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
