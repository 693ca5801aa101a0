"""Decides which record comes when: arithmetic on (seed, epoch, rank, worker).

How it works. No bytes are read. The epoch's shards are permuted by (seed, epoch); their records,
end to end, are one virtual sequence of N. It is cut into C contiguous spans of whole units of u
records. Each span hands out its records through a bounded window (its part of the shuffle buffer),
by a sequence of draws. The flat order of the epoch takes units from the spans in turn, as cards are
dealt: unit g is the (g div C)-th unit of span g mod C. A batch is m units in a row; ranks and
workers take batches in turn. So the flat order knows nothing of ranks, workers or resumption: they
only decide who makes which batch.
"""
