"""Bytes at rest: local files, atomic writes, locks, a cache, passing descriptors."""
