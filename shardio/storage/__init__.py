"""Bytes at rest: local files, object stores, a cache, atomic writes, locks, passing descriptors.

A location is a place that holds files, such as a directory or a folder of a bucket. `locate` finds
the location of a URL. Datasets are read and written through locations, and so is what `pack` reads.

    base                what locations and files can do
    options             `Storage`: how the bytes of a dataset are reached
    location            the location that a path or URL names
    memory              a location of small files that are nowhere on a disk

    local               files of this machine: exact reads, whole writes, what is mounted where
    staging             new files in a hidden folder, until all of them are there
    lock                the journal of who works in a directory, and the lock on it
    descriptors         memory without a name, and descriptors that go to other processes

    remote              a folder of an object store as a location
    remote_file         an object as a file: announced ranges, and single reads
    swept_file          an object that is read once, from front to back, and hashed
    upload              an object that is written, whole and checked
    listing             a page of what lies in a folder of a store
    walk                all that lies in a folder, by many requests at once

    ranges              the ranges that this process asked for, within bytes in flight
    transfers           many requests at once: retries, deadlines, second requests
    concurrency         how many requests to a store run at once
    retry_after         how long a server wants to be left alone
    helper              the process that sends requests for one that must not hold a client
    client              one request, and its errors by kind
    plain_http          requests of Python's own, without the client
    stores              the stores by scheme: URLs, endpoints, options
    store_options       what is wrong with options of a store
    credentials         the credentials of users, as other programs keep them

    cache               a bounded directory that keeps ranges of remote shards
    cache_layout        the bytes of the cache's file of a shard
    cached_file         the cache's file of one shard: what is there, and who downloads the rest
    cached_remote_file  an object of which a cache keeps what is read
"""
