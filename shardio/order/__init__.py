"""Decide which record comes when, and who reads it. It is arithmetic only: no bytes are read.

How it works. The epoch's shards are permuted by (seed, epoch); their records, end to end, are one
virtual sequence of N. It is cut into C contiguous spans of whole units of u records. Each span
hands out its records through a bounded window (its part of the shuffle buffer), by a sequence of
draws. The flat order of the epoch takes units from the spans in turn, as cards are dealt: unit g is
the (g div C)-th unit of span g mod C. A batch is m units in a row, and a step is a batch of each
rank; the workers of a rank take its steps in turn. So the flat order knows nothing of ranks,
workers or resumption: they only decide who makes which batch.

    rng        random words that are a pure function of (key, place)
    shuffle    the window through which one span hands out its records
    nodes      the shards of each node, where nodes keep to shards of their own
    epoch      the spans and units of an epoch, and the record at each place of its order
    partition  the batches that each worker of each rank makes
    mixture    which of several datasets each row of a mixture is of
    options    the options that decide the order: requested, saved, or default
    subset     some of a dataset's records, by the columns of its index or by number
"""
