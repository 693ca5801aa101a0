"""Bytes at rest: local files, object stores, a cache, atomic writes, locks, passing descriptors.

A location holds files (`base`); `location` finds it by its URL. `remote` is one in an object
store, `remote_file` a file there, `swept_file` one that is read once, `ranges` what was asked for,
`transfers` many requests at once, `client` one request, `retry_after` how long a server wants to be
left alone, `plain_http` requests without a client, `stores` the stores by scheme, `store_options`
what is wrong with options of theirs, `credentials` what opens them, `helper` the process that makes
requests for one that must not, `listing` a page of what lies in a folder, `walk` all of it,
`upload` what is written. `cache` keeps ranges on a disk, in a `cached_file` a shard, which
`cached_remote_file` reads.
"""
