"""Parquet as the Hugging Face Hub and `datasets` have it: data/train-00000-of-00003.parquet ...

    image            struct of `bytes` and `path`: the feature Image. A field NAME.path is its path
    int `label`      int64: ClassLabel with the names of the classes, where these have names
    int, bool, float int64 (uint64 where one is above 2**63), bool, float64
    str, bytes       string, binary
    json             string: its text
    array            lists, as deep as its dimensions, of its dtype
    the key          string, or binary where one is not UTF-8: a column `__key__`, by which `shardio
                     index` has the keys again

None is null in all of them. The features stand in the schema of each file, under `huggingface`, as
`datasets` writes them, and in README.md, by which the Hub knows splits and features. A row group
has at most 1,000 rows, or 16 MiB, so that few rows cost little; each page has its checksum, and
files their page index. Images are not compressed again. Sources:
https://huggingface.co/docs/hub/datasets-manual-configuration
https://github.com/huggingface/datasets/blob/main/src/datasets/arrow_writer.py
https://github.com/huggingface/datasets/blob/main/src/datasets/info.py
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import OptionError, SampleError, printable
from ...names import KEY
from ...storage.local import link, write_file
from ..sample import Sample
from .arrow_columns import import_pyarrow
from .writer import (
    ExportSpec,
    Field,
    FormatWriter,
    Output,
    RestartExport,
    columns,
    is_usual,
    json_bytes,
    misfit,
)

README = "README.md"
FOLDER = "data"
_SIZE = 500_000_000  # bytes of a file: the default of `datasets`
_GROUP, _ROWS = 16 << 20, 1_000  # bytes and rows of a row group
_SPLIT = re.compile(r"\w+(\.\w+)*")  # as `datasets` has the names of splits
_NUMBERED = re.compile(r"(.+)-(\d{5,})\.parquet")
_VALUES = {"int": "int64", "float": "float64", "bool": "bool", "str": "string", "json": "string"}
_ARRAYS = {"bool", "float16", "float32", "float64"}  # dtypes that lists may have
_ARRAYS |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_MAX_DIMENSIONS = 8
# Quotes, and what YAML prints nowhere or takes for the end of a line.
_UNPRINTED = re.compile(r'["\\\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\uffff]')

Feature = dict[str, Any]


class HubParquet(FormatWriter):
    """A folder of Parquet files that is being written. Raises DependencyError, too."""

    shards = True
    keyed = True
    keeps_classes = True
    own_files = re.compile(r"[\w.]+-\d{5,}-of-\d{5,}\.parquet|README\.md")

    def __init__(self, spec: ExportSpec) -> None:
        super().__init__(spec)
        self._arrow = import_pyarrow()
        self._folder, self._required_types = spec.folder, spec.required_types
        self._split = spec.split or "train"
        if not _SPLIT.fullmatch(self._split):
            raise OptionError(
                f"{spec.manifest.where}: the Hub has no split called {printable(self._split)!r}, "
                "only letters, digits, _ and dots between them. Export it by itself: it becomes "
                "the split train"
            )
        self._paths = _paths(spec.fields)
        joined = set(self._paths.values())
        fields = [one for one in spec.fields if one.name not in joined]
        self._columns = columns(replace(spec, fields=fields), "parquet", KEY)
        self._classes = spec.manifest.classes
        self._features = {field: self._feature(field, kind) for _, field, kind in self._columns}
        self._limit = spec.shard_size or _SIZE
        self._schema = self._described()
        self.exported_names = {
            field: f"{column} ({_type_text(self._features[field])})"
            for column, field, _ in self._columns
        }
        self.exported_names |= {path: f"{name}.path" for name, path in self._paths.items()}
        self._rows: list[Sample] = []
        self._bytes = 0  # of these rows
        self._file: Output | None = None
        self._writer: Any = None
        self._number = 0  # of the next file

    @classmethod
    def split_folder(cls, split: str) -> str:
        """Return the folder that the files of a split are in: one for all."""
        return FOLDER

    @classmethod
    def join(cls, parts: Sequence[str], folder: str, split: str) -> None:
        """Put the files of a split that several wrote, each a part, into one folder."""
        parquet = import_pyarrow().parquet
        paths = [
            os.path.join(part, name)
            for part in parts
            for name in _numbered(os.listdir(part)).get(split or "train", [])
        ]
        filled = [path for path in paths if parquet.read_metadata(path).num_rows]
        for number, path in enumerate(filled or paths[:1]):
            link(path, os.path.join(folder, _name(split, number)))

    @classmethod
    def describe(cls, folder: str) -> None:
        """Name all files by their number and how many there are, and write README.md."""
        parquet = import_pyarrow().parquet
        data = os.path.join(folder, FOLDER)
        splits: dict[str, list[Any]] = {}
        sizes: list[int] = []
        for split, names in _numbered(os.listdir(data)).items():
            for number, name in enumerate(names):
                path = os.path.join(data, name)
                new = f"{split}-{number:05d}-of-{len(names):05d}.parquet"
                splits.setdefault(split, []).append(parquet.read_metadata(path))
                sizes.append(os.stat(path).st_size)
                os.rename(path, os.path.join(data, new))
        features = {}
        for split, files in splits.items():
            written = files[0].metadata[b"huggingface"]
            features[split] = json.loads(written)["info"]["features"]
        first = next(iter(features), "")
        for split, found in features.items():
            if found != features[first]:
                raise OptionError(
                    f"the splits {printable(first)} and {printable(split)} have other fields or "
                    "classes, which are one dataset on the Hub: export each by itself"
                )
        card = _card(features.get(first, {}), splits, sum(sizes))
        write_file(folder, README, card.encode())

    def add(self, number: int, sample: Sample) -> bool:
        """Write a record; False if it has nothing to write. Raises SampleError, RestartExport."""
        row, size = {}, 0
        for column, field, kind in self._columns:
            value = sample[field]
            if value is not None:
                self._check(sample, field, kind, value)
                value = self._written(sample, field, kind, value)
                size += _size_of(value)
            if kind == "image" and value is not None:  # a path alone is a file that is elsewhere
                path = sample[self._paths[field]] if field in self._paths else None
                value = {"bytes": value, "path": path}
                size += len(path or "")
            row[column] = value
            size += 8
        if self._rows and (len(self._rows) == _ROWS or self._bytes + size > _GROUP):
            self._flush()
        written = 0 if self._file is None else self._file.tell()
        if written + self._bytes and written + self._bytes + size > self._limit:
            self._complete()
        self._rows.append(row)
        self._bytes += size
        return True

    def finish(self) -> None:
        """Complete all files, and flush them; of no records there is one, too."""
        if self._rows or self._file is not None or not self._number:
            self._complete()

    def close(self) -> None:
        """Give up what is open."""
        self._rows, self._writer = [], None
        if self._file is not None:
            self._file.discard()
            self._file = None

    # --- features ---

    def _feature(self, field: str, kind: str) -> Feature:
        """Return the feature of a column, by its kind and what records required."""
        required = self._required_types.get(field)
        if kind == "image":
            return {"_type": "Image"}
        if kind == "int" and field == "label" and self._classes is not None and not required:
            return {"names": list(self._classes), "_type": "ClassLabel"}
        if kind == "array":
            dtype, _, dimensions = (required or "float32:1").partition(":")
            feature = _value(dtype)
            for _ in range(int(dimensions)):
                feature = {"feature": feature, "_type": "Sequence"}
            return feature
        default = "string" if kind == "key" else "binary"
        return _value(required or _VALUES.get(kind, default))

    def _check(self, sample: Sample, field: str, kind: str, value: Any) -> None:
        """Begin anew where the type of a column does not fit all records. Raises SampleError."""
        known = self._required_types.get(field)
        wider = None
        if kind == "array":
            wider = f"{value.dtype.name}:{value.ndim}"
            if value.dtype.name not in _ARRAYS or not 0 < value.ndim <= _MAX_DIMENSIONS:
                raise misfit(
                    sample,
                    field,
                    f"an array of {value.ndim} dimensions, {value.dtype.name}; parquet has lists "
                    f"of numbers and booleans, of 1 to {_MAX_DIMENSIONS} dimensions",
                )
            if known is not None and known != wider:
                first, _, dimensions = known.partition(":")
                raise misfit(
                    sample,
                    field,
                    f"an array of {value.ndim} dimensions, {value.dtype.name}, but others have "
                    f"{dimensions}, {first}; a column has one type",
                )
        elif kind == "int" and value < 0 and known == "uint64":
            raise misfit(
                sample, field, f"{value}, but others are above 2**63 - 1; no type has both"
            )
        elif not is_usual(kind, value):
            wider = "uint64" if kind == "int" else "binary"
        if wider is not None and wider != known:
            self._required_types[field] = wider
            raise RestartExport

    def _written(self, sample: Sample, field: str, kind: str, value: Any) -> Any:
        if kind == "array":
            return value
        if kind == "json":
            try:
                return json_bytes(value).decode()
            except (TypeError, ValueError) as error:
                raise misfit(sample, field, str(error)) from None
        if kind == "key" and field not in self._required_types:
            return value.decode("utf-8")
        return value

    def _described(self) -> Any:
        """Return the schema, with the features as `datasets` writes them."""
        arrow = self._arrow
        features = {column: self._features[field] for column, field, _ in self._columns}
        text = json.dumps({"info": {"features": features}})
        types = [(name, _type(arrow, feature)) for name, feature in features.items()]
        return arrow.schema(types, metadata={"huggingface": text})

    # --- files ---

    def _flush(self) -> None:
        """Write the rows as a row group."""
        arrow = self._arrow
        if self._writer is None:
            self._file = Output(self._folder, _name(self._split, self._number))
            images = [f"{one}.bytes" for one, _, kind in self._columns if kind == "image"]
            paths = [path for field in self._schema for path in _leaves(arrow, field)]
            self._writer = arrow.parquet.ParquetWriter(
                self._file,
                self._schema,
                compression={path: "none" if path in images else "snappy" for path in paths},
                write_statistics=[path for path in paths if path not in images],
                use_dictionary=[one for one, _, kind in self._columns if kind in ("str", "int")],
                write_page_index=True,
                write_page_checksum=True,
            )
        if not self._rows:
            return
        arrays = []
        for field in self._schema:
            values = [row[field.name] for row in self._rows]
            try:
                arrays.append(_array(arrow, values, field.type))
            except (ValueError, TypeError, arrow.lib.ArrowException) as error:
                raise SampleError(f"field {printable(field.name)!r}: {error}") from None
        table = arrow.Table.from_arrays(arrays, schema=self._schema)
        self._writer.write_table(table, row_group_size=len(self._rows))
        self._rows, self._bytes = [], 0

    def _complete(self) -> None:
        """Complete the file that is open, with the rows that are left."""
        self._flush()
        assert self._file is not None
        self._writer.close()
        self._file.commit()
        self._file, self._writer = None, None
        self._number += 1


def _name(split: str, number: int) -> str:
    """Return the name of a file until it is known how many there are."""
    return f"{split or 'train'}-{number:05d}.parquet"


def _numbered(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split in the order of their numbers."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            found.setdefault(match[1], []).append((int(match[2]), name))
    return {split: [name for _, name in sorted(found[split])] for split in sorted(found)}


# --- columns --------------------------------------------------------------------------------------


def _paths(fields: Sequence[Field]) -> dict[str, str]:
    """Return the field that is the path of each image: NAME.path, unless it has another name."""
    texts = {one.name for one in fields if one.kind == "str" and one.exported_name is None}
    images = (one.name for one in fields if one.kind == "image")
    return {name: f"{name}.path" for name in images if f"{name}.path" in texts}


def _value(dtype: str) -> Feature:
    return {"dtype": dtype, "_type": "Value"}


def _type(arrow: Any, feature: Feature) -> Any:
    """Return the type of a feature in Arrow."""
    kind = feature["_type"]
    if kind == "Image":
        return arrow.struct({"bytes": arrow.binary(), "path": arrow.string()})
    if kind == "Sequence":
        return arrow.list_(_type(arrow, feature["feature"]))
    if kind == "ClassLabel":
        return arrow.int64()
    return arrow.bool_() if feature["dtype"] == "bool" else getattr(arrow, feature["dtype"])()


def _type_text(feature: Feature) -> str:
    """Return a feature as a summary names it."""
    depth = 0
    while feature["_type"] == "Sequence":
        feature, depth = feature["feature"], depth + 1
    return "list of " * depth + str(feature.get("dtype", feature["_type"]))


def _leaves(arrow: Any, field: Any) -> Iterator[str]:
    """Yield the paths of a column's values, as options of pyarrow have them."""
    name, kind = field.name, field.type
    while arrow.types.is_list(kind):
        name, kind = f"{name}.list.element", kind.value_type
    if arrow.types.is_struct(kind):
        yield from (f"{name}.{part.name}" for part in kind)
    else:
        yield name


def _array(arrow: Any, values: list[Any], kind: Any) -> Any:
    """Return a column of values. Arrays become lists by their numbers at once."""
    if not arrow.types.is_list(kind):
        return arrow.array(values, kind)
    levels = []
    arrays = values
    while arrow.types.is_list(kind):
        levels.append(np.cumsum([0, *(0 if one is None else len(one) for one in arrays)]))
        kind = kind.value_type
        if arrow.types.is_list(kind):
            arrays = [row for one in arrays if one is not None for row in one]
    flat = [np.ravel(one) for one in values if one is not None]
    found = arrow.array(np.concatenate(flat) if flat else [], kind)
    for bounds in reversed(levels[1:]):
        found = arrow.ListArray.from_arrays(arrow.array(bounds, arrow.int32()), found)
    missing = arrow.array([one is None for one in values])
    bounds = arrow.array(levels[0], arrow.int32())
    return arrow.ListArray.from_arrays(bounds, found, mask=missing)


def _size_of(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    return len(value) if isinstance(value, (bytes, str)) else 8


# --- README.md ------------------------------------------------------------------------------------


def _card(features: dict[str, Feature], splits: dict[str, list[Any]], size: int) -> str:
    """Return the dataset card: YAML that the Hub and `datasets` read."""
    lines = ["---", "configs:", "- config_name: default", "  data_files:"]
    for split in splits:
        lines += [f"  - split: {_quoted(split)}", f"    path: {_quoted(f'{FOLDER}/{split}-*')}"]
    lines += ["dataset_info:", "  features:"]
    for name, feature in features.items():
        lines += [f"  - name: {_quoted(name)}", *_feature_lines(feature, "    ")]
    lines.append("  splits:")
    total = 0
    for split, files in splits.items():
        rows = sum(file.num_rows for file in files)
        groups = (file.row_group(i) for file in files for i in range(file.num_row_groups))
        count = sum(group.total_byte_size for group in groups)
        total += count
        lines += [f"  - name: {_quoted(split)}", f"    num_bytes: {count}"]
        lines.append(f"    num_examples: {rows}")
    lines += [f"  download_size: {size}", f"  dataset_size: {total}", "---", ""]
    return "\n".join(lines)


def _feature_lines(feature: Feature, indent: str) -> list[str]:
    kind = feature["_type"]
    if kind == "ClassLabel":
        names = enumerate(feature["names"])
        head = [f"{indent}dtype:", f"{indent}  class_label:", f"{indent}    names:"]
        return head + [f"{indent}      '{number}': {_quoted(name)}" for number, name in names]
    if kind == "Sequence":
        inner = feature["feature"]
        if inner["_type"] == "Value":
            return [f"{indent}sequence: {inner['dtype']}"]
        return [f"{indent}sequence:", *_feature_lines(inner, indent + "  ")]
    return [f"{indent}dtype: {'image' if kind == 'Image' else feature['dtype']}"]


def _quoted(text: str) -> str:
    """Return text in YAML's double quotes; what YAML does not print is escaped."""
    return '"' + _UNPRINTED.sub(lambda one: f"\\u{ord(one[0]):04x}", text) + '"'
