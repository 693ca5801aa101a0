"""shardio: millions of small image files as a few large shards, streamed into PyTorch training."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
