"""Options as users write them, and numbers and sizes as they read them: 3, "256MiB", "1.5 GiB"."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from .errors import OptionError, printable, there_are

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("KMGT", 1)
    for ending, base in (("", 1024), ("iB", 1024), ("B", 1000))
}
_LEAST = 1_000  # bytes: no shard and no memory is smaller
_BY_LOWER = {unit.lower(): factor for unit, factor in _UNITS.items()}


P = ParamSpec("P")
T = TypeVar("T")


class Summary:
    """A result whose str is a summary of lines; a prompt shows the first of these."""

    def __repr__(self) -> str:
        return f"<{str(self).splitlines()[0]}>"


def unexpected(name: str, value: Any, expected: str) -> OptionError:
    """Return the error of an option that has a wrong value, to be raised."""
    return OptionError(f"{name} is {printable(repr(value))}: expected {expected}")


def check_int(name: str, value: Any, least: int = 1, most: int = (1 << 62) - 1) -> int:
    """Check an option that is a whole number, also one of numpy's. Raises OptionError."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most:
        upper = "or more" if most == (1 << 62) - 1 else f"to {most:,}"
        raise unexpected(name, value, f"a whole number, {least:,} {upper}")
    return number


def check_choice(name: str, value: Any, *choices: str | None) -> None:
    """Check an option that is one of some words; None may be one of them. Raises OptionError."""
    if value not in choices:
        first, *more = (repr(one) for one in reversed(choices) if one is not None)
        words = f"{', '.join(reversed(more))} or {first}" if more else first
        raise OptionError(f"{name} is {printable(repr(value))}; expected {words}")


def check_fields(options: Any, **bounds: tuple[int, ...]) -> None:
    """Check that fields are integers within bounds, and turn numpy's into Python's.

    bounds: by field, its least value, or its least and its greatest. numpy's integers would
    overflow in later arithmetic. Raises OptionError.
    """
    for name, bound in bounds.items():
        object.__setattr__(options, name, check_int(name, getattr(options, name), *bound))


def check_given(options: Any, **bounds: tuple[int, ...]) -> None:
    """Check as `check_fields` does those of the fields that are not None. Raises OptionError."""
    given = {name: bound for name, bound in bounds.items() if getattr(options, name) is not None}
    check_fields(options, **given)


def check_bool(**flags: Any) -> None:
    """Check options, by name, that are True or False, also numpy's. Raises OptionError."""
    for name, value in flags.items():
        if type(value).__name__ not in ("bool", "bool_"):
            raise unexpected(name, value, "True or False")


def check_flags(options: Any, *names: str) -> None:
    """Check that fields are True or False, and turn numpy's into Python's. Raises OptionError."""
    for name in names:
        check_bool(**{name: getattr(options, name)})
        object.__setattr__(options, name, bool(getattr(options, name)))


def check_size(name: str, value: Any, least: int = 1) -> int:
    """Check an option that is a size: bytes, or as `parse_size` reads them.

    Raises OptionError, also for 1 to 999 without a unit: who writes that means another one.
    """
    bare = not isinstance(value, str) or value.strip().isdigit()
    if isinstance(value, str):
        try:
            value = parse_size(value)
        except OptionError as error:
            raise OptionError(f"{name}: {error}") from None
    number = check_int(name, value, least)
    if bare and 0 < number < _LEAST:
        raise OptionError(
            f"{name} is {number}, without a unit: did you mean {number}GB, or {number}MB? "
            f"{show_count(number, 'byte')} would be {number}B"
        )
    return number


def refuse_options(
    owner: str, advice: Mapping[str, str]
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function to refuse options that users bring from elsewhere, with advice.

    owner: what messages call the function. advice: by the option's name, what to give instead.
    The function itself takes no **options: type checkers and signatures show the real ones. Of an
    unknown option, Python's TypeError also says which ones there are.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = [name for name in signature(function).parameters if name != "self"]

        @wraps(function)
        def refusing(*args: P.args, **options: P.kwargs) -> T:
            for name in (one for one in options if one not in known):
                if name in advice:
                    raise OptionError(f"{owner} takes no {name}: {advice[name]}")
                why = f"{owner} got an unexpected keyword argument {name!r}"
                raise TypeError(f"{why}: {there_are(known, name)}")
            return function(*args, **options)

        return refusing

    return decorate


def refuse_unknown(group: type[T]) -> type[T]:
    """Decorate a dataclass to refuse unknown options as `refuse_options` does."""
    setattr(group, "__init__", refuse_options(group.__name__, {})(group.__init__))  # noqa: B010
    return group


def grouped_in(option: str, group: type[Any]) -> dict[str, str]:
    """Return advice for `refuse_options`: each field of a dataclass is given within `option`."""
    return {
        field.name: f"give {option}=shardio.{group.__name__}({field.name}=...)"
        for field in fields(group)
    }


def check_group(option: str, value: Any, group: type[T]) -> T:
    """Return the options of a group, all default where the value is None. Raises OptionError."""
    if value is None:
        return group()
    if not isinstance(value, group):
        raise unexpected(option, value, f"shardio.{group.__name__}(...)")
    return value


def parse_size(text: str) -> int:
    """Read a size as bytes. Raises OptionError.

    K, KiB are 1,024 and KB is 1,000; M, G, T likewise.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    factor = _BY_LOWER.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise OptionError(
            f"{text!r} is no size; expected a number of bytes, or like 256MiB or 64MB"
        )
    integer, _, part = match[1].partition(".")
    return int(int(integer) * factor + int(part or 0) * factor // 10 ** len(part))


def exact_size(count: int) -> str:
    """Write bytes as `parse_size` reads them back, to the last one: 2MB, 256MiB, 12345B."""
    fitting = (one for one in _UNITS.items() if one[0].endswith("B") and count % one[1] == 0)
    unit, factor = max(fitting, key=lambda one: one[1]) if count else ("B", 1)
    return f"{count // factor}{unit}"


def show_count(count: int, one: str, more: str | None = None) -> str:
    """Write a count: 1 file, 2 files. more: the plural, where it is not by an s."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def show_size(count: float) -> str:
    """Write bytes as a person reads them: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError


def quoted(text: str) -> str:
    """Write a str as Python reads it: escaped where a terminal would not show it as it is."""
    return json.dumps(text, ensure_ascii=not text.isprintable())
