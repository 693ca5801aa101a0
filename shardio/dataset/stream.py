"""Give torch a dataset with an order that no worker or rank changes, and that can be resumed.

    loader = DataLoader(dataset, batch_size=None, num_workers=8)
    ...
    state = dataset.state_dict(steps=t)     # after t batches of this loop; JSON, under 1 KB
    dataset.load_state_dict(state)          # in another run, with any number of workers or ranks

How it works. A stream knows its options and the records of its shards, which is all that decides
the order. Each worker of each rank asks its Partition which batches are its own. Epoch, and place
within it, live in an EpochState, which the trainer and all workers share. An iterator keeps the
epoch it was made for.

A place is one number: the units that all ranks together have consumed. It belongs to its epoch;
`set_epoch` of another one starts that one from its beginning. In the trainer only the loop knows
how many batches it took, since workers have run ahead; StatefulDataLoader instead asks each
worker's iterator, which answers with its start, and how many batches it has made since.
"""

from __future__ import annotations

import copy
import os
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NoReturn

from torch.utils.data import IterableDataset, get_worker_info

from ..errors import OptionError, StateError
from ..order.epoch import ORDER_VERSION, Tail
from ..order.options import Options
from ..order.partition import Partition
from ..order.rng import Int64s, key
from ..stack import users_level
from ..units import check_int
from .collate import collate, ragged_fields
from .decode import check_function
from .epoch_state import EpochState, Ticket, starting_iterator
from .iteration import STREAMS, Iteration, MakeBatches, new_ticket, steps_of
from .protocol import ShareReader
from .ranks import Consumers, resolve_ranks
from .skipping import SkippedInfo
from .stateful import STATE, check_state, state_of_workers


def _nothing() -> None:
    return None


class OrderInfo:
    """Give the options of an order, under the names by which they are given."""

    options: Options

    @property
    def batch_size(self) -> int | None:
        """Return the rows of a batch; None: samples are handed out one by one."""
        return self.options.batch_size

    @property
    def tail(self) -> Tail:
        """Return the treatment of the rows that fill no batch on every rank."""
        return self.options.tail

    @property
    def seed(self) -> int:
        """Return the seed of the order."""
        return self.options.seed


class Stream(OrderInfo, SkippedInfo, IterableDataset[Any]):
    """Be the base of ShardDataset and of mixtures: epoch, ranks, resuming, iteration."""

    def __init__(
        self,
        options: Options,
        counts: Int64s,
        *,
        collate_fn: Callable[[list[Any]], Any] | None,
        ranks: tuple[int, int] | None,
    ) -> None:
        check_function("collate_fn", collate_fn)
        self.options = options
        self.counts = counts  # (shards,) int64: the records of each that this stream reads
        self.collate_fn = collate if collate_fn is None else collate_fn
        ragged_fields(self.collate_fn)  # raises for a wrong `ragged`
        self.given_ranks = ranks
        self._captured: tuple[int, int] | None = None  # the ranks, for spawned workers
        self._captured_for = 0  # the process that was given them; those it forks ask anew
        self._iterating: Callable[[], Iteration | None] = _nothing  # the last one of this process
        self.ticket: Ticket | None = None  # of the worker that this process is, or is to start
        self._start_anew()

    def _start_anew(self) -> None:
        """Begin a place of its own. Raises now the errors that iterating would raise later."""
        self._epochs, self._iterating = EpochState(self.fingerprint()), _nothing
        STREAMS.add(self)
        steps_of(self.share_of(0))

    # --- what subclasses say ---

    @abstractmethod
    def read_share(
        self, share: Partition, consumers: Consumers, options: Options, /
    ) -> ShareReader:
        """Read a consumer's share, of a pass with these options."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Tell what is read, and by which options: a saved state must have the same."""

    @abstractmethod
    def options_after(self, state: Mapping[str, Any]) -> Options:
        """Return the options to go on with after this state. Raises StateError."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name of the dataset in messages."""

    draws = False  # whether a record's item is known to be another in each epoch
    # The field of an item that a built-in transform makes, and its shape.
    image_column: tuple[int | str, tuple[int, ...]] | None = None
    encoded_fields: Collection[int | str] = frozenset()  # of items, that are bytes of image files
    # Of decode="cuda": (H, W), interpolation.
    device_crop: tuple[tuple[int, int], str] | None = None

    @property
    @abstractmethod
    def item_fields(self) -> tuple[str, ...] | None:
        """Return the names of the fields of items that are tuples, where they are known."""

    @property
    def hands_out(self) -> bool:
        """Return True if items go to foreign code: DataLoader's, or a user's collate_fn."""
        return self.batch_size is None or ragged_fields(self.collate_fn) is None

    # --- what users call ---

    @property
    def records(self) -> int:
        """Return the number of records of an epoch."""
        return int(self.counts.sum())

    @property
    def epoch(self) -> int:
        """Return the epoch that is read, or was last; before the first pass, the one to be read."""
        return self.epochs.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` reads; reaches workers that are running.

        From its beginning; only the epoch of a loaded state goes on where that was saved. From
        then on epochs follow only by further calls. Without any call, the pass after a complete
        one reads the next epoch. Raises OptionError.
        """
        epoch = check_int("epoch", epoch, 0, (1 << 63) - 1)
        self.ranks()  # what is wrong with them is told here on every rank, and none waits for ever
        epochs = self.epochs
        if epochs.loaded and epoch < epochs.epoch:
            warnings.warn(
                f"set_epoch({epoch}) drops the state that was loaded, of epoch {epochs.epoch}: "
                "begin your loop there, range(dataset.epoch, epochs)",
                stacklevel=users_level(),
            )
        epochs.set_epoch(epoch)

    def __len__(self) -> int:
        """Count this rank's batches in a full epoch; without `batch_size`, its samples."""
        return steps_of(self.share_of(0))

    def __getitem__(self, index: Any) -> NoReturn:
        raise OptionError(
            "this dataset is a stream: iterate over it; shardio.open(PATH)[i] gives a record"
        )

    @property
    def remaining(self) -> int:
        """Count as len does, but from where the next `iter()` starts: less after a resume."""
        epoch, start, _ = self.epochs.next_place(fixed=self.evaluates)
        return self.share_of(epoch, start=start).steps

    def state_dict(self, steps: int | None = None) -> dict[str, Any]:
        """Tell where this epoch stands after `steps` batches of the loop that reads it.

        steps: batches since that loop's `iter()`, as enumerate(loader, 1) counts them; after a
        resume the count is anew. May be left out before anything is read, where the dataset is
        iterated in this process (num_workers=0), and by StatefulDataLoader.

        The state is plain JSON and under 1 KB, and the same on every rank. Raises OptionError.
        """
        if get_worker_info() is not None:
            return {}  # StatefulDataLoader asks; the iterator holds all there is to know
        epochs = self.epochs
        if epochs.fingerprint != self.fingerprint():
            raise StateError(
                "another copy of this dataset, with other options, is being read; ask that one"
            )
        if steps is None:
            items = self._iterating()
            if items is None and not epochs.unread:
                raise OptionError(
                    "state_dict: nothing is being iterated in this process; give the batches that "
                    "your loop has taken since iter(), state_dict(steps=t): workers run ahead"
                )
            return self.state_of(items)
        if self.batch_size is None:
            raise OptionError(
                "state_dict(steps=...) needs batches that do not depend on the workers: give "
                "batch_size to the dataset, and batch_size=None to the DataLoader"
            )
        if epochs.resumed_in_workers:
            raise StateError(
                "state_dict(steps=...): a StatefulDataLoader went on in this epoch from its own "
                "state, which only its workers know; save dataset.state_from(loader.state_dict())"
            )
        share = self.share_of(epochs.epoch, start=epochs.start)
        steps = check_int("steps (since iter() began)", steps, 0, share.steps)
        units = epochs.start + steps * share.batch_units * share.world_size
        return self.state_at(epochs.epoch, units)

    def state_of(self, items: Iteration | None) -> dict[str, Any]:
        """Tell where an iteration in this process stands; None: where the next one begins."""
        epochs = self.epochs
        if items is None or items.generation != epochs.generation:  # it is of another place
            return self.state_at(epochs.epoch, epochs.start)
        return self.state_at(items.epoch, items.start + items.done * items.units_per_step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of `state_dict` or `state_from`, also with other workers and ranks.

        Call it before the loader's `iter()`, on every rank. Options that were not given are taken
        from the state. The global batches go on unchanged when batch_size x ranks is as before;
        otherwise every record still comes once. Raises StateError.
        """
        if not state and get_worker_info() is not None:
            return  # what `state_dict` says there
        check_state(state, STATE)
        if "done" in state:
            raise StateError(
                "this is the state of one worker's iterator; make one of the whole by "
                "dataset.state_from(state of the StatefulDataLoader)"
            )
        before = self.options
        try:
            self.options = self.options_after(state)
            share = self.share_of(state["epoch"], start=state["units"])
        except OptionError as error:
            self.options = before
            raise StateError(f"the state does not fit: {error}") from None
        self.epochs.load(state["epoch"], share.start, self.fingerprint())

    def state_from(self, stateful: Mapping[str, Any]) -> dict[str, Any]:
        """Make a state for `load_state_dict` of that of a StatefulDataLoader over this dataset.

        That loader goes on only with the same number of workers; this state with any number, of
        ranks too. Raises StateError.
        """
        return state_of_workers(stateful)

    # --- torch and pickle ---

    def __iter__(self) -> Iterator[Any]:
        items = Iteration(self)
        if get_worker_info() is None:
            self._iterating = weakref.ref(items)
        return items

    def iterate(self, make_batches: MakeBatches) -> Iteration:
        """Iterate as `iter()` does, for a loader that gets this rank's batches from elsewhere."""
        items = Iteration(self, make_batches)
        self._iterating = weakref.ref(items)
        return items

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker has neither the launcher's process group nor a say in the ranks, nor in
        # the epoch of its first pass. What is pickled for anybody else has an epoch of its own.
        iterator = starting_iterator()
        return self.__dict__ | {
            "_captured": self.ranks(),
            "_iterating": _nothing,
            "_epochs": self.epochs if iterator is not None else self.epochs.sent(),
            "ticket": new_ticket(self, iterator),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _captured_for=os.getpid())
        STREAMS.add(self)

    def __copy__(self) -> Stream:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        STREAMS.add(twin)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Stream:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        shared = ("_epochs", "reader", "_iterating")
        for name, value in self.__dict__.items():
            twin.__dict__[name] = value if name in shared else copy.deepcopy(value, memo)
        STREAMS.add(twin)
        return twin

    # --- inside ---

    @property
    def epochs(self) -> EpochState:
        """Return the state that this process shares with the workers of its DataLoaders."""
        epochs = self._epochs
        if epochs.owner != os.getpid() and get_worker_info() is None:
            self._epochs = epochs = epochs.detached()
            self.adopt_skips()
        return epochs

    def ranks(self) -> tuple[int, int]:
        """Return rank and world size. Raises OptionError when they contradict the launcher."""
        if self._captured is not None and self._captured_for == os.getpid() and get_worker_info():
            return self._captured
        return resolve_ranks(self.given_ranks)

    def share_of(
        self, epoch: int, worker: int = 0, num_workers: int = 1, start: int = 0, done: int = 0
    ) -> Partition:
        """Return a worker's share of an epoch, on this rank. Raises OptionError.

        start: units that all ranks consumed before; done: batches of this worker since then.
        """
        rank, world_size = self.ranks()
        return self.options.partition(
            self.options.epoch(self.counts, epoch),
            rank=rank,
            world_size=world_size,
            worker=worker,
            num_workers=num_workers,
            start=start,
            done=done,
        )

    def state_at(self, epoch: int, units: int) -> dict[str, Any]:
        """Make the saved state of a place in an epoch: plain JSON."""
        return {"order": ORDER_VERSION, **self._identity(), "epoch": epoch, "units": units}

    def fingerprint(self) -> int:
        """Return a number that tells one order from another, for workers and their trainer."""
        return key(*repr(self._identity()).encode()) >> 1

    @property
    def evaluates(self) -> bool:
        """Return True if every pass reads the same epoch, until `set_epoch`, as in validation."""
        return self.tail == "exact"
