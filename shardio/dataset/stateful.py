"""Check saved states, and read those of a StatefulDataLoader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import StateError, printable
from ..order.epoch import ORDER_VERSION

# Members of a saved state, and what they are; those of an iterator's state follow.
STATE = ("epoch", "units")
ITERATOR = ("rows", "worker", "workers", "done")
_STATEFUL = "_steps_since_snapshot"  # members that mark states of StatefulDataLoader: of workers,
_ALONE = "_num_yielded"  # and of none


def check_state(state: Mapping[str, Any], counts: Sequence[str]) -> None:
    """Raise StateError when this is no state, or these members of it are no counts."""
    if isinstance(state, Mapping) and (_STATEFUL in state or _ALONE in state):
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


def state_of_workers(stateful: Mapping[str, Any]) -> dict[str, Any]:
    """Make one state of a whole dataset from those of a StatefulDataLoader's workers.

    Raises StateError when they do not belong together, or name no place that others can go on from.
    """
    if isinstance(stateful, Mapping) and _ALONE in stateful:
        states, taken = [_iterator_state(stateful)], None
    elif isinstance(stateful, Mapping) and _STATEFUL in stateful:
        try:
            snapshot = stateful["_snapshot"]
            workers = snapshot["_worker_snapshots"].values()
            taken = snapshot["_snapshot_step"] + stateful[_STATEFUL]
        except (KeyError, TypeError, AttributeError):
            raise StateError(
                "state_from: the state of the StatefulDataLoader was edited or cut"
            ) from None
        states = sorted(map(_iterator_state, workers), key=lambda one: one["worker"])
    else:
        raise StateError("state_from: expected what StatefulDataLoader.state_dict() gave")
    first = states[0]
    done = [one["done"] for one in states]
    if len(states) != first["workers"] or any(
        {**one, "worker": 0, "done": 0} != {**first, "worker": 0, "done": 0} for one in states
    ):
        raise StateError("state_from: the states of its workers do not belong together")
    if "batch_size" in first:
        taken = sum(done) if taken is None else taken
    else:
        if taken is not None and stateful[_STATEFUL]:
            raise StateError(
                "state_from: without batch_size the samples since the loader's last snapshot "
                "are not known; use snapshot_every_n_steps=1, or give batch_size to the dataset"
            )
        taken = sum(done)  # samples: the loader's batches say nothing of the places
        whole, more = divmod(taken, len(done))
        if done != [whole + (worker < more) for worker in range(len(done))]:
            raise StateError(
                "state_from: without batch_size the samples taken so far are no part of the "
                "epoch that another number of workers could go on from: give batch_size to "
                "the dataset"
            )
    state = {name: value for name, value in first.items() if name not in ITERATOR}
    state.pop("batch_size", None)
    state["units"] = first["units"] + taken * first["rows"] // first.get("unit", 1)
    return state


def _iterator_state(worker: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return our iterator's state within a worker's, as StatefulDataLoader keeps it."""
    try:
        state = worker["fetcher_state"]["dataset_iter_state"]
    except (KeyError, TypeError):
        state = None
    if not isinstance(state, Mapping):
        raise StateError("state_from: this StatefulDataLoader does not read a dataset of shardio")
    check_state(state, STATE + ITERATOR)
    return state
