"""A packed dataset as an IterableDataset of torch: the same order, whoever reads it.

    loader = DataLoader(ShardDataset("packed", batch_size=256), batch_size=None, num_workers=8)

How it works. With `batch_size` the dataset yields whole batches; without, samples. What every
stream has (epoch, ranks, resuming) is in `stream`. A consumer's share of an epoch is read
by RecordReader: fetch gives the records of its batches, and Decoder makes items of them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from .. import native
from ..errors import OptionError, printable
from ..formats.manifest import Manifest
from ..order.epoch import Tail
from ..order.mixture import Length
from ..order.options import STATE_OPTIONS, Options, Order, RequestedOptions
from ..order.partition import Partition, RowRanges
from ..order.subset import select_places
from ..storage.options import Storage
from ..storage.stores import without_secrets
from ..units import check_group, refuse_options, show_count
from .assemble import VALID
from .batch_decode import Pixels, advise_boxes, advise_core, choose_batch_reader
from .batch_join import EncodedBatches, encoded_images
from .buffering import BUFFER_BYTES, reads_batches_in_core
from .collate import planes
from .decode import LABEL, Decode, Decoder, record_name
from .fetch import Fetch
from .mixture import Mixture
from .other_names import OTHER_NAMES
from .ranks import Consumers
from .reader import ManifestInfo, open_reader
from .record_reader import RecordReader
from .sequence import choose_where
from .skipping import Skip, choose_skips
from .stream import OrderInfo, Stream
from .versions import check_identity, named_version, version_of_state

_EACH = "give it to each dataset of the mixture"
_WEIGHTS = "give weights=, rows of each dataset in proportion, and length="
_OTHERS_OF_MIX = {
    **dict.fromkeys(
        ("batch_size", "seed", "tail", "rank", "world_size"), _EACH + ", the same one to all"
    ),
    **dict.fromkeys(
        ("transform", "where", "shuffle", "shuffle_buffer", "order", "fields", "decode", "map"),
        _EACH,
    ),
    **dict.fromkeys(
        ("proportion", "choose", "repeat", "batching_method", "sampling_method", "epoch_size"),
        _WEIGHTS,
    ),
    "streams": "give the datasets as the first argument, ShardDataset.mix([one, other], weights=)",
}


class ShuffleInfo(OrderInfo):
    """Give the options of the order of one dataset, too."""

    @property
    def shuffle_buffer(self) -> int | None:
        """Return the records of the window, 1 without a shuffle; None: all of them."""
        return self.options.shuffle_buffer

    @property
    def shuffle(self) -> bool:
        """Return True if it shuffles; False: every pass comes in the order of the index."""
        return self.options.shuffle

    @property
    def order(self) -> Order:
        """Return how an epoch is cut: no field is None."""
        options = self.options
        return Order(spans=options.spans, unit=options.unit, nodes=options.nodes)


class ShardDataset(ManifestInfo, ShuffleInfo, Stream):
    """Stream a packed dataset, in an order that only (seed, epoch) and the options below decide.

    path               the packed directory, or its URL
    split              "train": the dataset of this name, where `path` holds several
    version            a version of the dataset, by its id or its tag, as `shardio log` lists them,
                       or by the sum of its manifest ("sha256:..."); default: the newest
    batch_size         rows of a batch, for `DataLoader(ds, batch_size=None)`. None: the dataset
                       yields samples, and DataLoader makes batches; each record still comes once an
                       epoch, but the order of batches then depends on the number of workers
    fields             samples are tuples of these, in this order; None: dicts of all, and `__key__`
    decode             "pil": the first image field as a PIL image, RGB, upright; other image fields
                       as stored: palettes as indices, 16 bits as 16. "numpy": the same as arrays,
                       the first (H, W, 3) uint8. "cuda": the device decodes the first, and crops
                       it by the built-in transform (EncodedCrops); others as stored. None: the
                       bytes of the files. A function of these bytes. Or a mapping of fields to one
                       of these, to "gray" or to "stored"
    transform          a function of the image. A built-in one (RandomResizedCrop, CenterCrop) takes
                       the bytes, draws from (seed, epoch, record), and may crop several `fields`;
                       any other takes the decoded image
    target_transform   a function of the label
    map                a function of the whole sample, a tuple or a dict, after these; its result is
                       collated. If it takes two arguments, the second is a numpy Generator for this
                       sample in this epoch, the same in any worker
    collate_fn         a function of a list of samples that returns a batch; default:
                       `shardio.collate`
    shuffle            False: the order of the index, the same in each epoch, for validation and
                       prediction; default True
    shuffle_buffer     records in the shuffle window of the whole job, or bytes ("512MiB"), or "all"
                       for a true permutation. Default: "all" for up to 256 MiB or up to 20,000
                       records; otherwise 10,000
    seed               in [0, 2**64); default 0
    tail               "pad" (default): ranks repeat a few records, so that all have the same number
                       of steps. "drop": leave some out instead. "exact": as pad, and each sample
                       gets a bool `valid` (last in a tuple, a key of a dict), False on repeats
    rank, world_size   default: those of torch.distributed, or the launcher's RANK and WORLD_SIZE
    where              select records by conditions on the index, by field: a value, several values,
                       or a function of the column: {"label": ["cat", "dog"]}; also by `__key__`
    order              a shardio.Order: the number of spans of an epoch, the size of units, and the
                       number of machines that keep to shards of their own
    on_error           "raise"; "skip": a record that is damaged, or cannot be decoded, or for which
                       a function of yours raises, is listed in `skipped`, and its row is filled by
                       the record that follows in its shard; up to 1 % of a rank's records in a
                       pass. Or a shardio.Skip, which says how many, and names a file for the list
    storage            a shardio.Storage: where the data lies, memory for records on network file
                       systems, and how far the stored bytes are trusted

    When a state is loaded, options of the order that were not given (shuffle, shuffle_buffer, seed,
    tail, order) are taken from it. The pass after a complete pass reads the next epoch. With
    several ranks, call `set_epoch(e)` before each `iter()`.

    Raises NotPackedError, DamageError, VersionError, OptionError; StateError when a state does not
    fit; while iterating also StorageError, DecodeError, CollateError, EpochError, SkipError.
    """

    @refuse_options("ShardDataset", OTHER_NAMES)
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split: str | None = None,
        version: str | None = None,
        batch_size: int | None = None,
        fields: Sequence[str] | None = None,
        decode: Decode = "pil",
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        map: Callable[..., Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool | None = None,
        shuffle_buffer: int | str | None = None,
        seed: int | None = None,
        tail: Tail | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        where: Mapping[str, Any] | None = None,
        order: Order | None = None,
        on_error: str | Skip = "raise",
        storage: Storage | None = None,
    ) -> None:
        cut = check_group("order", order, Order)
        stored = check_group("storage", storage, Storage)
        skips = choose_skips(on_error)
        self.skips = () if skips is None else (skips,)
        self.reader = open_reader(path, split, stored, version, tolerant=skips is not None)
        self._decoder = Decoder(
            self.manifest.schema,
            fields=fields,
            decode=decode,
            transform=transform,
            target_transform=target_transform,
            map=map,
            max_pixels=stored.max_pixels,
            planes=planes,
        )
        self.draws, self.image_column = self._decoder.draws, self._decoder.image_column
        self.encoded_fields = self._decoder.encoded
        self.device_crop = self._decoder.device_crop
        if tail == "exact" and fields is None and VALID in self.manifest.schema.names:
            raise OptionError(
                f"tail='exact' adds the field {VALID!r}, which this dataset has already; choose "
                "the fields you need by `fields=`"
            )
        if (rank is None) != (world_size is None):
            raise OptionError(f"rank is {rank} and world_size {world_size}: give both, or neither")
        self.reader.want(self._decoder.fields)
        self._whole = _batch_reader(self.manifest, self._decoder)
        buffer = stored.buffer_bytes
        self.buffer_bytes = BUFFER_BYTES if buffer is None else int(buffer)
        self._requested = RequestedOptions(
            batch_size, shuffle_buffer, seed, tail, cut.spans, cut.unit, shuffle, cut.nodes
        )
        self._where = where
        # The records that `where` and `select` chose, or that remain of dropped ones; None: all.
        self.selection = self._chosen = choose_where(self.reader, self._decoder, where)
        counts = self.reader.counts if self.selection is None else self.selection.counts
        super().__init__(
            self._resolved(int(counts.sum())),
            counts,
            collate_fn=collate_fn,
            ranks=None if rank is None or world_size is None else (rank, world_size),
        )
        advise_boxes(self.manifest, self._decoder.fields, transform)
        if self.device_crop is None:
            advise_core(self.reader, None if batch_size is None else self._whole, transform)
        own = LABEL in (fields or self.manifest.schema.names) and not (target_transform or map)
        self.label_names = self.manifest.classes if own else None  # of labels as they are stored

    @staticmethod
    @refuse_options("ShardDataset.mix", _OTHERS_OF_MIX)
    def mix(
        datasets: Sequence[ShardDataset],
        weights: Sequence[float] | None = None,
        *,
        length: Length = "first",
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Mixture:
        """Make one stream of several datasets; each batch holds rows of all, in proportion.

        datasets    with the same batch_size, tail, seed, ranks and structure of samples; all
                    other options (transform, where, shuffle_buffer ...) are each one's own
        weights     rows of each, in proportion; default: by their numbers of records
        length      rows of an epoch: a number; or until the "first" dataset has come once, or the
                    "last"

        Each dataset is read pass after pass, every record once a pass; what an epoch leaves of a
        pass comes in the next. Epochs, ranks, tails and resuming are as for one dataset; `tail`
        repeats, or leaves out, rows of the mixture. Raises OptionError.
        """
        return Mixture(datasets, weights, length=length, collate_fn=collate_fn)

    def select(self, indices: Iterable[int]) -> ShardDataset:
        """Return the records at these indices, or of a mask, (len,) bool, as another dataset.

        Indices count this dataset's records as they were packed, after `where`; each may come
        once. Raises OptionError.
        """
        twin = copy.copy(self)
        twin.selection = select_places(indices, self.reader.starts, self.selection)
        twin.counts = twin.selection.counts
        if self.options == self._resolved(self.records):  # and not those of a loaded state
            twin.options = self._resolved(twin.records)
        twin._start_anew()
        return twin

    def _resolved(self, records: int) -> Options:
        """Return the options of a new run over so many records."""
        return self._requested.resolve(self.reader.mean_bytes, records=records)

    @property
    def path(self) -> str:
        """Return where the dataset lies, as messages name it."""
        return self.reader.index.url

    def __repr__(self) -> str:
        size = "" if self.batch_size is None else f", batch_size={self.batch_size}"
        chosen = f"{self.records:,} of " if self.is_subset else ""
        return (
            f"ShardDataset({printable(without_secrets(self.path))!r}{size}: {chosen}"
            f"{show_count(self.manifest.records, 'record')} in "
            f"{show_count(self.manifest.shards, 'shard')}, "
            f"fields {', '.join(self.manifest.schema.names)})"
        )

    def _facts(self) -> Iterator[tuple[str, str]]:
        """Iterate over what a notebook shows: the manifest's facts, and the order's."""
        yield from super()._facts()
        if self.is_subset:
            yield "chosen", show_count(self.records, "record")
        if self.batch_size is not None:
            yield "batch_size", f"{self.batch_size:,}"
        yield "order", ", ".join(f"{name}={value}" for name, value in self.options.state().items())

    @property
    def name(self) -> str:
        """Return the name of the dataset in messages."""
        return f"ShardDataset({printable(without_secrets(self.path))!r})"

    @property
    def batched_reads(self) -> bool:
        """Return True if the core reads many records at a time: to hold them gains nothing."""
        return reads_batches_in_core(self.manifest) or (
            self._whole is not None and native.records() is not None
        )

    def read_share(
        self,
        share: Partition | RowRanges,
        consumers: Consumers,
        options: Options,
        *,
        hands_out: bool | None = None,
    ) -> RecordReader:
        """Read a consumer's share, which holds all that is needed of the options.

        hands_out: as of the mixture that hands the items out; None: this dataset does.
        """
        hands_out = self.hands_out if hands_out is None else hands_out
        fetch = partial(
            Fetch,
            self.reader,
            share,
            selection=self.selection,
            buffer_bytes=self.buffer_bytes,
            local_consumers=consumers.here,
            machines=consumers.machines,
            batched_reads=self.batched_reads,
        )
        skips = self.skips[0] if self.skips else None
        own = self._decoder, self._whole, self.record_name
        return RecordReader(fetch, *own, hands_out, skips)

    def record_name(self, number: int) -> str:
        """Return the name of a record in messages, by its number."""
        return record_name(number, self.reader.key_of(number))

    @property
    def item_fields(self) -> tuple[str, ...] | None:
        """Return the names of the fields of items that are tuples, where they are known.

        Without the one that tail="exact" adds.
        """
        return None if self._decoder.maps else self._decoder.fields

    @property
    def structure(self) -> Any:
        """Return what all datasets of a mixture must have alike; `Any` where a map makes items."""
        return Any if self._decoder.maps else self._decoder.fields

    def __getstate__(self) -> dict[str, Any]:
        # A condition may be a function that cannot be pickled; what it chose can.
        return super().__getstate__() | {"_where": None, "_chosen": None}

    @property
    def evaluates(self) -> bool:
        """Return True if every pass reads the same epoch: also without a shuffle."""
        return super().evaluates or not self.shuffle

    def _identity(self) -> dict[str, Any]:
        return {**self.source_identity(), **self.options.state()}

    @property
    def is_subset(self) -> bool:
        """Return True if `where` or `select` chose some of the records."""
        return self.selection is not self.reader.remaining

    def source_identity(self) -> dict[str, Any]:
        """Tell which records are read: the dataset, its version, and the selection of them."""
        chosen = self.selection.digest if self.selection and self.is_subset else None
        return {"dataset": named_version(self.manifest), "selection": chosen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of `state_dict` or `state_from`, as `Stream.load_state_dict` does.

        A state of another version: that one is read from then on. Raises StateError.
        """
        if (found := version_of_state(state, self.reader)) is not None:
            if self.selection is not self._chosen:  # but by `select`, or in another process
                raise found.refusal()
            self.reader = self.reader.of_version(found.manifest_with(self._decoder.fields))
            self._whole = _batch_reader(self.manifest, self._decoder)
            self.selection = self._chosen = choose_where(self.reader, self._decoder, self._where)
            self.counts = self.reader.counts if self.selection is None else self.selection.counts
            self._start_anew()
            found.warn()
        super().load_state_dict(state)

    def options_after(self, state: Mapping[str, Any]) -> Options:
        """Return the options to go on with after this state. Raises StateError."""
        check_identity(state, self.source_identity(), self.path)
        saved = {name: state.get(name) for name in STATE_OPTIONS}
        return self._requested.resolve(self.reader.mean_bytes, saved, records=self.records)


def _batch_reader(manifest: Manifest, decoder: Decoder) -> Pixels | EncodedBatches | None:
    """Find what makes batches as a whole; None: nothing does."""
    return choose_batch_reader(manifest, decoder) or encoded_images(manifest, decoder)
