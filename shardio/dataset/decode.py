"""A stored sample to what the user asked for: which fields, decoded how, through which functions.

    sample --decode--> image fields --transform--> the image; target_transform: label --map--> item

The first image field is a photograph: it becomes RGB. What other image fields hold may be class
ids, or depths: they are handed out as stored, unless `decode` says otherwise.

A built-in transform (images/transforms.py) takes the encoded bytes itself, since it may decode less
than all of them, and one random word, so that its result does not depend on who reads the sample.
Any other transform takes the decoded image. With `decode="cuda"` the transform plans the crop of
the first image, and the trainer's device makes it (images/device_crop.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from time import perf_counter
from typing import Any, Literal

import numpy as np

from ..errors import DecodeError, OptionError, printable, there_are
from ..formats.sample import Sample, Schema
from ..images import decode, transforms
from ..images.device_crop import plan_crop
from ..names import KEY
from ..units import check_int

How = Literal["pil", "numpy", "gray", "stored", "cuda"] | Callable[[bytes], Any] | None
Decode = How | Mapping[str, How]
Transform = Callable[..., Any]
_Function = Callable[..., Any] | None  # that decodes an image field; None: nothing does

IMAGE, LABEL = "image", "label"
# What the names say of the first image field; of another one that they are given for; and of other
# ones where they are given for all.
_MAIN: dict[str, Callable[..., Any]] = {
    "pil": decode.decode,
    "numpy": decode.pixels,
    "gray": decode.gray,
    "stored": decode.stored,
    "cuda": decode.decode,  # where a worker decodes it
}
_NAMED_ALONE = _MAIN | {"numpy": decode.stored_pixels}
_OTHERS = dict.fromkeys(_MAIN, decode.stored) | {"numpy": decode.stored_pixels}
_BY_US = (*_MAIN.values(), decode.stored_pixels)
_BY_TRANSFORM = (None, decode.decode, decode.pixels, decode.stored, decode.stored_pixels)
_EXPECTED = "'pil', 'numpy', 'gray', 'stored', None or a function of bytes"


class ThisRecord:
    """Tell which record a thread that makes items is at, and where its image may be written.

    read, decoded  when each was done, by time.perf_counter
    out            a built-in transform writes its result there, where it fits: (H, W, 3) uint8
    note           told (number, read, key) of each record that it begins; None: nobody asks
    filled         the last item is of another record than that of its row, which was skipped
    """

    __slots__ = ("decoded", "filled", "key", "note", "number", "out", "read")

    def __init__(self) -> None:
        self.number = -1  # of the record in the dataset
        self.filled = False
        self.key = b""
        self.read = self.decoded = 0.0
        self.out: Any = None
        self.note: Callable[[int, float, bytes], None] | None = None

    @property
    def record(self) -> str:
        """Return the name of the record that is being made; empty when none is."""
        return "" if self.number < 0 else record_name(self.number, self.key)


def record_name(number: int, key: bytes | str) -> str:
    """Return the name of a record in messages."""
    return f"record {number:,} of the dataset, {printable(key)}"


class Decoder:
    """Turn samples into items: dicts of all fields, or tuples of the `fields` given, in that order.

    decode            of fields of kind image. "pil": the first as a PIL image, RGB, upright, others
                      as stored. "numpy": as arrays of these, (H, W, 3) uint8. "cuda": the first as
                      a DeviceCrop, others as stored. None: as bytes. Or a function of those bytes.
                      Or a mapping of these by field
    transform         of the field `image`, or of the first field of kind image
    target_transform  of the field `label`
    map               of the item; and of a numpy Generator of its own, where it takes two arguments
    max_pixels        of an image, for `decode` and a built-in transform
    planes            what a built-in transform made, as an item has it that is not collated by us

    `wants_draw`: whether the transform, or map, is given a random word. `draws`: whether the item
    depends on it; of a transform of the user's own nobody knows. `only_arrays`: whether nothing
    is done but to decode images to arrays. `only_crops`: the built-in transform that makes the
    image, where nothing else is done. `only_picks`: whether nothing is done to fields at all.
    `encoded`: the fields of items that are image files, by name, or by place in tuples. `maps`:
    whether items are what a user's map makes of samples. `device_crop`: the shape and interpolation
    of DeviceCrops, with "cuda". Raises OptionError.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        fields: Sequence[str] | None = None,
        decode: Decode = "pil",
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        map: Callable[..., Any] | None = None,
        max_pixels: int | None = None,
        planes: Callable[[Any], Any] | None = None,
    ) -> None:
        self.fields = None if fields is None else _check_fields(schema, fields)
        names = schema.names if self.fields is None else self.fields
        main, label = schema.main_image, LABEL if LABEL in schema.names else None
        limit = {} if max_pixels is None else {"max_pixels": check_int("max_pixels", max_pixels, 1)}
        _check_takes("transform", transform, main, names, "of kind image")
        _check_takes("target_transform", target_transform, label, names, f"called {LABEL!r}")
        functions = _functions(decode, schema.images, main)
        self._main = main or ""
        self._crop: _Crop | None = None
        self._transform: Transform | None = None
        self.device_crop = _device_crop(decode, self._main, transform)
        if isinstance(transform, transforms.Transform):
            on_device = self.device_crop is not None
            self._crop = _Crop(transform, self._main, names, functions, on_device, **limit)
        elif transform is not None:
            self._transform = _of_image(transform, functions, self._main)
        self._keyed = KEY in names  # users get keys as str
        self._target_transform = target_transform
        self._map = map
        self.maps = map is not None
        self._map_draws = map is not None and _takes_generator(map, names)
        cropped = () if self._crop is None else self._crop.produces
        self._planes, self._planar = planes, () if planes is None else cropped
        needed = {name: one for name, one in functions.items() if name in names}
        self._decoded = _to_decode(needed, cropped, limit)
        self.draws = self._map_draws or isinstance(transform, transforms.RandomResizedCrop)
        self.wants_draw = self._map_draws or self._crop is not None
        users = any(one is not None for one in (transform, target_transform, map))
        self.only_picks = not (self._decoded or users)
        self.encoded = self._files(functions, cropped, names)
        self.only_arrays = not (users or limit) and functions.get(IMAGE) is _MAIN["numpy"]
        self.only_crops = self._only_crops()
        self.plain = self.only_picks and not self.fields
        # Where nothing is done but to pick fields: 0.5 us less a record.
        self.pick: Callable[[Sample], tuple[Any, ...]] | None = None
        if len(self.fields or ()) > 1 and self.only_picks and not self._keyed:
            self.pick = itemgetter(*names)

    def _only_crops(self) -> transforms.Transform | None:
        """Return the built-in transform, where many images can be made by one call of it."""
        others = self.maps or self._target_transform is not None
        return None if self._crop is None or others else self._crop.alone

    def _files(
        self, functions: Mapping[str, _Function], cropped: Sequence[str], names: Sequence[str]
    ) -> frozenset[int | str]:
        """Return the fields of items that are image files, by name or by place.

        functions: what decodes each image field; None: nothing. names: of an item's fields.
        """
        files = {name for name, one in functions.items() if one is None} - {*cropped}
        if self._transform is not None:
            files.discard(self._main)
        if self.maps:  # what its items hold nobody knows
            files.clear()
        by_name = self.fields is None
        return frozenset(name if by_name else i for i, name in enumerate(names) if name in files)

    @property
    def image_column(self) -> tuple[int | str, tuple[int, ...]] | None:
        """Return the field of an item that a built-in transform makes an array of, and its shape.

        None where none does, and with a map: its function may keep what it is given.
        """
        if self._crop is None or self.maps or self.device_crop:
            return None
        return self._main if self.fields is None else self.fields.index(
            self._main
        ), self._crop.shape

    def __call__(
        self,
        sample: Sample,
        number: int,
        draw: int = 0,
        progress: ThisRecord | None = None,
        planes: bool = False,
    ) -> Any:
        """Make the item of a sample, which may be changed.

        number: of the record in the dataset, for messages.
        planes: whether what a built-in transform makes becomes `planes` of it; before a map it does
        in any case. Raises DecodeError, naming the record; what functions of the user raise passes.
        """
        if self._keyed:  # names.key_text, without the call
            sample[KEY] = sample[KEY].decode("utf-8", "surrogateescape")
        try:
            for name, function in self._decoded:
                if sample[name] is not None:
                    sample[name] = function(sample[name])
            if self._crop is not None:
                self._crop(sample, draw, number, progress)
            elif progress is not None:
                progress.decoded = perf_counter()
            if self._transform is not None and (image := sample[self._main]) is not None:
                sample[self._main] = image = self._transform(image)
                if image is None or (type(image) is dict and IMAGE in image):
                    raise _unusable("transform", image)
        except DecodeError as error:
            raise DecodeError(f"{record_name(number, sample[KEY])}: {error}") from error
        if self._target_transform is not None:
            sample[LABEL] = self._target_transform(sample[LABEL])
        if self._planar and (planes or self._map is not None):
            for name in self._planar:
                if sample[name] is not None:
                    sample[name] = self._planes(sample[name])  # type: ignore[misc]
        item: Any = sample
        if self.fields is not None:
            item = tuple([sample[name] for name in self.fields])
        if self._map is None:
            return item
        if self._map_draws:
            item = self._map(item, np.random.Generator(np.random.Philox(key=draw)))
        else:
            item = self._map(item)
        if item is None:
            raise _unusable("map", None)
        return item


class _Crop:
    """Decode and crop images of a sample by a built-in transform, all by one draw.

    on_device: whether the crop of the main image is only planned. produces: the fields it makes.
    """

    def __init__(
        self,
        transform: transforms.Transform,
        main: str,
        names: Sequence[str],
        functions: Mapping[str, _Function],
        on_device: bool,
        max_pixels: int | None = None,
    ) -> None:
        """Check that the fields are there. Raises OptionError."""
        _check_together(transform, main, names, functions)
        if max_pixels is not None and transform.max_pixels is None:
            transform = transform.limited(max_pixels)
        self.main, self._transform, self._on_device = main, transform, on_device
        self.produces = transform.fields or (main,)
        self._alike = tuple(n for n in self.produces if functions.get(n) is _MAIN["pil"])
        self._together = transform.boxes is not None or len(self.produces) > 1
        self.shape = (*transform.shape, 3)
        single = main == IMAGE and not (self._together or on_device)
        self.alone = transform if single and transforms.crops_many(transform) else None

    def __call__(self, sample: Sample, draw: int, number: int, progress: ThisRecord | None) -> None:
        """Replace the images by their crops, the first one in `progress.out` where it fits.

        number: of the record in the dataset.
        """
        main, out = self.main, None if progress is None else progress.out
        if out is not None and out.shape != self.shape:
            out = None
        make: Callable[[Any, int], Any] = partial(self._transform, out=out)
        if self._on_device:
            make = partial(plan_crop, self._transform, number=number)
        if self._together:
            self._transform.together(sample, main, self._alike, draw, make)
        elif sample[main] is not None:
            sample[main] = make(sample[main], draw)
        else:
            return
        if progress is not None:
            progress.decoded = perf_counter()


# --- options --------------------------------------------------------------------------------------


def check_function(name: str, given: Any) -> None:
    """Raise OptionError unless `given`, an option of this name, is None or can be called.

    A class can be called, but makes an object of its first argument: `transform=CenterCrop` would
    take an image as the size. Conversions (int, list, numpy.float32) are no such mistake.
    """
    if given is None:
        return
    if isinstance(given, type):
        if given.__module__.partition(".")[0] in ("builtins", "numpy"):
            return
        own = given.__name__
        size = "224" if issubclass(given, transforms.Transform) else "..."
        example = f"{name}={own}({size})"
        raise OptionError(
            f"{name} is the class {own}: expected an object of it, {example}, or a function; "
            f"where the class itself is to be called: {name}=lambda value: {own}(value)"
        )
    if not callable(given):
        raise OptionError(f"{name} is {printable(repr(given))}: expected a function")


def _device_crop(decode: Decode, main: str, transform: Any) -> tuple[tuple[int, int], str] | None:
    """Return (H, W) and interpolation of what the device makes of `main`; None: it makes nothing.

    Raises OptionError.
    """
    by_field = decode if isinstance(decode, Mapping) else {main: decode}
    asked = [name for name, how in by_field.items() if isinstance(how, str) and how == "cuda"]
    if not asked:
        return None
    if asked != [main]:
        raise OptionError(
            f"decode: 'cuda' is given for {_listed(asked)}, expected the first image field alone, "
            f"{main!r}: give 'pil', 'numpy' or 'stored' for others"
        )
    if not isinstance(transform, transforms.Transform):
        raise OptionError(
            "decode='cuda' is given, but no built-in transform, which tells the device its crops: "
            "give transform=RandomResizedCrop(...) or CenterCrop(...), and augment batches on the "
            "device; or decode='pil'"
        )
    if transform.interpolation == "nearest":
        raise OptionError(
            f"{type(transform).__name__}: interpolation is 'nearest', which decode='cuda' does not "
            "have: give another one, or decode='pil'"
        )
    return transform.shape, transform.interpolation


def _functions(decode: Decode, images: Sequence[str], main: str | None) -> dict[str, _Function]:
    """Return what decodes each image field; None: nothing. Raises OptionError."""
    by_field: Mapping[str, How] = {}
    if isinstance(decode, Mapping):
        by_field, decode = decode, "pil"
        for name in by_field:
            if name not in images:
                known = f"there are {_listed(images)}" if images else "there are none"
                raise OptionError(f"decode: {printable(repr(name))} is no image field; {known}")
        for name, how in by_field.items():
            _check_how(f"decode[{name!r}]", how, "; or 'cuda'" if name == main else "")
    else:
        _check_how("decode", decode, ", or a mapping of these by field; or 'cuda'")
    found: dict[str, _Function] = {}
    for name in images:
        how = by_field.get(name, decode)
        named = _MAIN if name == main else _NAMED_ALONE if name in by_field else _OTHERS
        found[name] = named[how] if isinstance(how, str) else how
    return found


def _to_decode(
    functions: Mapping[str, _Function], produced: Sequence[str], limit: Mapping[str, int]
) -> list[tuple[str, Callable[..., Any]]]:
    """Return the fields to decode, and what decodes each, with the limit of pixels.

    produced: the fields that a built-in transform makes, which decodes images itself.
    """
    return [
        (name, partial(function, **limit) if limit and function in _BY_US else function)
        for name, function in functions.items()
        if function is not None and not (name in produced and function in _BY_TRANSFORM)
    ]


def _check_how(shown: str, how: Any, more: str) -> None:
    if isinstance(how, type):
        check_function(shown, how)
    if how is not None and not callable(how) and not (isinstance(how, str) and how in _MAIN):
        raise OptionError(f"{shown} is {printable(repr(how))}: expected {_EXPECTED}{more}")


def _check_takes(
    option: str, function: Any, field: str | None, names: Sequence[str], kind: str
) -> None:
    """Raise OptionError unless an option is None, or a function of a field that samples have.

    field: None where the dataset has none of this kind, as messages call it.
    """
    check_function(option, function)
    if function is not None and field not in names:
        lacks = f"the dataset has no field {kind}; there are {_listed(names)}"
        if field is not None:
            lacks = f"{field!r} is not among the fields {_listed(names)}"
        raise OptionError(f"{option} is given, but {lacks}. Use map for others")


def _check_together(
    transform: transforms.Transform,
    main: str,
    names: Sequence[str],
    functions: Mapping[str, _Function],
) -> None:
    """Raise OptionError unless a sample has the fields that one draw is for.

    functions: what decodes each image field; None: nothing.
    """
    where, several = type(transform).__name__, transform.fields or (main,)
    images = [one for one in functions if one in names]
    for name in several:
        if name not in images:
            raise OptionError(
                f"{where}: fields has {name!r}, expected image fields that samples have: "
                f"{_listed(images)}"
            )
    if main not in several:
        raise OptionError(
            f"{where}: fields is {several!r}, without {main!r}, the first image field: add it, or "
            "give map= for the others alone"
        )
    if transform.boxes is not None and (
        transform.boxes not in names or transform.boxes in functions
    ):
        raise OptionError(
            f"{where}: boxes is {transform.boxes!r}, expected a field that samples have: "
            + _listed([one for one in names if one not in functions])
        )
    seen = [one for one in images if one != main and functions[one] is not None]
    if seen and not transform.fields:
        raise OptionError(
            f"transform: {where} crops {main!r} alone, and no longer fits {seen[0]!r}, "
            f"which samples have too: give {where}(..., fields={(main, *seen)!r}), which "
            f"crops all alike, or fields={(main,)!r} where they are to differ"
        )


def _takes_names_only(function: Callable[..., Any]) -> bool:
    """Return True if a function is called with named arguments, as those of albumentations are."""
    if any(
        kind.__module__.partition(".")[0] == "albumentations" for kind in type(function).__mro__
    ):
        return True
    kinds = [one.kind for one in _parameters(function) or ()]
    return bool(kinds) and set(kinds) <= {
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    }


def _unusable(name: str, result: Any) -> OptionError:
    """Return the error for what no training can use, of a function of the user's."""
    if result is None:
        return OptionError(f"{name} returned None: does it change its argument, without `return`?")
    return OptionError(
        f"{name} returned a dict: it is given the image alone, and returns the image. For what "
        "takes and returns several fields give map=, and a transform of albumentations itself"
    )


def _takes_generator(function: Callable[..., Any], names: Sequence[str]) -> bool:
    """Return True if a map takes a generator beside the sample. Raises OptionError."""
    check_function("map", function)
    expected = "expected a function of a sample, or of a sample and a numpy.random.Generator"
    if _takes_names_only(function):
        raise OptionError(
            f"map is called with named arguments only ({type(function).__name__}): {expected}, as "
            "in map=lambda sample: sample | augment(image=sample['image'], mask=sample['mask'])"
        )
    parameters = _parameters(function)
    if parameters is None:
        return False
    several = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters)
    places = [one for one in parameters if one.kind in _POSITIONAL]
    needed = sum(one.default is inspect.Parameter.empty for one in places)
    if needed > 2 or (not places and not several):
        raise OptionError(f"map takes {needed} arguments: {expected}")
    if needed == 2 and places[1].name in {*names, "target", "targets", "labels", "masks", "boxes"}:
        raise OptionError(
            f"map takes a second argument called {places[1].name!r}, which would be a "
            f"numpy.random.Generator: {expected}; a sample has all its fields"
        )
    return needed == 2


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return a function's parameters; None where nobody can say, as of many in C."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _of_image(transform: Transform, functions: dict[str, _Function], main: str) -> Transform:
    """Return a user's transform as a function of the image; one that takes names gets an array."""
    if not _takes_names_only(transform):
        return transform
    if functions.get(main) is _MAIN["pil"]:
        functions[main] = _MAIN["numpy"]
    return partial(_call_by_name, transform)


def _call_by_name(transform: Callable[..., Any], image: Any) -> Any:
    """Call a transform that takes named arguments for the image alone."""
    if isinstance(image, bytes):
        image = _MAIN["numpy"](image)
    return transform(image=image if isinstance(image, np.ndarray) else np.array(image))["image"]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _check_fields(schema: Schema, fields: Sequence[str]) -> tuple[str, ...]:
    if isinstance(fields, str):
        raise OptionError(f"fields is {fields!r}: expected several, such as ({fields!r},)")
    for name in fields:
        if name not in schema.names:
            raise OptionError(f"no field is called {name!r}; {there_are(schema.names, str(name))}")
    if not fields:
        raise OptionError(f"fields is empty; this dataset has {', '.join(schema.names)}")
    return tuple(fields)
