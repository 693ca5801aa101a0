"""The pages of the viewer, by their addresses: records, one record, the summary, damage, pictures.

Pages are whole without JavaScript; static/viewer.js adds keys. What a page shows is in its address
(address.py), and all that it says is escaped where the templates are filled in (render.py).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Final

from ..errors import OptionError, ShardioError, printable
from ..images.transforms import RandomResizedCrop
from ..machine import processors
from . import charts, grid
from .address import Fields, ViewState, read_number, read_state, write_query
from .render import render
from .results import Crop, Picture
from .server import Answer, failure
from .shell import shell
from .view import View
from .views import Views

_STATIC: Final = {
    "viewer.css": "text/css; charset=utf-8",
    "viewer.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "broken.svg": "image/svg+xml",
}
_WHOLE: Final = 4 << 20  # bytes of an image that a record's page shows as it is stored
_SIDE: Final = 1600  # pixels, of larger ones
_MOST: Final = 4096  # pixels of what is drawn: an overlay takes 18 bytes of memory for each
_CROPS: Final = 4  # epochs whose crops a record's page shows
_CLASSES: Final = 60  # bars of classes on a page, unless all are asked for


class Pages:
    """The site of a dataset, or of its splits."""

    def __init__(self, views: Views) -> None:
        """Show these views."""
        self._views = views
        self._decoders = threading.BoundedSemaphore(max(2, processors()))
        self._pages: dict[str, Callable[[str, Fields, ViewState], Answer]] = {
            "": self._records,
            "record": self._record,
            "summary": self._summary,
            "damage": self._damage,
            "image": self._image,
            "crop": self._crop,
            "go": self._go,
        }

    def __call__(self, path: str, fields: Fields) -> Answer:
        """Answer one request."""
        name, _, rest = path.partition("/")
        if name == "static" and rest in _STATIC:
            return Answer(static(rest), _STATIC[rest])
        try:
            if name not in self._pages or (rest and name not in ("record", "image", "crop")):
                raise IndexError("there is no such page")
            return self._pages[name](rest, fields, read_state(fields))
        except IndexError as error:
            return failure(HTTPStatus.NOT_FOUND, str(error))
        except OptionError as error:
            return failure(HTTPStatus.BAD_REQUEST, str(error))
        except ShardioError as error:
            return failure(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    def _page(self, name: str, view: View, state: ViewState, **values: Any) -> Answer:
        """Fill in the template of a page, and what all pages show around it."""
        own = shell(view.summary(), self._views.splits, state)
        return Answer(render(f"{name or 'records'}.html", current=name, **own, **values))

    # --- records ----------------------------------------------------------------------------------

    def _records(self, rest: str, fields: Fields, state: ViewState) -> Answer:
        if state.fields() != fields:  # a form sends all its fields, most of them empty
            return _moved(state.url_for())
        view = self._views.of(state.split)
        try:
            found = grid.records(view, state)
        except OptionError as error:  # the form stays, so that it can be mended
            found = grid.nothing(str(error))
        return self._page("", view, state, **found)

    def _go(self, rest: str, fields: Fields, state: ViewState) -> Answer:
        """Lead to the record that a number or a whole key names."""
        text = fields.get("record", [""])[-1].strip()
        view = self._views.of(state.split)
        digits = text.replace(",", "").replace("_", "")
        is_number = digits.isascii() and digits.isdigit() and len(digits) < 19
        number = int(digits) if is_number else view.find(text)
        total = view.summary().records
        if number is None or number >= total:
            raise IndexError(
                f"{printable(text)!r} is neither the number of a record, which are 0 to "
                f"{total - 1:,}, nor a whole key; the search finds parts of keys"
            )
        return _moved(ViewState(split=state.split).url_for(f"record/{number}"))

    # --- one record -------------------------------------------------------------------------------

    def _record(self, rest: str, fields: Fields, state: ViewState) -> Answer:
        view = self._views.of(state.split)
        record = view.record(read_number("record", rest))
        crop = _CropForm.read(fields)
        crops: tuple[Crop, ...] = ()
        why = ""
        if view.summary().main_image is not None and not record.damaged:
            try:
                epochs = range(state.query.epoch, state.query.epoch + _CROPS)
                crops = view.crops(record.number, crop.transform, epochs, seed=state.query.seed)
            except (ShardioError, KeyError) as error:
                why = str(error)
        at = read_number("at", fields["at"][-1]) if "at" in fields else None
        return self._page(
            "record",
            view,
            state,
            record=record,
            side=None if record.bytes <= _WHOLE else _SIDE,
            crop=crop,
            crops=crops,
            fields=fields,
            why_no_crops=why,
            masks=[field.name for field in record.fields if field.mask],
            around=grid.around(view, state, record.number, at),
        )

    # --- the dataset ------------------------------------------------------------------------------

    def _summary(self, rest: str, fields: Fields, state: ViewState) -> Answer:
        view = self._views.of(state.split)
        by = fields.get("by", ["label"])[-1]
        found = view.histograms(state.query)
        most = len(found.classes) if "all" in fields else _CLASSES

        chosen = ViewState(
            dataclasses.replace(state.query, search="", step=None), split=state.split
        )

        def sorted_by(order: str, whole: bool = False) -> str:
            address = state.url_for("summary")
            more = write_query({"by": [order]} | ({"all": ["1"]} if whole else {}))
            return address + (more.replace("?", "&") if "?" in address else more)

        return self._page(
            "summary",
            view,
            state,
            found=found,
            narrowed=found.records < view.summary().records,
            bars=charts.class_bars(found.classes, by, most),
            histograms=[charts.histogram(one) for one in found.bins],
            by=by,
            summary_address=sorted_by,
            class_address=lambda label: chosen.url_for(
                **{"where": (*state.query.where, "label=null")}
                if label is None
                else {"label": label}
            ),
            where_address=lambda where: chosen.url_for(where=(*state.query.where, *where)),
        )

    def _damage(self, rest: str, fields: Fields, state: ViewState) -> Answer:
        view = self._views.of(state.split)
        checked = None
        if "check" in fields:
            checked = view.check(read_number("check", fields["check"][-1]))
        return self._page(
            "damage", view, state, checked=checked, damaged=view.damaged(), rejected=view.rejected()
        )

    # --- pictures ---------------------------------------------------------------------------------

    def _image(self, rest: str, fields: Fields, state: ViewState) -> Answer:
        side = min(read_number("side", fields["side"][-1]), _MOST) if "side" in fields else None
        field = fields["field"][-1] if "field" in fields else None
        view, number = self._views.of(state.split), read_number("record", rest)
        overlay = "overlay" in fields
        if overlay and side is None:
            side = _MOST
        return self._picture(lambda: view.image(number, field, side, overlay=overlay))

    def _crop(self, rest: str, fields: Fields, state: ViewState) -> Answer:
        view, number = self._views.of(state.split), read_number("record", rest)
        transform, query = _CropForm.read(fields).transform, state.query
        return self._picture(
            lambda: view.crop_image(number, transform, query.epoch, seed=query.seed)
        )

    def _picture(self, make: Callable[[], Picture]) -> Answer:
        """Make a picture, or answer by one that says that there is none."""
        try:
            with self._decoders:
                data, kind = make()
        except (ShardioError, KeyError):
            return Answer(static("broken.svg"), _STATIC["broken.svg"], HTTPStatus.NOT_FOUND)
        return Answer(data, kind, cacheable=True)


@dataclasses.dataclass(frozen=True)
class _CropForm:
    """What the form of the crops asks for."""

    size: int = 224
    scale: float = 0.08

    @staticmethod
    def read(fields: Fields) -> _CropForm:
        """Read it from an address. Raises OptionError."""
        given = {name: fields[name][-1] for name in ("size", "scale") if fields.get(name, [""])[-1]}
        size = read_number("size", given.get("size", "224"))
        try:
            scale = float(given.get("scale", "0.08"))
        except ValueError:
            scale = 0.0
        if not (0 < scale <= 1 and 0 < size <= _SIDE):
            raise OptionError(
                f"crops: expected a size of 1 to {_SIDE}, and a least scale above 0 and up to 1"
            )
        return _CropForm(size, scale)

    @property
    def transform(self) -> RandomResizedCrop:
        """Return what draws the crops."""
        return RandomResizedCrop(self.size, scale=(self.scale, 1.0))


@cache
def static(name: str) -> bytes:
    """Return a file of the viewer's own."""
    return files("shardio.viewer").joinpath("static", name).read_bytes()


def _moved(address: str) -> Answer:
    """Lead the browser to another page here."""
    return Answer(b"", status=HTTPStatus.SEE_OTHER, location=address)
