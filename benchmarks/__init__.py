"""Benchmarks of shardio beside its rivals: `python -m benchmarks` lists them.

A claim without a script and a stored result is not made; docs/benchmarks.md says how to read them.
"""
