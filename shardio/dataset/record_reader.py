"""Read a consumer's share of one dataset: its records, and the items that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

from ..errors import DamageError
from ..formats.sample import give_text_key
from ..names import KEY
from ..order import rng
from .batch_decode import Pixels
from .batch_join import EncodedBatches
from .decode import Decoder, ThisRecord
from .encoded import Empty
from .fetch import Fetch, Rows
from .protocol import ShareReader
from .reader import Row, read
from .skipping import SkippingPass, Skips


class RecordReader(ShareReader):
    """Read one consumer's share of a dataset.

    fetch        begins to fetch the records
    decoder      makes items of them
    whole        makes batches as a whole, where it can; None: nothing does
    record_name  gives the name of a record in messages, by its number
    hands_out    whether items go to foreign code
    skips        notes records that cannot be read, whose rows others fill; None: they raise
    """

    def __init__(
        self,
        fetch: Callable[[], Fetch],
        decoder: Decoder,
        whole: Pixels | EncodedBatches | None,
        record_name: Callable[[int], str],
        hands_out: bool,
        skips: Skips | None = None,
    ) -> None:
        self._begin, self._decoder, self._whole = fetch, decoder, whole
        self.record_name = record_name
        self._hands_out, self._skips = hands_out, skips
        self._skipping: SkippingPass | None = None

    def __iter__(self) -> Iterator[Rows]:
        """Begin to read, and iterate over the rows of each batch."""
        self._fetch = fetch = self._begin()
        epoch = fetch.partition.epoch
        self._seed, self._epoch = epoch.seed, epoch.epoch
        self._make_batch = None if self._whole is None else self._whole.begin(fetch)
        if self._skips is None:
            return iter(fetch)
        self._skipping = SkippingPass(self._skips, epoch.epoch, fetch.rank_rows, fetch.following)
        return self._skipping.of(fetch)

    def rows(self, batch: Rows) -> Iterator[Row]:
        """Iterate over the rows of a batch, in order."""
        return self._fetch.rows(batch)

    def make(self, row: Row, work: ThisRecord, skipping: bool = True) -> Any:
        """Make the item of a row. Any thread may call it. skipping: another's, if it cannot."""
        if skipping and self._skipping is not None:
            return self._skipping.make(partial(self.make, skipping=False), row, work)
        sample, decoder = read(row), self._decoder
        number = work.number = row[0]
        work.key = sample[KEY]
        work.read = work.decoded = perf_counter()
        if work.note is not None:
            work.note(number, work.read, work.key)
        if decoder.plain:
            return give_text_key(sample)
        if decoder.pick is not None:
            return decoder.pick(sample)
        draw = rng.draw(self._seed, self._epoch, number) if decoder.wants_draw else 0
        return decoder(sample, number, draw, work, self._hands_out)

    def whole(self, batch: Rows, empty: Empty) -> Any:
        """Make a batch as collating its items would; None: it cannot be made so."""
        if self._make_batch is None:
            return None
        try:
            return self._make_batch(batch, empty)
        except DamageError:
            if self._skips is None:
                raise
            return None  # one by one

    def names(self, batch: Rows) -> list[str]:
        """Return the names of a batch's records in messages."""
        return [*map(self.record_name, batch.numbers.tolist())]
