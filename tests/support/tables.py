"""One table, in every format that is read: rows that name files, with values of all types."""

import json
from pathlib import Path
from typing import Any

import pytest

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

COUNT = 24


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def rows(count: int = COUNT) -> list[dict[str, Any]]:
    """Rows that name files, with a value of every type, and None in most columns."""
    return [
        {
            "path": f"{'cat' if i % 3 else 'ant'}/{i:03d}.jpg",
            "label": None if i == 5 else "cat" if i % 3 else "ant",
            "split": "train" if i % 4 else "val",
            "width": None if i == 7 else 100 + i,
            "score": None if i == 8 else i / 4,
            "good": None if i == 9 else i % 2 == 0,
            "zip": f"0{i:04d}",
        }
        for i in range(count)
    ]


def as_csv(table: list[dict[str, Any]], delimiter: str = ",") -> str:
    lines = [delimiter.join(table[0])]
    for row in table:
        lines.append(delimiter.join("" if v is None else str(v) for v in row.values()))
    return "\n".join(lines) + "\n"


def as_jsonl(table: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in table)


def as_parquet(table: list[dict[str, Any]], path: Path, **options: Any) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(table), path, **options)
    return path
