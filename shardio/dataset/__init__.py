"""Read packed datasets: records are fetched, decoded and collated to batches.

Its files:

    shard_dataset  ShardDataset: what users construct
    stream         its base: epochs, ranks, states, torch; also of mixtures
    mixture        several datasets as one
    other_names    options of other datasets and loaders: what to write instead
    protocol       what loaders and mixtures ask of a dataset
    epoch_state    which epoch is read, shared by the processes of a DataLoader
    iteration      one pass in one process
    stateful       saved states
    ranks          who reads an epoch together
    reader         open shards
    record_reader  one consumer's share: its rows, their items, its batches
    skipping       records that cannot be read: what fills their rows, and who lists them
    fetch          the rows of each batch, and what is read ahead of them
    buffering      where bytes wait: page cache or process
    window         the windows of the spans, as they move on
    decode         a sample to what the user asked for
    batch_decode   small images straight into a batch
    batch_join     image files straight into a batch
    assemble       rows to items in the columns of a batch, items to batches
    collate        items to one batch
    encoded        the image files of a batch, in one buffer
    encoded_crops  those that the device decodes and crops
    sequence       shardio.open: a dataset as a sequence, without torch
    versions       which version a saved state is of
    whereabouts    where makers of batches are, for the message when one hangs
"""
