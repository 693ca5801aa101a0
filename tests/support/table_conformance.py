"""What formats of tables pass: FormatConformance, with its samples as columns of Arrow."""

from typing import Any

import pytest

from support.conformance import FIELDS, FormatConformance, sample

pa = pytest.importorskip("pyarrow")

FILES = pa.struct({"bytes": pa.binary(), "path": pa.string()})


class TableConformance(FormatConformance):
    """Arrays of more dimensions than one are no column, and nor is JSON of any shape."""

    FIELDS = tuple(field for field in FIELDS if field[0] not in ("mask", "meta"))
    SAMPLES = tuple(
        {name: value for name, value in sample(i).items() if name not in ("mask", "meta")}
        for i in range(40)
    )

    def columns(self, samples: Any) -> dict[str, Any]:
        """Return the columns of the samples by name."""
        types = {"label": pa.int64(), "weight": pa.float64(), "flipped": pa.bool_()}
        types["caption"] = pa.string()
        columns: dict[str, Any] = {}
        for name, _ in self.FIELDS:
            values = [sample[name] for sample in samples]
            if name == "image":
                files = [None if v is None else {"bytes": v, "path": None} for v in values]
                columns[name] = pa.array(files, FILES)
            else:
                columns[name] = pa.array(values, types.get(name, pa.binary()))
        return columns
