"""A stored sample to what the user asked for: which fields, decoded how, through which transform.

    sample --decode--> image fields as PIL images --transform--> the image; target_transform: label

A built-in transform (image.Transform) takes the encoded bytes itself, since it may decode less than
all of them, and one random word, so that its result does not depend on who reads the sample. Any
other transform takes the decoded image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from . import image
from .errors import DecodeError, OptionError, printable
from .sample import KEY, Sample, Schema

Decode = Literal["pil"] | Callable[[bytes], Any] | None
Transform = Callable[..., Any]

IMAGE, LABEL = "image", "label"


class Decoder:
    """Samples to items: dicts of all fields, or tuples of the `fields` given, in that order.

    decode            "pil": fields of kind image as PIL images, RGB, upright. None: as bytes. Or a
                      function of those bytes
    transform         of the field `image`, or of the first field of kind image
    target_transform  of the field `label`

    `wants_draw`: whether the transform draws random words. Raises OptionError.
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
        if decode is not None and decode != "pil" and not callable(decode):
            raise OptionError(f"decode is {decode!r}: expected 'pil', None or a function of bytes")
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
        built_in = isinstance(transform, image.Transform)
        self.wants_draw = built_in
        self._transform = transform
        self._main = main if transform is not None else None
        self._target_transform = target_transform
        self._decode: Callable[[bytes], Any] | None = image.decode if decode == "pil" else decode
        self._decoded = [
            name
            for name in images
            if name in names
            and decode is not None
            and not (built_in and decode == "pil" and name == main)
        ]
        self.plain = not (self._decoded or transform or target_transform or self.fields)

    def __call__(self, sample: Sample, number: int, draw: int = 0) -> Any:
        """number: of the record in the dataset, for messages. May change the sample given.

        Raises DecodeError, naming the record; what transforms of the user raise passes.
        """
        try:
            for name in self._decoded:
                if sample[name] is not None:
                    sample[name] = self._decode(sample[name])  # type: ignore[misc]
            if self._main is not None and sample[self._main] is not None:
                value = sample[self._main]
                sample[self._main] = (
                    self._transform(value, draw=draw)  # type: ignore[misc]
                    if self.wants_draw
                    else self._transform(value)  # type: ignore[misc]
                )
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
