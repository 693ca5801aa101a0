"""A stored sample to what the user asked for: which fields, decoded how, through which transform.

    sample --decode--> image fields as PIL images --transform--> the image; target_transform: label

A built-in transform (image.Transform) takes the encoded bytes itself, since it may decode less than
all of them, and one random word, so that its result does not depend on who reads the sample. Any
other transform takes the decoded image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Literal

from . import image
from .errors import DecodeError, OptionError, printable
from .sample import KEY, Sample, Schema, give_text_key

Decode = Literal["pil", "numpy"] | Callable[[bytes], Any] | None
Transform = Callable[..., Any]

IMAGE, LABEL = "image", "label"
_OWN = {"pil": image.decode, "numpy": image.pixels}


class Work:
    """What a thread that makes items says of the one it is at, and where its image may be written.

    read, decoded  when each was done, by time.perf_counter
    out            a built-in transform writes its result there, where it fits: (H, W, 3) uint8
    """

    __slots__ = ("decoded", "key", "number", "out", "read")

    def __init__(self) -> None:
        self.number = -1  # of the record in the dataset
        self.key = b""
        self.read = self.decoded = 0.0
        self.out: Any = None


class Decoder:
    """Samples to items: dicts of all fields, or tuples of the `fields` given, in that order.

    decode            "pil": fields of kind image as PIL images, RGB, upright. "numpy": as arrays
                      of these, (H, W, 3) uint8. None: as bytes. Or a function of those bytes
    transform         of the field `image`, or of the first field of kind image
    target_transform  of the field `label`

    `wants_draw`: whether the transform draws random words. `only_arrays`: whether nothing is done
    but to decode images to arrays. Raises OptionError.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        fields: Sequence[str] | None = None,
        decode: Decode = "pil",
        transform: Transform | None = None,
        target_transform: Transform | None = None,
    ) -> None:
        self.fields = None if fields is None else _check_fields(schema, fields)
        names = schema.names if self.fields is None else self.fields
        images = [name for name, kind in schema.fields if kind == "image"]
        main = IMAGE if IMAGE in schema.names else next(iter(images), None)
        own = decode in ("pil", "numpy")
        if decode is not None and not own and not callable(decode):
            raise OptionError(
                f"decode is {decode!r}: expected 'pil', 'numpy', None or a function of bytes"
            )
        for name, given, field in (
            ("transform", transform, main),
            ("target_transform", target_transform, LABEL if LABEL in schema.names else None),
        ):
            if given is not None and not callable(given):
                raise OptionError(f"{name} is {given!r}: expected a function")
            if given is not None and field not in names:
                raise OptionError(
                    f"{name} is given, but "
                    + (
                        f"{field!r} is not among the fields {', '.join(map(repr, names))}"
                        if field is not None
                        else "the dataset has no field "
                        + ("of kind image" if name == "transform" else f"called {LABEL!r}")
                        + f"; there are {', '.join(map(repr, names))}. Use collate_fn for others"
                    )
                )
        self._keyed = KEY in names  # users get keys as str
        built_in = isinstance(transform, image.Transform)
        self.wants_draw = built_in
        self._shape = (*transform.size, 3) if isinstance(transform, image.Transform) else None  # type: ignore[misc]
        self._transform = transform
        self._main = main if transform is not None else None
        self._target_transform = target_transform
        self._decode: Callable[[bytes], Any] | None = _OWN[decode] if own else decode  # type: ignore[index, assignment]
        self._decoded = [
            name
            for name in images
            if name in names and decode is not None and not (built_in and own and name == main)
        ]
        self.only_arrays = decode == "numpy" and not (transform or target_transform)
        self.plain = not (self._decoded or transform or target_transform or self.fields)

    @property
    def draws(self) -> bool:
        """Whether the transform is one that draws; of the user's own nobody knows."""
        return isinstance(self._transform, image.RandomResizedCrop)

    @property
    def image_place(self) -> int | str | None:
        """The field of an item that a built-in transform makes, if one does."""
        if not self.wants_draw or self._main is None:
            return None
        return self._main if self.fields is None else self.fields.index(self._main)

    def __call__(self, sample: Sample, number: int, draw: int = 0, work: Work | None = None) -> Any:
        """number: of the record in the dataset, for messages. May change the sample given.

        Raises DecodeError, naming the record; what transforms of the user raise passes.
        """
        if self._keyed:
            give_text_key(sample)
        try:
            for name in self._decoded:
                if sample[name] is not None:
                    sample[name] = self._decode(sample[name])  # type: ignore[misc]
            if work is not None and not self.wants_draw:
                work.decoded = perf_counter()
            if self._main is not None and sample[self._main] is not None:
                given = {}
                if self.wants_draw:
                    given = {"draw": draw}
                    if work is not None and getattr(work.out, "shape", None) == self._shape:
                        given["out"] = work.out
                sample[self._main] = self._transform(sample[self._main], **given)  # type: ignore[misc]
            if work is not None and self.wants_draw:
                work.decoded = perf_counter()
        except DecodeError as error:
            raise DecodeError(
                f"record {number:,} of the dataset, {printable(sample[KEY])}: {error}"
            ) from error
        if self._target_transform is not None:
            sample[LABEL] = self._target_transform(sample[LABEL])
        if self.fields is None:
            return sample
        return tuple([sample[name] for name in self.fields])


def _check_fields(schema: Schema, fields: Sequence[str]) -> tuple[str, ...]:
    if isinstance(fields, str):
        raise OptionError(f"fields is {fields!r}: expected several, such as ({fields!r},)")
    for name in fields:
        if name not in schema.names:
            raise OptionError(
                f"no field is called {name!r}; this dataset has {', '.join(schema.names)}"
            )
    if not fields:
        raise OptionError(f"fields is empty; this dataset has {', '.join(schema.names)}")
    return tuple(fields)
