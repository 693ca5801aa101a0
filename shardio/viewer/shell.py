"""What all pages show around their own part: the dataset, and the form of the query."""

from __future__ import annotations

from typing import Any, Final

from .address import PAGE, ViewState, write_query
from .grid import record_address
from .results import Query, Summary

THUMBNAIL: Final = 192  # pixels: twice of what the page shows, for dense screens
_CLASSES: Final = 200  # that a form lists; of more, the name is typed


def shell(summary: Summary, splits: tuple[str, ...], state: ViewState) -> dict[str, Any]:
    """Return the values that the template base.html needs, and addresses for the others."""

    def picture(path: str, **more: object) -> str:
        # The dataset is in it: browsers keep pictures, and a port may serve another one tomorrow.
        fields = {"v": [summary.dataset_id[:12]]}
        if state.split is not None:
            fields["split"] = [state.split]
        fields |= {name: [str(value)] for name, value in more.items() if value is not None}
        return f"/{path}{write_query(fields)}"

    names = summary.classes or ()
    label = state.query.label
    if isinstance(label, int) and label < len(names):
        label = names[label]
    columns = [one.name for one in summary.fields if one.column]
    return {
        "summary": summary,
        "splits": splits,
        "state": state,
        "query": state.query,
        "default_count": PAGE,
        "listed_classes": names if len(names) <= _CLASSES else (),
        "label_text": "" if label is None else label,
        "filter_columns": columns,
        "sort_columns": columns,
        "value_of": lambda name: _given(state.query, name),
        "default_of": lambda name: getattr(Query(), name) or 0,
        "picture": picture,
        "thumbnail": lambda number: picture(f"image/{number}", side=THUMBNAIL),
        "record_address": lambda card: record_address(state, card.number, card.position),
    }


def _given(query: Query, name: str) -> object:
    """Return an option of a query as a form shows it: empty where it is the default."""
    value = getattr(query, name)
    return "" if value == getattr(Query(), name) or value is None else value
