"""Bytes at rest: local files, atomic writes, the lock of a directory, passing descriptors."""
