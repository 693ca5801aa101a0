"""Files that are inflated into memory when they are opened, and zstd, by which most of them are.

Ranges then refer to the inflated bytes. Sizes are compared with limits before bytes are inflated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO

from ...errors import DamageError, DependencyError
from .base import ForeignFile

# 32 KB of zstd can become 1 GiB. The writer's shards have 64 MiB; what is larger than this must
# at least not be smaller than a thousandth when compressed.
FREE = 256 << 20
RATIO = 1_000
_INPUT_BYTES = 4 << 10  # bytes of a stream that are inflated at a time: to 128 MiB, at worst


class InflatedFile(ForeignFile):
    """A file that may have been inflated: a base class."""

    def read_from(self, inflated: bytes) -> None:
        """Take the inflated bytes as those that ranges refer to."""
        self.memory = len(inflated)
        self.read = _slicer(inflated, self.name)

    def will_need(self, start: int, length: int, *, keep: bool = False) -> None:
        """Announce a range that will be read soon."""
        if not self.memory:
            super().will_need(start, length, keep=keep)

    def scattered(self) -> None:
        """Say that reads will be in no order."""
        if not self.memory:
            super().scattered()

    def close(self) -> None:
        """Close the file."""
        if self.memory:
            self.read = _slicer(b"", self.name)  # what was inflated is let go
        super().close()


def most_inflated(size: int) -> int:
    """Return the bytes that so many compressed ones may become."""
    return max(FREE, RATIO * size)


def _slicer(data: bytes, name: str) -> Callable[[int, int], bytes]:
    """Return a reader of an inflated shard. No method of it: that would be a circle, freed late."""

    def read(start: int, length: int) -> bytes:
        if start + length > len(data):
            raise DamageError(
                f"{name}: inflated, it ends at byte {len(data)}, expected {length:,} bytes from "
                f"byte {start}"
            )
        return data[start : start + length]

    return read


def check_zstd(name: str) -> None:
    """Raise DependencyError if the file of this name cannot be inflated for want of zstandard."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        raise DependencyError(
            f"{name}: to read zstd needs zstandard, which is not installed: "
            "pip install 'shardio-torch[mds]'"
        ) from None


def unzstd(data: bytes, size: int) -> bytes:
    """Return the `size` bytes that a frame becomes. Raises ValueError, ImportError.

    A frame that does not state its size may give less, or one byte too many.
    """
    import zstandard  # an extra; read only here

    try:
        # A frame that states its size gets it, whatever limit is given along: it is asked before.
        stated = zstandard.get_frame_parameters(data).content_size
        if stated == zstandard.CONTENTSIZE_UNKNOWN:
            with zstandard.ZstdDecompressor().stream_reader(data) as reader:
                return bytes(reader.read(size + 1))
        if stated != size:
            raise ValueError(f"it states {stated:,}")
        return bytes(zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False))
    except (zstandard.ZstdError, MemoryError) as error:
        raise ValueError(str(error)) from None


def unzstd_pieces(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield the content of a file of any number of frames. Raises DependencyError, ValueError."""
    check_zstd(name)
    import zstandard

    frame, given = None, b""
    try:
        while given := given or file.read(_INPUT_BYTES):
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            if data := frame.decompress(given):
                yield data
            given = b""
            if frame.eof:
                given, frame = frame.unused_data, None
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    if frame is not None:
        raise ValueError("it ends within a frame")


def unzstd_one(data: bytes) -> bytes:
    """Return what a frame of a size that it states becomes. Raises ValueError, ImportError."""
    import zstandard

    try:
        size = zstandard.get_frame_parameters(data).content_size
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    if size > most_inflated(len(data)):  # as one that is not stated is, too
        raise ValueError(f"{len(data):,} bytes that would become {size:,}")
    return unzstd(data, size)
