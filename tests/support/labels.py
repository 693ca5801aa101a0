"""Images, tables of what they are, and what training gets of both."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardio import ShardDataset, pack
from support.packing import grouped
from support.trees import noise, plant

NAMES = [f"{i:03d}" for i in range(12)]
FLAT = {f"{name}.jpg": noise(name, 200) for name in NAMES}
CLASSES = {f"{'ab'[i % 2]}/{name}.jpg": noise(name, 200) for i, name in enumerate(NAMES)}
NUMBERS = {name: i % 5 for i, name in enumerate(NAMES)}


def write(path: Path | str, text: str) -> str:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def lines(form: str) -> str:
    """A line for each image: `form` with its name, and its number."""
    return "".join(form.format(name, number) for name, number in NUMBERS.items())


def pack_records(
    source: Path | str, out: Path, **options: Any
) -> dict[str, dict[str, dict[str, Any]]]:
    """Pack, and return the records of each split, by their keys."""
    found = {}
    for one in pack(source, out, **grouped({"jobs": 1, "max_records": 5} | options)):
        dataset = ShardDataset(one.out, shuffle=False, decode=None)
        found[one.split] = {sample["__key__"]: sample for sample in dataset}
    return found


def column(records: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """A field of all records, by the names of their images."""
    found = {key.rpartition("/")[2][:3]: one[name] for key, one in records.items()}
    return dict(sorted(found.items()))


def pack_table(
    tmp_path: Path,
    text: str,
    tree: Mapping[str, bytes] = FLAT,
    name: str = "l.csv",
    columns: str = "",
    **options: Any,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Pack images with a table beside them, as `pack_records`. columns: `:a,b`, its names."""
    plant(tmp_path / "in", tree)
    table = write(tmp_path / name, text) + columns
    return pack_records(tmp_path / "in", tmp_path / "out", tables=table, **options)
