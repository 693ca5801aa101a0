"""The address of a page says all that the page shows: a view is shared by its address.

An address is a path, and fields behind "?". What has its default is left out, so that each view has
one address. Names that are no text keep their bytes: "%ff".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode

from ..errors import OptionError, printable
from .results import Query

Fields = dict[str, list[str]]  # by name, the values in the order of the address
_MOST_FIELDS: Final = 100
PAGE: Final = 96  # records: divides into rows of 2, 3, 4, 6, 8 and 12
MOST: Final = 512  # records on a page
_MOST_PARTS: Final = 1 << 16  # records of a batch, ranks, spans, nodes


def read_query(text: str) -> Fields:
    """Read what stands behind "?" in an address; nothing where there are too many fields."""
    found: Fields = {}
    try:
        pairs = parse_qsl(
            text, keep_blank_values=True, errors="surrogateescape", max_num_fields=_MOST_FIELDS
        )
    except ValueError:
        return found
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found


def write_query(fields: Mapping[str, Sequence[str]]) -> str:
    """Write fields as the end of an address, from "?" on; "" for none."""
    pairs = [(name, value) for name, values in fields.items() for value in values]
    text = urlencode(pairs, errors="surrogateescape", safe="/:,", quote_via=quote)
    return "?" + text if text else ""


@dataclasses.dataclass(frozen=True)
class ViewState:
    """What an address asks for: a split, records in an order, and where in this order to begin."""

    query: Query = dataclasses.field(default_factory=Query)
    split: str | None = None
    start: int = 0  # position in the order of the query
    count: int = PAGE

    def fields(self) -> Fields:
        """Return what is not as it is by default, as an address has it."""
        found: Fields = {} if self.split is None else {"split": [self.split]}
        for one in dataclasses.fields(Query):
            value = getattr(self.query, one.name)
            if value != one.default:
                found |= _written(one.name, value)
        if self.start and self.query.step is None:
            found["start"] = [str(self.start)]
        if self.count != PAGE:
            found["count"] = [str(self.count)]
        return found

    def url_for(self, path: str = "", **changes: Any) -> str:
        """Return the address of a page with these fields, or those of the query, changed."""
        own = {name: changes.pop(name) for name in ("split", "start", "count") if name in changes}
        changed = dataclasses.replace(self, query=dataclasses.replace(self.query, **changes), **own)
        return f"/{path}{write_query(changed.fields())}"

    def home(self, path: str = "", **fields: object) -> str:
        """Return the address of a page with these fields, and nothing of the query."""
        own = {"split": self.split} | fields
        return f"/{path}{write_query({k: [str(v)] for k, v in own.items() if v is not None})}"


def _written(name: str, value: Any) -> Fields:
    if name == "where":
        return {name: list(value)}
    if name == "label":
        return {"class" if isinstance(value, str) else "label": [str(value)]}
    return {name: [str(int(value)) if isinstance(value, bool) else str(value)]}


def read_state(fields: Fields) -> ViewState:
    """Return what the fields of an address ask for. Others are passed over. Raises OptionError."""
    given = {name: values[-1] for name, values in fields.items() if values[-1]}
    query: dict[str, Any] = {
        name: read(name, given[name]) for name, read in _READERS.items() if name in given
    }
    query["where"] = tuple(text for one in fields.get("where", []) if (text := one.strip()))
    if "class" in given:
        query["label"] = given["class"]
    own = {name: query.pop(name) for name in ("split", "start", "count") if name in query}
    own["count"] = min(own.get("count") or PAGE, MOST)
    return ViewState(Query(**query), **own)


def read_number(name: str, text: str) -> int:
    """Read a whole number from an address. Raises OptionError."""
    if text.isascii() and text.isdigit() and len(text) < 19:
        return int(text)
    raise OptionError(f"{name}: expected a whole number from 0 on, found {printable(text)!r}")


def _part(name: str, text: str) -> int:
    """Read a number of which as many values are made, so that no address takes all memory."""
    number = read_number(name, text)
    if number > _MOST_PARTS:
        raise OptionError(f"{name} is {number:,}: pages show up to {_MOST_PARTS:,}")
    return number


def _size(name: str, text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else text


def _switch(name: str, text: str) -> bool:
    return text == "1"


def _order(name: str, text: str) -> str:
    if text in ("storage", "training"):
        return text
    raise OptionError(f"order: expected storage or training, found {printable(text)!r}")


def _text(name: str, text: str) -> str:
    return text


_READERS: Final[dict[str, Callable[[str, str], Any]]] = {
    "order": _order,
    **dict.fromkeys(("epoch", "rank", "step", "seed"), read_number),
    **dict.fromkeys(("world_size", "batch_size", "spans", "unit", "nodes"), _part),
    "shuffle": _switch,
    "shuffle_buffer": _size,
    "label": read_number,
    **dict.fromkeys(("tail", "search", "sort", "split"), _text),
    "descending": _switch,
    **dict.fromkeys(("start", "count"), read_number),
}
