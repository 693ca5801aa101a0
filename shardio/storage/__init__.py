"""Bytes at rest: local files, object stores, a cache, atomic writes, locks, passing descriptors.

A location holds files (`base`); `location` finds it by its URL. Of an object store, `remote` has
the files, `ranges` what was asked for, `transfers` many requests at once, `client` one request,
`helper` the process that makes them for one that must not. `cache` keeps ranges on a disk.
"""
