"""Feed training: batches are built ahead by processes and threads, and copied to the device.

Its files:

    shard_loader       ShardLoader: asks the workers for batches, and hands them out in order
    base               the protocol of a pool of workers, and the passes that it is given
    in_process         num_workers=0: threads of the trainer's process
    worker_pool        the processes, each of which builds every P-th batch
    worker_connection  the trainer's end of one process
    worker_process     the process: its passes, and what it sends
    batch_builder      rows to batches, by threads; here a batch's figures are taken
    buffer_pool        the shared memory of batches
    transport          how a batch crosses from process to process
    resident           data that fits in memory, decoded once
    stats              the figures of a batch and of a loader; tuning/meter sums them up
    device             prefetch: batches to a device ahead of use
    transfer           the copies, by a CUDA stream or plain
    job_thread         a thread for what would block the training loop
    device_crops       decode="cuda": encoded crops to pixels on the device
    device_decode      the decoders of JPEGs
    decode_advice      whether the cores or the GPU should decode
    device_skips       what fills rows that the device cannot decode, if records may be skipped
    device_resize      Pillow's resize, by operations of torch
    device_kernels     the same by kernels of Triton, and normalised with it
    pinned             page-locked memory
    normalize          images cast and normalised where they lie
"""
