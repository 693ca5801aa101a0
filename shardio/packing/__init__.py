"""Packs datasets: from a source, by a plan, to shards and the commit.

Indexes, exports, unpacks, verifies and cleans what was packed.
"""
