"""The page of records: which cards it shows, where its links lead, how its batches mix."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from . import charts
from .address import MOST, ViewState
from .results import Page
from .view import View


@dataclass(frozen=True)
class PageLinks:
    """Where the links of a page lead; None: there is no such page."""

    first: str | None
    back: str | None
    on: str | None
    last: str | None


def records(view: View, state: ViewState) -> dict[str, Any]:
    """Return what the template records.html shows. Raises OptionError."""
    query = state.query
    if query.order == "storage":
        page = view.page(query, state.start, state.count)
        return {"page": page, "links": _pages(state, page), "mixing": None, "why": ""}
    step = query.step or 0
    asked = dataclasses.replace(query, step=step)
    page = view.page(asked, 0, min(query.batch_size, MOST))
    note = page.note
    if query.batch_size > MOST:
        note = f"The first {MOST} records of the batch. {note}"
    cards = tuple(card for card in page.cards if card.step == step)
    page = dataclasses.replace(page, cards=cards, note=note)
    mixing = None if page.pending is not None else charts.mixing(view, asked)
    return {"page": page, "links": _steps(state, page, step), "mixing": mixing, "why": ""}


def nothing(why: str) -> dict[str, Any]:
    """Return what records.html shows of a query that cannot be met."""
    page = Page((), 0, 0, None)
    return {"page": page, "links": PageLinks(None, None, None, None), "mixing": None, "why": why}


def _pages(state: ViewState, page: Page) -> PageLinks:
    """Return the pages around one in storage order."""
    start, count = state.start, state.count
    last = None
    if page.total is not None and page.next is not None:
        last = (page.total - 1) // count * count
    return PageLinks(
        first=state.url_for(start=0) if start else None,
        # A search goes on where it stopped reading: the browser's history leads back.
        back=state.url_for(start=max(0, start - count))
        if start and page.total is not None
        else None,
        on=None if page.next is None else state.url_for(start=page.next),
        last=None if last is None else state.url_for(start=last),
    )


def _steps(state: ViewState, page: Page, step: int) -> PageLinks:
    """Return the batches around one in training order."""
    last = None if page.steps is None else page.steps - 1
    return PageLinks(
        first=state.url_for(step=None) if step else None,
        back=state.url_for(step=step - 1 or None) if step else None,
        on=state.url_for(step=step + 1) if last is None or step < last else None,
        last=state.url_for(step=last) if last is not None and step < last else None,
    )


def around(view: View, state: ViewState, number: int, at: int | None) -> dict[str, str | None]:
    """Return where the links of a record's page lead: `back`, `on`, and `up` to its grid.

    at: the position of the record in the order of the query; None: the page is alone.
    """
    if at is None:
        start = number // state.count * state.count
        query = dataclasses.replace(
            state.query, order="storage", where=(), label=None, search="", sort=None
        )
        alone = dataclasses.replace(state, query=query)
        total = view.summary().records
        return {
            "up": f"{alone.url_for(start=start)}#r{number}",
            "back": alone.url_for(f"record/{number - 1}") if number else None,
            "on": alone.url_for(f"record/{number + 1}") if number + 1 < total else None,
        }
    query = dataclasses.replace(state.query, step=None)
    found: dict[str, str | None] = {"back": None, "on": None}
    for name, position in (("back", at - 1), ("on", at + 1)):
        if position < 0 or (name == "back" and query.search):
            continue
        cards = view.page(query, position, 1).cards
        if cards:
            found[name] = record_address(state, cards[0].number, cards[0].position)
    if query.order == "training":
        up = state.url_for(step=at // query.batch_size or None)
    else:
        up = state.url_for(start=at if query.search else at // state.count * state.count)
    return found | {"up": f"{up}#r{number}"}


def record_address(state: ViewState, number: int, position: int) -> str:
    """Return the address of a record's page, which knows its position in the order of the query."""
    address = state.url_for(f"record/{number}", step=None, start=0)
    return f"{address}{'&' if '?' in address else '?'}at={position}"
