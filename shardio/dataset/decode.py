"""A stored sample to what the user asked for: which fields, decoded how, through which functions.

    sample --decode--> image fields --transform--> the image; target_transform: label --map--> item

The first image field is a photograph: it becomes RGB. What other image fields hold may be class
ids, or depths: they are handed out as stored, unless `decode` says otherwise.

A built-in transform (images/transforms.py) takes the encoded bytes itself, since it may decode less
than all of them, and one random word, so that its result does not depend on who reads the sample.
Any other transform takes the decoded image.
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
from ..formats.sample import Sample, Schema, give_text_key
from ..images import decode as image
from ..images import transforms
from ..names import KEY
from ..units import check_int

How = Literal["pil", "numpy", "gray", "stored"] | Callable[[bytes], Any] | None
Decode = How | Mapping[str, How]
Transform = Callable[..., Any]

IMAGE, LABEL = "image", "label"
# What the names say of the first image field; of another one that they are given for; and of other
# ones where they are given for all.
_MAIN: dict[str, Callable[..., Any]] = {
    "pil": image.decode,
    "numpy": image.pixels,
    "gray": image.gray,
    "stored": image.stored,
}
_NAMED_ALONE = _MAIN | {"numpy": image.stored_pixels}
_OTHERS = dict.fromkeys(_MAIN, image.stored) | {"numpy": image.stored_pixels}
_BY_US = (*_MAIN.values(), image.stored_pixels)
_BY_TRANSFORM = (None, image.decode, image.pixels, image.stored, image.stored_pixels)
_EXPECTED = "'pil', 'numpy', 'gray', 'stored', None or a function of bytes"


class Work:
    """What a thread that makes items says of the one it is at, and where its image may be written.

    read, decoded  when each was done, by time.perf_counter
    out            a built-in transform writes its result there, where it fits: (H, W, 3) uint8
    note           told (number, read, key) of each record that it begins; None: nobody asks
    """

    __slots__ = ("decoded", "key", "note", "number", "out", "read")

    def __init__(self) -> None:
        self.number = -1  # of the record in the dataset
        self.key = b""
        self.read = self.decoded = 0.0
        self.out: Any = None
        self.note: Callable[[int, float, bytes], None] | None = None

    @property
    def record(self) -> str:
        """The record that is being made, for messages; empty when none is."""
        return "" if self.number < 0 else record_name(self.number, self.key)


def record_name(number: int, key: bytes | str) -> str:
    """What messages call a record."""
    return f"record {number:,} of the dataset, {printable(key)}"


class Decoder:
    """Samples to items: dicts of all fields, or tuples of the `fields` given, in that order.

    decode            of fields of kind image. "pil": the first as a PIL image, RGB, upright, others
                      as stored. "numpy": as arrays of these, (H, W, 3) uint8. None: as bytes. Or a
                      function of those bytes. Or a mapping of these by field
    transform         of the field `image`, or of the first field of kind image
    target_transform  of the field `label`
    map               of the item; and of a numpy Generator of its own, where it takes two arguments
    max_pixels        of an image, for `decode` and a built-in transform
    planes            what a built-in transform made, as an item has it that is not collated by us

    `wants_draw`: whether the transform, or map, draws random words. `only_arrays`: whether nothing
    is done but to decode images to arrays. Raises OptionError.
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
        images, main = schema.images, schema.main_image
        max_pixels = None if max_pixels is None else check_int("max_pixels", max_pixels, 1)
        for name, given, field in (
            ("transform", transform, main),
            ("target_transform", target_transform, LABEL if LABEL in schema.names else None),
        ):
            check_function(name, given)
            if given is not None and field not in names:
                raise OptionError(
                    f"{name} is given, but "
                    + (
                        f"{field!r} is not among the fields {_listed(names)}"
                        if field is not None
                        else "the dataset has no field "
                        + ("of kind image" if name == "transform" else f"called {LABEL!r}")
                        + f"; there are {_listed(names)}. Use map for others"
                    )
                )
        self._keyed = KEY in names  # users get keys as str
        functions = _functions(decode, images, main)
        built_in = transform if isinstance(transform, transforms.Transform) else None
        if built_in is not None:
            if max_pixels is not None and built_in.max_pixels is None:
                built_in = built_in.limited(max_pixels)
            assert main is not None
            _check_together(built_in, main, names, images)
            seen = [n for n in images if n in names and n != main and functions[n] is not None]
            if seen and not built_in.fields:
                where = type(built_in).__name__
                raise OptionError(
                    f"transform: {where} crops {main!r} alone, and no longer fits {seen[0]!r}, "
                    f"which samples have too: give {where}(..., fields={(main, *seen)!r}), which "
                    f"crops all alike, or fields={(main,)!r} where they are to differ"
                )
        elif transform is not None and _takes_names_only(transform):
            transform = _ByName(transform)
            if main is not None and functions.get(main) is image.decode:
                functions[main] = image.pixels
        self._transform = transform if built_in is None else built_in
        self._main = main if transform is not None else None
        self._target_transform = target_transform
        self._map = map
        self._map_draws = map is not None and _takes_generator(map, names)
        self._planes = planes
        # Of built-in transforms: the fields that they make; of them those like the first.
        self._made: tuple[str, ...] = ()
        self._alike: tuple[str, ...] = ()
        self._together = False
        if built_in is not None and main is not None:
            self._made = built_in.fields or (main,)
            self._alike = tuple(n for n in self._made if functions.get(n) is image.decode)
            self._together = built_in.boxes is not None or len(self._made) > 1
        self._built_in = built_in is not None
        self._shape = None if built_in is None else (*built_in.size, 3)  # type: ignore[misc]
        limit = {} if max_pixels is None else {"max_pixels": max_pixels}
        self._decoded = [
            (name, partial(function, **limit) if limit and function in _BY_US else function)
            for name, function in functions.items()
            if name in names
            and function is not None
            and not (name in self._made and function in _BY_TRANSFORM)
        ]
        self.wants_draw = self._built_in or self._map_draws
        users = transform or target_transform or map
        self.only_arrays = not (users or limit) and functions.get(IMAGE) is image.pixels
        self.plain = not (self._decoded or users or self.fields)
        # Where nothing is done but to pick fields: 0.5 us less a record.
        self.pick: Callable[[Sample], tuple[Any, ...]] | None = None
        if self.fields is not None and len(self.fields) > 1 and not (self._decoded or users):
            self.pick = None if self._keyed else itemgetter(*self.fields)

    @property
    def draws(self) -> bool:
        """Whether the transform, or map, is one that draws; of the user's own nobody knows."""
        return isinstance(self._transform, transforms.RandomResizedCrop) or self._map_draws

    @property
    def maps(self) -> bool:
        """Whether items are what a function of the user's makes of samples."""
        return self._map is not None

    @property
    def image_place(self) -> int | str | None:
        """The field of an item that a built-in transform makes, if one does.

        None with a map: its function may keep what it is given.
        """
        if not self._built_in or self._main is None or self._map is not None:
            return None
        return self._main if self.fields is None else self.fields.index(self._main)

    def __call__(
        self,
        sample: Sample,
        number: int,
        draw: int = 0,
        work: Work | None = None,
        planes: bool = False,
    ) -> Any:
        """number: of the record in the dataset, for messages. May change the sample given.

        planes: whether what a built-in transform makes becomes `planes` of it; before a map it does
        in any case. Raises DecodeError, naming the record; what functions of the user raise passes.
        """
        if self._keyed:
            give_text_key(sample)
        try:
            for name, function in self._decoded:
                if sample[name] is not None:
                    sample[name] = function(sample[name])
            if work is not None and not self._built_in:
                work.decoded = perf_counter()
            if self._main is not None and (self._together or sample[self._main] is not None):
                if not self._built_in:
                    made = self._transform(sample[self._main])  # type: ignore[misc]
                    if made is None or (type(made) is dict and IMAGE in made):
                        raise _unusable("transform", made)
                    sample[self._main] = made
                else:
                    out = None if work is None else work.out
                    if out is not None and out.shape != self._shape:
                        out = None
                    if self._together:
                        self._transform.together(sample, self._main, self._alike, draw, out)  # type: ignore[union-attr]
                    else:
                        sample[self._main] = self._transform(sample[self._main], draw, out)  # type: ignore[misc]
                    if work is not None:
                        work.decoded = perf_counter()
        except DecodeError as error:
            raise DecodeError(f"{record_name(number, sample[KEY])}: {error}") from error
        if self._target_transform is not None:
            sample[LABEL] = self._target_transform(sample[LABEL])
        if self._made and self._planes is not None and (planes or self._map is not None):
            for name in self._made:
                if sample[name] is not None:
                    sample[name] = self._planes(sample[name])
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


def _functions(
    decode: Decode, images: Sequence[str], main: str | None
) -> dict[str, Callable[..., Any] | None]:
    """What decodes each image field; None: nothing. Raises OptionError."""
    by_field: Mapping[str, How] = {}
    if isinstance(decode, Mapping):
        by_field, decode = decode, "pil"
        for name in by_field:
            if name not in images:
                known = f"there are {_listed(images)}" if images else "there are none"
                raise OptionError(f"decode: {printable(repr(name))} is no image field; {known}")
        for name, how in by_field.items():
            _check_how(f"decode[{name!r}]", how, "")
    else:
        _check_how("decode", decode, ", or a mapping of these by field")
    found: dict[str, Callable[..., Any] | None] = {}
    for name in images:
        how = by_field.get(name, decode)
        named = _MAIN if name == main else _NAMED_ALONE if name in by_field else _OTHERS
        found[name] = named[how] if isinstance(how, str) else how
    return found


def _check_how(shown: str, how: Any, more: str) -> None:
    if isinstance(how, type):
        check_function(shown, how)
    if how is not None and not callable(how) and not (isinstance(how, str) and how in _MAIN):
        raise OptionError(f"{shown} is {printable(repr(how))}: expected {_EXPECTED}{more}")


def _check_together(
    transform: transforms.Transform, main: str, names: Sequence[str], images: Sequence[str]
) -> None:
    """Raise OptionError unless a sample has the fields that one draw is for."""
    where, several = type(transform).__name__, transform.fields or (main,)
    for name in several:
        if name not in images or name not in names:
            known = [one for one in images if one in names]
            raise OptionError(
                f"{where}: fields has {name!r}, expected image fields that samples have: "
                f"{_listed(known)}"
            )
    if main not in several:
        raise OptionError(
            f"{where}: fields is {several!r}, without {main!r}, the first image field: add it, or "
            "give map= for the others alone"
        )
    if transform.boxes is not None and (transform.boxes not in names or transform.boxes in images):
        raise OptionError(
            f"{where}: boxes is {transform.boxes!r}, expected a field that samples have: "
            + _listed([one for one in names if one not in images])
        )


def _takes_names_only(function: Callable[..., Any]) -> bool:
    """Whether a function is called with named arguments, as those of albumentations are."""
    if any(
        kind.__module__.partition(".")[0] == "albumentations" for kind in type(function).__mro__
    ):
        return True
    kinds = [one.kind for one in _parameters(function) or ()]
    return bool(kinds) and set(kinds) <= {
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    }


def _unusable(name: str, made: Any) -> OptionError:
    """Return the error for what no training can use, of a function of the user's."""
    if made is None:
        return OptionError(f"{name} returned None: does it change its argument, without `return`?")
    return OptionError(
        f"{name} returned a dict: it is given the image alone, and returns the image. For what "
        "takes and returns several fields give map=, and a transform of albumentations itself"
    )


def _takes_generator(function: Callable[..., Any], names: Sequence[str]) -> bool:
    """Whether a map takes a generator beside the sample. Raises OptionError for what is no map."""
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
    """Its parameters; None where nobody can say, as of many functions in C."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


class _ByName:
    """A transform that is called with named arguments, as one of the image alone."""

    def __init__(self, transform: Callable[..., Any]) -> None:
        self._transform = transform

    def __call__(self, value: Any) -> Any:
        if isinstance(value, bytes):
            value = image.pixels(value)
        array = value if isinstance(value, np.ndarray) else np.array(value)
        return self._transform(image=array)["image"]


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
