"""Shards back to files: each record's image to DIR/key, byte for byte what was packed.

Not so images that packing changed, unless their originals were kept: JPEG tiles, which are counted,
resized ones, and raw pixels.

Records of several files (sources/grouped.py, sources/trees.py) become these again: `cls`, `json`
and `npy` files hold the same values then, but may be written otherwise.

Keys come from a file that may be anybody's, so each is checked part by part, and every folder on
the way is opened relative to the one above without following links: nothing outside DIR is written.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dataset import sequence
from ..dataset.sequence import ShardSequence
from ..errors import DamageError, ExistsError, OptionError, printable
from ..formats import manifest
from ..formats.foreign.webdataset_writer import npy_bytes
from ..formats.manifest import Manifest
from ..formats.sample import BLOBS, Sample
from ..formats.tree import Tree, class_bytes, class_folders, is_raw, key_parts, raw_ending
from ..images import jpeg_tiles
from ..images.filetype import ENDINGS, image_type
from ..names import KEY, key_bytes
from ..storage import local
from ..storage.local import LocalDirectory
from ..storage.location import local_path, locate
from ..storage.options import Storage, with_root
from ..units import Summary, check_bool, show_count, show_size
from . import output_dir
from .process_pool import Progress
from .reencode import ORIGINAL
from .sources.field_names import is_folder
from .sources.trees import Pattern, pattern_of


@dataclass(repr=False)
class Unpacked(Summary):
    """The result of one call of `unpack`; as str, a summary of lines."""

    out: str = ""
    files: int = 0
    bytes: int = 0
    kept: int = 0  # of the files: there with the same bytes already
    folders: int = 0  # of classes
    without: int = 0  # records whose field is None: there is no file to write
    tiles: int = 0  # JPEGs that packing made tiles: pixels as they were, bytes not
    resized: bool = False  # whether packing shrank larger images
    raw: bool = False  # whether packing made pixels of images

    def __str__(self) -> str:
        lines = [
            f"{show_count(self.files, 'file')}, {show_size(self.bytes)}, in {printable(self.out)}"
        ]
        if self.kept:
            lines.append(f"{self.kept:,} of these were there already, with the same bytes")
        if self.without:
            lines.append(f"{show_count(self.without, 'record')} without a file")
        if self.tiles:
            lines.append(
                f"of these {show_count(self.tiles, 'JPEG tile')}, as packing made them without "
                "loss: the same pixels in other bytes"
            )
        if self.resized or self.raw:
            how = " and ".join(["resized"] * self.resized + ["made raw pixels"] * self.raw)
            lines.append(
                f"images were {how} when they were packed: these are not the files themselves"
            )
        return "\n".join(lines)


def unpack(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    storage: Storage | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Unpacked:
    """Write the files of a dataset, or of all its splits, into a directory.

    path       of the dataset, or its URL
    root       where the data lies, when `shardio index --out` put its index elsewhere
    storage    a shardio.Storage: how an object store is reached
    overwrite  replace files that exist
    progress   called now and then with bytes done and bytes in all

    Classes without images become empty folders. Run again after an interruption, it keeps the files
    that are there with the same bytes, and writes the others. Other files raise ExistsError, unless
    `overwrite` replaces them. Raises also NotPackedError, DamageError (a record or a key),
    OptionError (no field holds files, or keys that are no names of files side by side; then nothing
    was written), StorageError.
    """
    check_bool(overwrite=overwrite)
    options, target = with_root(storage, root), local_path(directory)
    datasets = []
    for name, index in manifest.datasets_in(locate(path, options)).items():
        dataset = sequence.stored_in(index, options)
        files_of = _FILES_OF.get(str(dataset.manifest.options.get("source")), _one)
        own = files_of is not _parallel  # of others, folders are named from the source on
        datasets.append((dataset, manifest.split_folder(target, name) if own else target, files_of))
    total = sum(one.manifest.blob_bytes for one, *_ in datasets)
    if not overwrite and output_dir.has_dataset(LocalDirectory(target)):
        raise ExistsError(
            f"{printable(target, 4096)}: a dataset is here, and files would lie among its shards; "
            "choose another directory"
        )
    done = Unpacked(target)
    fields = [kind for one, *_ in datasets for _, kind in one.manifest.schema.fields]
    begun = os.path.isdir(target) and os.listdir(target)
    if sum(kind in BLOBS for kind in fields) <= len(datasets) and not begun:  # all is written
        local.refuse_if_full(target, total)
    for dataset, _, files_of in datasets:  # all of them, before a file is written
        if files_of is _one:  # else the keys are those of files side by side
            _check_keys(dataset, _content_field(dataset.manifest))
    for dataset, into, files_of in datasets:
        stored = dataset.manifest
        keeps = _keeps_originals(stored)
        changes = {} if keeps else stored.options
        done.resized |= changes.get("resize") is not None
        done.raw |= changes.get("encode") is not None
        with contextlib.closing(Tree(into, overwrite)) as tree:
            for name in class_folders(stored):
                tree.folder(key_parts(class_bytes(name), stored.where))
                done.folders += 1
            for sample in dataset:
                if keeps and (own_file := sample.pop(ORIGINAL, None)) is not None:
                    sample["image"] = own_file  # as it was packed, instead of what was made of it
                files = list(files_of(stored, sample))
                done.without += not files
                for key, data in files:
                    done.kept += not tree.complete(key_parts(key, stored.where), data)
                    done.files += 1
                    done.bytes += len(data)
                    done.tiles += "jpeg_tiles" in changes and jpeg_tiles.tiles(data) is not None
                if progress is not None:
                    progress(done.bytes, total)
    return done


def _keeps_originals(stored: Manifest) -> bool:
    return bool(stored.options.get("keep_original"))


def _one(stored: Manifest, sample: Sample) -> Iterator[tuple[bytes, bytes]]:
    """Give the file of a record: its path and its bytes."""
    content = _content_field(stored)
    if (data := sample[content]) is not None:
        yield sample[KEY] + _ending(stored, content, sample[KEY], data), data


def _grouped(stored: Manifest, sample: Sample) -> Iterator[tuple[bytes, bytes]]:
    """Give the files that were one record: bytes and texts as they were, other values anew."""
    theirs = stored.options.get("fields", {})
    for name, value in sample.items():
        if value is None or name == KEY:
            continue
        endings = theirs.get(name, name).split("/")  # several: of images
        ending = "ppm" if _gives_raw(stored, name) else _fitting(endings, value)
        yield sample[KEY] + b"." + ending.encode(), _file(value)


def _parallel(stored: Manifest, sample: Sample) -> Iterator[tuple[bytes, bytes]]:
    """Give the files, each in the folder of its field, that were one record."""
    key = sample[KEY]
    endings = stored.options.get("endings")
    if not isinstance(endings, dict) or not all(isinstance(one, str) for one in endings.values()):
        raise DamageError(f"{stored.where}: options: expected the endings of files by field")
    named = stored.options.get("fields", {}).items()  # some are columns of tables
    fields = {name: pattern_of(text) for name, text in named if is_folder(text)}
    # All but the field whose paths the keys are have endings.
    stem = next((one for n, one in fields.items() if n not in endings), Pattern(b"")).stem(key)
    for name, one in fields.items():
        value = sample.get(name)
        if value is None:
            continue
        path = key
        if name in endings:
            path = stem + key_bytes(_fitting(endings[name].split("/"), value))
        if _gives_raw(stored, name):
            path += raw_ending(path)
        yield one.folder + path, _file(value)


# By the kind of the source: the function that gives the files of each record; of others, `_one`.
_FILES_OF: dict[str, Callable[[Manifest, Sample], Iterator[tuple[bytes, bytes]]]] = {
    "files": _grouped,
    "trees": _parallel,
}


def _fitting(endings: Sequence[str], value: Any) -> str:
    """Return, of several endings, the first that a file with this value may have."""
    if len(endings) > 1 and isinstance(value, bytes):
        known = ENDINGS.get(image_type(value[:32]) or "", ())
        return next((one for one in endings if one.lower().lstrip(".") in known), endings[0])
    return endings[0]


def _file(value: Any) -> bytes:
    """Write a value as the content of a file that decodes to it."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, np.ndarray):
        return npy_bytes(value)
    return json.dumps(value).encode()


def _ending(stored: Manifest, content: str, key: bytes, data: bytes) -> bytes:
    """Return the ending that a key lacks: those of other formats have none, raw pixels another."""
    if _gives_raw(stored, content):
        return raw_ending(key)
    # Of a packed dataset: the format that it was packed from.
    format = stored.options.get("from", "record") if stored.names is None else stored.format
    own = format in (*manifest.SUFFIXES, "imagefolder")
    if own or b"." in key.rpartition(b"/")[2]:
        return b""
    source = stored.options.get("fields", {}).get(content, content)
    known = ENDINGS.get(image_type(data[:32]) or "", ())
    extension = format == "webdataset" and source.isalnum() and source != content
    ending = source if extension or source in known else next(iter(known), None)
    return b"" if ending is None else b"." + ending.encode()


def _gives_raw(stored: Manifest, name: str) -> bool:
    return is_raw(stored, name) and not _keeps_originals(stored)


def _check_keys(dataset: ShardSequence, content: str) -> None:
    """Raise OptionError for two keys that cannot be files side by side: `a` twice, or with `a/b`.

    Keys of an image folder were names of files side by side: only those of a stream are read.
    """
    stored = dataset.manifest
    raw = _gives_raw(stored, content)
    if stored.options.get("source") == "imagefolder" and not raw:
        return
    numbers: Sequence[int] = range(len(dataset))
    if dataset.reader.storage.remote:  # each key would be a request; that of a folder is told later
        numbers = dataset.perhaps_alike()
    keys = dataset.stored_keys(numbers)
    if raw:
        keys = [key + raw_ending(key) for key in keys]
    folders = {
        b"/".join(parts[:at])
        for parts in (key_parts(key, stored.where) for key in keys)
        for at in range(1, len(parts))
    }
    seen: set[bytes] = set()
    for number, key in zip(numbers, keys, strict=True):
        if (key in folders or key in seen) and dataset[number][content] is not None:
            what = "is the folder of another" if key in folders else "is there twice"
            raise OptionError(
                f"{stored.where}: the key {printable(key)} {what}, so the records cannot all be "
                "files; nothing was written. `shardio cat` gives single records"
            )
        seen.add(key)


def _content_field(stored: Manifest) -> str:
    """Return the field that holds files: the one of kind image, else the one of kind bytes."""
    kept = ORIGINAL if _keeps_originals(stored) else None
    for wanted in ("image", "bytes"):
        names = [name for name, kind in stored.schema.fields if kind == wanted and name != kept]
        if len(names) == 1:
            return names[0]
    fields = ", ".join(f"{name} ({kind})" for name, kind in stored.schema.fields)
    raise OptionError(
        f"{stored.where}: unpack writes the one field that holds files, and this dataset has "
        f"{fields}; `shardio cat` gives single fields"
    )
