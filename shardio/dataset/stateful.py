"""Check saved states, and read those of a StatefulDataLoader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import StateError, printable
from ..order.arithmetic import ORDER_VERSION

# Members of a saved state, and what they are; those of an iterator's state follow.
STATE = ("epoch", "units")
ITERATOR = ("rows", "worker", "workers", "done")
STATEFUL = "_steps_since_snapshot"  # members that mark states of StatefulDataLoader: of workers,
ALONE = "_num_yielded"  # and of none


def check_state(state: Mapping[str, Any], counts: Sequence[str]) -> None:
    """Raises StateError when this is no state, or these members of it are no counts."""
    if isinstance(state, Mapping) and (STATEFUL in state or ALONE in state):
        raise StateError(
            "this is the state of a StatefulDataLoader: load it into that loader, or "
            "dataset.state_from(state) into the dataset"
        )
    if not isinstance(state, Mapping) or "order" not in state:
        raise StateError(
            f"a {type(state).__name__} that dataset.state_dict() did not make; of a checkpoint, "
            "give that entry alone"
        )
    if state["order"] != ORDER_VERSION:
        raise StateError(
            f"the state was saved with order version {printable(repr(state['order']))}; this "
            f"shardio makes version {ORDER_VERSION}, and would go on in another order: resume with "
            "the shardio that saved it, or start the epoch anew"
        )
    for name in counts:
        value = state.get(name)
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise StateError(
                f"the state's {name} is {printable(repr(value))}: it was edited or cut"
            )


def iterator_state(worker: Mapping[str, Any]) -> Mapping[str, Any]:
    """Our iterator's state within a worker's, as StatefulDataLoader keeps it."""
    try:
        state = worker["fetcher_state"]["dataset_iter_state"]
    except (KeyError, TypeError):
        state = None
    if not isinstance(state, Mapping):
        raise StateError("state_from: this StatefulDataLoader does not read a dataset of shardio")
    check_state(state, STATE + ITERATOR)
    return state
