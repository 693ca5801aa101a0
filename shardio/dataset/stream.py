"""What every dataset of this package is to torch: an order that depends on nobody, and can go on.

    loader = DataLoader(dataset, batch_size=None, num_workers=8)
    ...
    state = dataset.state_dict(steps=t)     # after t batches of this loop; JSON, under 1 KB
    dataset.load_state_dict(state)          # in another run, with any number of workers or ranks

How it works. A stream knows its options and the records of its shards, which is all that decides
the order. Each worker of each rank asks order.Share which batches are its own. Epoch, and place
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
import sys
import threading
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.data import IterableDataset, get_worker_info

from .. import units as sizes
from ..errors import EpochError, OptionError, StateError, as_error, name_record, printable
from ..order.arithmetic import ORDER_VERSION, Int64s, Share, Tail, key
from ..order.options import Options
from ..stack import frames, users_level
from .collate import Empty, Names, collate, empty, into, own
from .decode import Work, check_function
from .epoch_state import (
    Decision,
    EpochState,
    Loading,
    Ticket,
    Verdict,
    loading,
    loading_iterator,
    new_number,
    number_of,
    starting_iterator,
    ticket,
)

VALID = "valid"  # the field that tail="exact" adds

Source = Callable[[Share], Iterator[Any]]

_END = object()

# Classes that split what a dataset yields among the ranks, and the modules they are of. Older
# releases of transformers had one of their own.
_SPLITTERS = frozenset({"DataLoaderDispatcher", "IterableDatasetShard"})
_SPLITTING = frozenset({"accelerate.data_loader", "transformers.trainer_pt_utils"})

# Members of a saved state, and what they are; those of an iterator's state follow.
_STATE = ("epoch", "units")
_ITERATOR = ("rows", "worker", "workers", "done")
_STATEFUL = "_steps_since_snapshot"  # members that mark states of StatefulDataLoader: of workers,
_ALONE = "_num_yielded"  # and of none


class Consumers(NamedTuple):
    """Who reads an epoch together."""

    here: int  # consumers on this machine, this one included
    machines: int


class Items(NamedTuple):
    """What the items of one batch are made of. Without a batch_size: of some samples in a row."""

    rows: Iterable[Any]  # in order; for one thread at a time
    make: Callable[[Any, Work], Any]  # of a row its item; by any thread
    valid: int  # items before this one are the epoch's own; those from it on repeat some
    size: int
    whole: Callable[[Empty], Any] | None = None  # the collated batch at once, or None: not this one
    records: Callable[[], Sequence[str]] | None = None  # what messages call them, once all are read


class Stream(IterableDataset[Any]):
    """Base of ShardDataset and of mixtures: epoch, ranks, resuming, iteration."""

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
        own(self.collate_fn)  # raises for a wrong `ragged`
        self._given_ranks = ranks
        self._captured: tuple[int, int] | None = None  # the ranks, for spawned workers
        self._captured_for = 0  # the process that was given them; those it forks ask anew
        self._iterating: Callable[[], Iteration | None] = _nothing  # the last one of this process
        self._ticket: Ticket | None = None  # of the worker that this process is, or is to start
        self._start_anew()

    def _start_anew(self) -> None:
        """A place of its own, at the beginning. Raises now what iterating would raise later."""
        self._epochs = EpochState(self._print())
        _STREAMS.add(self)
        self._steps(self._share(0))

    # --- what subclasses say ---

    @abstractmethod
    def _read(self, share: Share, consumers: Consumers) -> Iterator[Items]:
        """A consumer's share, in order; the `rows` of each are used up before the next."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """What a saved state must have been saved of, and the options that decide the order."""

    @abstractmethod
    def _adopted(self, state: Mapping[str, Any]) -> Options:
        """The options to go on with after this state. Raises StateError."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What messages call it."""

    @property
    def draws(self) -> bool:
        """Whether a record's item is another in each epoch, as far as that is known."""
        return False

    @property
    def image_place(self) -> int | str | None:
        """The field of an item that a built-in transform makes, if one does."""
        return None

    @property
    def item_fields(self) -> tuple[str, ...] | None:
        """The names of the fields of items that are tuples, where they are known."""
        return None

    @property
    def hands_out(self) -> bool:
        """Whether items go to code that is not ours: DataLoader's, or a collate_fn of users."""
        return self.batch_size is None or own(self.collate_fn) is None

    def names_of(self, batch: Items) -> Names:
        """What messages call the items of a batch, and their fields."""
        return Names(batch.records, self.item_fields)

    # --- what users call ---

    @property
    def batch_size(self) -> int | None:
        return self.options.batch_size

    @property
    def tail(self) -> Tail:
        return self.options.tail

    @property
    def seed(self) -> int:
        return self.options.seed

    @property
    def records(self) -> int:
        """Records of an epoch."""
        return int(self.counts.sum())

    @property
    def epoch(self) -> int:
        """The epoch that is read, or was read last; before the first pass, the one to be read."""
        return self.epochs.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` reads; reaches workers that are running.

        From its beginning; only the epoch of a loaded state goes on where that was saved. From
        then on epochs follow only by further calls. Without any call, the pass after a complete
        one reads the next epoch. Raises OptionError.
        """
        epoch = sizes.whole("epoch", epoch, 0, (1 << 63) - 1)
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
        """This rank's batches in a full epoch; without `batch_size`, its samples."""
        return self._steps(self._share(0))

    def __getitem__(self, index: Any) -> NoReturn:
        raise OptionError(
            "this dataset is a stream: iterate over it; shardio.open(PATH)[i] gives a record"
        )

    @property
    def remaining(self) -> int:
        """As len, but from where the next `iter()` starts: less after a resume."""
        epoch, start, _ = self.epochs.next_place(fixed=self.evaluates)
        return self._share(epoch, start=start).steps

    def state_dict(self, steps: int | None = None) -> dict[str, Any]:
        """Where this epoch stands after `steps` batches of the loop that reads it, on every rank.

        steps: batches since that loop's `iter()`, as enumerate(loader, 1) counts them; after a
        resume the count is anew. May be left out where the dataset is iterated in this process
        (num_workers=0), and by StatefulDataLoader.

        The state is plain JSON and under 1 KB, and the same on every rank. Raises OptionError.
        """
        if get_worker_info() is not None:
            return {}  # StatefulDataLoader asks; the iterator holds all there is to know
        epochs = self.epochs
        if epochs.order != self._print():
            raise StateError(
                "another copy of this dataset, with other options, is being read; ask that one"
            )
        if steps is None:
            items = self._iterating()
            if items is None:
                raise OptionError(
                    "state_dict: nothing is being iterated in this process; give the batches that "
                    "your loop has taken, state_dict(steps=t): workers have run ahead of it"
                )
            return self.state_of(items)
        if self.batch_size is None:
            raise OptionError(
                "state_dict(steps=...) needs batches that do not depend on the workers: give "
                "batch_size to the dataset, and batch_size=None to the DataLoader"
            )
        if epochs.elsewhere:
            raise StateError(
                "state_dict(steps=...): a StatefulDataLoader went on in this epoch from its own "
                "state, which only its workers know; save dataset.state_from(loader.state_dict())"
            )
        share = self._share(epochs.epoch, start=epochs.start)
        steps = sizes.whole("steps (since iter() began)", steps, 0, share.steps)
        units = epochs.start + steps * share.batch_units * share.world_size
        return self._state(epochs.epoch, units)

    def state_of(self, items: Iteration | None) -> dict[str, Any]:
        """Where an iteration in this process stands; None: where the next one begins."""
        epochs = self.epochs
        if items is None or items.moves != epochs.moves:  # it is of another place
            return self._state(epochs.epoch, epochs.start)
        return self._state(items.epoch, items.start + items.done * items.stride)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of `state_dict` or `state_from`, also with other workers and ranks.

        Call it before the loader's `iter()`, on every rank. Options that were not given are taken
        from the state. The global batches go on unchanged when batch_size x ranks is as before;
        otherwise every record still comes once. Raises StateError.
        """
        if not state and get_worker_info() is not None:
            return  # what `state_dict` says there
        _check(state, _STATE)
        if "done" in state:
            raise StateError(
                "this is the state of one worker's iterator; make one of the whole by "
                "dataset.state_from(state of the StatefulDataLoader)"
            )
        before = self.options
        try:
            self.options = self._adopted(state)
            share = self._share(state["epoch"], start=state["units"])
        except OptionError as error:
            self.options = before
            raise StateError(f"the state does not fit: {error}") from None
        self.epochs.load(state["epoch"], share.start, self._print())

    def state_from(self, stateful: Mapping[str, Any]) -> dict[str, Any]:
        """A state for `load_state_dict`, of the state of a StatefulDataLoader over this dataset.

        That loader goes on only with the same number of workers; this state with any number, of
        ranks too. Raises StateError.
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
        state = {name: value for name, value in first.items() if name not in _ITERATOR}
        state.pop("batch_size", None)
        state["units"] = first["units"] + taken * first["rows"] // first.get("unit", 1)
        return state

    # --- torch and pickle ---

    def __iter__(self) -> Iterator[Any]:
        items = Iteration(self)
        if get_worker_info() is None:
            self._iterating = weakref.ref(items)
        return items

    def iterate(self, source: Source) -> Iteration:
        """As `iter()`, for a loader that gets the batches of this rank from elsewhere."""
        items = Iteration(self, source)
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
            "_ticket": self._new_ticket(iterator),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _captured_for=os.getpid())
        _STREAMS.add(self)

    def __copy__(self) -> Stream:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        _STREAMS.add(twin)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Stream:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        shared = ("_epochs", "_reader", "_iterating")
        for name, value in self.__dict__.items():
            twin.__dict__[name] = value if name in shared else copy.deepcopy(value, memo)
        _STREAMS.add(twin)
        return twin

    # --- inside ---

    @property
    def epochs(self) -> EpochState:
        """The state that this process shares with the workers of its DataLoaders."""
        epochs = self._epochs
        if epochs.owner != os.getpid() and get_worker_info() is None:
            self._epochs = epochs = epochs.detached()
        return epochs

    def _new_ticket(self, iterator: Any) -> Ticket | None:
        """Make the ticket of a worker that a DataLoader's iterator starts in this process."""
        if iterator is None or get_worker_info() is not None:
            return self._ticket
        found = loading(iterator, self)
        begins = found.direct and not _batches_of_batches(self, found)
        try:
            self.ranks()
        except OptionError:  # the worker will say so
            begins = False
        workers = int(iterator._num_workers)
        consumers = partial(self._busy, workers, found) if begins else None
        return ticket(iterator, found, self.epochs, fixed=self.evaluates, consumers=consumers)

    def _busy(self, workers: int, found: Loading | None, decision: Decision) -> int:
        """How many of these workers have batches in a pass: the first ones.

        The others may not have started yet when the pass is read to its end.
        """
        try:
            steps = self._share(decision.epoch, start=decision.start).steps
        except OptionError:  # the workers will say so
            return workers
        left_out = 0 if found is None else (found.drops - 1) * workers
        return min(max(0, steps - left_out), workers)

    def ranks(self) -> tuple[int, int]:
        """Rank and world size. Raises OptionError when what was given contradicts what is."""
        if self._captured is not None and self._captured_for == os.getpid() and get_worker_info():
            return self._captured
        given = self._given_ranks
        found, where = _found_ranks()
        if given is not None and found is not None and given != found:
            raise OptionError(
                f"rank {given[0]} of {given[1]} was given, but {where} says rank "
                f"{found[0]} of {found[1]}; leave both out to follow it"
            )
        ranks = given or found or (0, 1)
        _refuse_second_split(*ranks)
        return ranks

    def _share(
        self, epoch: int, worker: int = 0, num_workers: int = 1, start: int = 0, done: int = 0
    ) -> Share:
        rank, world_size = self.ranks()
        return self.options.share(
            self.options.epoch(self.counts, epoch),
            rank=rank,
            world_size=world_size,
            worker=worker,
            num_workers=num_workers,
            start=start,
            done=done,
        )

    def _warning(self, decision: Decision) -> tuple[Verdict, str] | None:
        """Return what to warn of, when this pass begins; or raise EpochError."""
        epoch, verdict = decision.epoch, decision.verdict
        rank, world_size = self.ranks()
        if verdict == "left":
            return verdict, (
                f"{self.name}: the pass over epoch {epoch} was left before its end, and begins "
                "again: the same order, and the same random crops. For another epoch call "
                "dataset.set_epoch(epoch) before iter()"
            )
        if verdict == "spent":
            if self._share(epoch, start=decision.start).steps:
                raise EpochError(
                    f"epoch {epoch} was resumed in its middle and has been read to its end; call "
                    "set_epoch with the next one before iter(): another pass would be of its rest"
                )
            # No error: Lightning makes this iterator before it sets the next epoch.
            return "repeated", (
                f"{self.name}: epoch {epoch} was resumed at its end, and this pass gives nothing "
                "once more: call dataset.set_epoch(epoch) with the next one before iter()"
            )
        if verdict == "repeated":
            return verdict, (
                f"{self.name}: epoch {epoch} is being read again, in the same order: after a first "
                "set_epoch call dataset.set_epoch(epoch) before each iter()"
            )
        if verdict == "next" and world_size > 1:
            return verdict, (
                f"{self.name}: rank {rank} of {world_size} goes on with epoch {epoch}, since its "
                "last pass was complete; nobody called set_epoch. A rank that reads a pass more "
                "than the others would leave them: call dataset.set_epoch(epoch) before each "
                "iter(), on every rank"
            )
        return None

    def _steps(self, share: Share) -> int:
        if share.steps == 0 and share.tail == "drop" and share.epoch.records and not share.start:
            size = share.batch_size or 1
            raise OptionError(
                f"tail='drop' leaves nothing: {share.epoch.records:,} records are fewer than "
                f"{size} x {share.world_size} (batch_size x world_size). Choose tail='pad', or a "
                "smaller batch_size"
            )
        return share.steps

    def _state(self, epoch: int, units: int) -> dict[str, Any]:
        return {"order": ORDER_VERSION, **self._identity(), "epoch": epoch, "units": units}

    def _print(self) -> int:
        """A number that tells one order from another: workers compare it with the trainer's."""
        return key(*repr(self._identity()).encode()) >> 1

    @property
    def evaluates(self) -> bool:
        """Whether every pass reads the same epoch, until `set_epoch`: as validation wants it."""
        return self.tail == "exact"


class Iteration:
    """One epoch's items of one worker. An object, since a generator would read the epoch late.

    source  gives the batches of this rank; default: they are made here
    """

    def __init__(self, stream: Stream, source: Source | None = None) -> None:
        self._stream = stream
        self._source = source
        self._epochs = stream.epochs
        info = get_worker_info()
        self._here = info is None
        self._worker, self._workers = (0, 1) if info is None else (info.id, info.num_workers)
        self._work = Work()
        self._leads = self._worker == 0  # the worker that no other outlives
        self._error: Exception | None = None
        self._warning: tuple[Verdict, str] | None = None
        self._is_new = True  # nothing was asked of it
        self.stride = 0  # it has not begun
        try:
            self._pass()
        except Exception as error:
            if info is None:
                raise
            self._error = error  # a persistent worker of torch dies of an error here, and says none

    def _pass(self) -> None:
        """Begin a pass: find out which epoch it reads."""
        stream, epochs = self._stream, self._epochs
        stream.ranks()  # raises what makes it no pass at all
        decision, found = self._decided()
        self.number, self.moves = decision.number, decision.moves
        if epochs.order != stream._print():
            raise StateError(
                "load_state_dict changed the options of this dataset after the workers of the "
                "DataLoader had started; make a new DataLoader after it"
            )
        if epochs.moves != self.moves:
            raise EpochError(
                f"the epoch was set to {epochs.epoch} while the workers of a pass were "
                "starting; call set_epoch before iter(), and make a new iterator after it"
            )
        if found is not None and _batches_of_batches(stream, found):
            raise OptionError(_BATCHES.format(size=stream.batch_size, again=found.batch_size))
        self._drops = 1 if found is None else found.drops
        if self._leads and not stream.evaluates:
            self._warning = stream._warning(decision)
        self._begin(decision.epoch, decision.start, 0)

    def _decided(self) -> tuple[Decision, Loading | None]:
        """Return what this pass reads, and the DataLoader that it is for, if there is one.

        Every worker of the pass gets the same answer: see epoch_state.
        """
        stream, epochs = self._stream, self._epochs
        fixed, info = stream.evaluates, get_worker_info()
        if info is None:
            iterator = loading_iterator()
            found = None if iterator is None else loading(iterator, stream)
            decision = epochs.decide(new_number(), fixed=fixed)
            if found is None or not _batches_of_batches(stream, found):
                epochs.begin(decision, 1)
            return decision, found
        own = stream._ticket
        if own is None:  # started by a loader that is not torch's
            decision = epochs.decide(new_number(), fixed=fixed)
            if self._leads:
                epochs.begin(decision, stream._busy(info.num_workers, None, decision))
            return decision, None
        first, own.decision = own.decision, None
        number = number_of(own)
        own.passes += 1
        if first is not None:
            if self._leads and not _batches_of_batches(stream, own.loading):
                epochs.begin(first, stream._busy(info.num_workers, own.loading, first))
            return first, own.loading
        if not self._leads:
            return epochs.published(number), own.loading
        decision = epochs.decide(number, fixed=fixed)
        epochs.publish(decision)  # whatever comes next, the others are not to wait for ever
        epochs.begin(decision, stream._busy(info.num_workers, own.loading, decision))
        return decision, own.loading

    def _begin(self, epoch: int, start: int, done: int) -> None:
        stream = self._stream
        self.epoch = epoch
        self.start = start  # units consumed before
        self.done = done  # batches of this worker since then
        share = stream._share(epoch, self._worker, self._workers, start, done)
        stream._steps(share)
        self.stride = share.batch_units * share.world_size  # units of a global batch
        if self._source is not None:
            self._items = self._source(share)
        else:
            reads = stream._read(share, consumers(share.world_size, self._workers))
            self._items = _make(stream, reads, self._work)
        left = len(share.worker_steps)
        self._last = done + left - left % self._drops  # batches when the last one is handed out
        if self.done == self._last:
            self._epochs.ended(self.number, self._worker)

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error  # and not StopIteration: the epoch did not end here
        if self._is_new and self._here and self._epochs.moves != self.moves:
            self._pass()  # Lightning makes the iterator first, and sets its epoch then
        self._is_new = False
        if self._warning is not None:
            self._warn(*self._warning)
        try:
            item = next(self._items, _END)
        except Exception as error:
            self._error = error
            raise
        except BaseException as error:
            told = error if self._source is not None else self._as_error(error)
            if isinstance(told, Exception):
                self._error = told
                raise told from error
            # Ctrl-C: what was being made is lost.
            self._error = EpochError(
                f"this pass was ended by {type(error).__name__}; make a new iterator"
            )
            raise
        epochs = self._epochs
        if item is _END:
            if self._leads:
                epochs.asked(self.number)
            raise StopIteration
        if epochs.moves != self.moves:
            moved = epochs.epoch != self.epoch
            what = f"the epoch was set to {epochs.epoch}" if moved else "a state was loaded"
            raise EpochError(
                f"{what} while epoch {self.epoch} was being read; call set_epoch before iter(), "
                "as load_state_dict, and make a new iterator after it"
            )
        self.done += 1
        if self.done == self._last:
            epochs.ended(self.number, self._worker)
        return item

    @property
    def batch_stats(self) -> Any:
        """Return how the batch handed out last was made, for shardio.watch; None: not known."""
        return getattr(self._items, "batch_stats", None)

    @property
    def blocked_s(self) -> float:
        """Of the last next(), seconds in which a device was waited for that is steps behind."""
        return float(getattr(self._items, "blocked_s", 0.0))

    def state_dict(self) -> dict[str, Any]:
        """For StatefulDataLoader: where this worker's iterator stands. Absolute, so that it says
        the same however often the run was resumed."""
        if not self.stride:
            return {}  # what kept it from beginning comes with the first item
        stream = self._stream
        world_size = stream.ranks()[1]
        size = {} if stream.batch_size is None else {"batch_size": stream.batch_size}
        return (
            stream._state(self.epoch, self.start)
            | size
            | {
                "rows": (stream.batch_size or 1) * world_size,
                "worker": self._worker,
                "workers": self._workers,
                "done": self.done,
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` said of the same worker. Raises StateError."""
        if not self.stride:
            return
        _check(state, _STATE + _ITERATOR)
        epochs = self._epochs
        here = self.state_dict()
        advice = "load dataset.state_from(state) into the dataset, and make a new loader"
        if (state["worker"], state["workers"]) != (self._worker, self._workers):
            raise StateError(
                f"the state is that of worker {state['worker']} of {state['workers']}, but this is "
                f"worker {self._worker} of {self._workers}; {advice}"
            )
        for name in here:
            if name not in ("epoch", "units", "done", "batch_size") and here[name] != state.get(
                name
            ):
                raise StateError(
                    f"{name} is {printable(repr(here[name]))}, but the state was saved with "
                    f"{printable(repr(state.get(name)))}; {advice}"
                )
        self._warning = None  # this pass is not the one that was begun
        stream, wanted = self._stream, epochs.wanted
        if wanted not in (-1, state["epoch"]):
            share = stream._share(
                state["epoch"], self._worker, self._workers, state["units"], state["done"]
            )
            if share.worker_steps:
                raise StateError(
                    f"the state is of the middle of epoch {state['epoch']}, but "
                    f"set_epoch({wanted}) was called; to go on with it call "
                    f"set_epoch({state['epoch']})"
                )
            # That epoch is over, and another one is to begin.
            start = epochs.start if epochs.chosen else 0
            if get_worker_info() is None:  # the number of before may be that of a complete pass
                self.number = new_number()
            epochs.moved_on(self.number, wanted, start)
            self._begin(wanted, start, 0)
            if share.steps % self._workers:  # and the loop had not met that end: the loader now
                self._error = StateError(  # takes the next worker's batch first
                    f"the state is of the last batch of epoch {state['epoch']}, and "
                    f"set_epoch({wanted}) was called; iterate once after "
                    f"set_epoch({state['epoch']}), which ends that epoch, and then set {wanted}"
                )
            return
        epochs.resumed(state["epoch"], elsewhere=get_worker_info() is not None)
        self._begin(state["epoch"], state["units"], state["done"])

    def _as_error(self, error: BaseException) -> BaseException:
        """Return what is no Exception as one that names the record."""
        where = self._work.record
        if not self._here:
            where = f"{where}, in worker {self._worker}" if where else ""
        return as_error(error, where, interrupts=self._here)

    def _warn(self, verdict: Verdict, message: str) -> None:
        """Give the warning of this pass, once for all passes and workers of the dataset."""
        self._warning = None
        if self._epochs.first_time(verdict):
            warnings.warn(message, stacklevel=users_level())


def _nothing() -> None:
    return None


_STREAMS: weakref.WeakSet[Stream] = weakref.WeakSet()


class _Starting(threading.local):
    """Of each thread, since several may start workers at once: the tickets of the next one."""

    tickets: Sequence[tuple[Stream, Ticket | None]] = ()


_starting = _Starting()


# A forked worker is to know what was decided when its loader started it, not when it got to run.
def _make_tickets() -> None:
    iterator = starting_iterator()
    if iterator is not None:
        _starting.tickets = [(stream, stream._new_ticket(iterator)) for stream in list(_STREAMS)]


def _take_tickets() -> None:
    for stream, one in _starting.tickets:
        stream._ticket = one
    _drop_tickets()


def _drop_tickets() -> None:
    _starting.tickets = ()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_make_tickets, after_in_child=_take_tickets, after_in_parent=_drop_tickets
    )


def _make(stream: Stream, batches: Iterator[Items], work: Work) -> Iterator[Any]:
    """Items to what the iterator gives. No method: it would keep the iterator that drops it."""
    collate_fn = stream.collate_fn
    ragged = own(collate_fn)
    ours = ragged is not None
    for batch in batches:
        if batch.whole is not None and ragged == ():  # what is made at once has no lists
            whole = batch.whole(empty)
            if whole is not None:
                yield mark_all(whole, batch.valid, batch.size) if stream.tail == "exact" else whole
                continue
        items: Iterator[Any] = _items(batch, work)
        if stream.tail == "exact":
            items = map(mark, items, (i < batch.valid for i in range(batch.size)))
        if stream.batch_size is None:
            yield from items
            continue
        made = list(items)
        work.number = -1
        yield collated(collate_fn, made, batch, stream.names_of(batch) if ours else None)


def _items(batch: Items, work: Work) -> Iterator[Any]:
    """The items of a batch. What making one raises names the record that it was of."""
    # A StopIteration of a transform leaves a generator as a RuntimeError, and not, as of map, as if
    # there were no more rows.
    make = batch.make
    for row in batch.rows:
        try:
            item = make(row, work)
        except Exception as error:
            name_record(error, work.record)
            raise
        work.number = -1
        yield item


def collated(
    collate_fn: Callable[[list[Any]], Any],
    items: list[Any],
    batch: Items,
    names: Names | None,
    memory: Any = None,
) -> Any:
    """The batch that a collate_fn makes of these items. What it raises names their records.

    names: given for a collate_fn of ours.
    """
    try:
        with into(memory, names):
            return collate_fn(items)
    except Exception as error:
        if names is None and batch.records is not None:
            records = batch.records()
            name_record(error, f"a batch of {len(records)}: {records[0]}, to {records[-1]}")
        raise


def mark(item: Any, valid: bool) -> Any:
    """The item with the field that tail="exact" adds."""
    if isinstance(item, tuple):
        return (*item, valid)
    if not isinstance(item, dict) or VALID in item:
        what = "has a field of that name already" if isinstance(item, dict) else "is neither"
        raise OptionError(
            f"tail='exact' adds {VALID!r} to tuples and dicts, and this {type(item).__name__}, as "
            f"map or the dataset gives it, {what}: give a map that returns such without it"
        )
    if type(item) is dict:
        return {**item, VALID: valid}  # a map may keep its own
    item = copy.copy(item)
    item[VALID] = valid
    return item


def mark_all(batch: Any, valid: int, size: int) -> Any:
    """As `mark`, of a collated batch: rows before row `valid` are."""
    return mark(batch, torch.arange(size) < valid)  # type: ignore[arg-type]


def _check(state: Mapping[str, Any], counts: Sequence[str]) -> None:
    """Raises StateError when this is no state, or these members of it are no counts."""
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


def _iterator_state(worker: Mapping[str, Any]) -> Mapping[str, Any]:
    """Our iterator's state within a worker's, as StatefulDataLoader keeps it."""
    try:
        state = worker["fetcher_state"]["dataset_iter_state"]
    except (KeyError, TypeError):
        state = None
    if not isinstance(state, Mapping):
        raise StateError("state_from: this StatefulDataLoader does not read a dataset of shardio")
    _check(state, _STATE + _ITERATOR)
    return state


def _found_ranks() -> tuple[tuple[int, int] | None, str]:
    """What runs this process says of its rank and world size, and who that is."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return (distributed.get_rank(), distributed.get_world_size()), "torch.distributed"
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world_size is None:
        return None, ""
    where = "the launcher (RANK, WORLD_SIZE)"
    try:
        return (int(rank), int(world_size)), where
    except ValueError:
        raise OptionError(f"{where} says rank {rank!r} of {world_size!r}: not numbers") from None


_BATCHES = (
    "the dataset makes batches of {size} itself, and the DataLoader's batch_size={again} makes "
    "batches of {again} such batches, of shape ({again}, {size}, ...). Either give batch_size=None "
    "to the DataLoader: DataLoader(dataset, batch_size=None, num_workers=...); or leave batch_size "
    "out of the dataset, and the DataLoader makes batches of its samples"
)


def _batches_of_batches(stream: Stream, loader: Loading) -> bool:
    """Say whether a DataLoader would batch the batches of this dataset once more."""
    if not loader.direct or stream.batch_size is None or loader.batch_size is None:
        return False
    return loader.batch_size > 1 or not loader.own_collate


def _refuse_second_split(rank: int, world_size: int) -> None:
    """Raises OptionError when Accelerate gives each rank only a part of what that rank yields.

    To prepare a loader asks the dataset nothing. But what wraps it is on the stack whenever the
    dataset is used: here, in a forked worker (its stack goes on from its parent's), and in what
    pickles it for a spawned one. Rejected: gc.get_referrers, which walks all objects; Accelerate's
    GradientState, which holds the loaders that are iterated, but not in spawned workers.
    """
    if world_size == 1 or not any(name in sys.modules for name in _SPLITTING):
        return
    for frame in frames():
        if frame.f_globals.get("__name__") in _SPLITTING:
            owner = frame.f_locals.get("self")
            parts = getattr(getattr(owner, "state", owner), "num_processes", 2)
            if type(owner).__name__ in _SPLITTERS and parts > 1:
                raise OptionError(
                    f"{type(owner).__name__} of Accelerate splits what this dataset yields among "
                    f"{parts} processes, but it is split already (this is rank {rank} of "
                    f"{world_size}): records would be lost. Leave the DataLoader out of "
                    "accelerator.prepare(); with a Trainer of transformers, override "
                    "get_train_dataloader and get_eval_dataloader (docs/order.md shows both)"
                )


def consumers(world_size: int, num_workers: int) -> Consumers:
    """Who reads an epoch, when each rank has so many workers."""
    machines, here = machines_of(world_size)
    return Consumers(here * num_workers, machines)


def machines_of(world_size: int) -> tuple[int, int]:
    """Machines of the job, and ranks on this one; one machine where the launcher does not say."""
    try:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError:
        here = world_size
    here = min(max(1, here), world_size)
    return -(-world_size // here), here
