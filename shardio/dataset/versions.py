"""Which version of a dataset a saved state is of, and what is said where it is another one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import OptionError, StateError, printable
from ..formats.manifest import Manifest
from ..formats.version import first_version, load_version
from ..stack import users_level
from ..storage.stores import without_secrets
from .reader import Reader


@dataclass(frozen=True)
class StateVersion:
    """The version that a saved state is of, where another one is read."""

    manifest: Manifest
    named: str  # what it is, and what is read, for messages

    def refusal(self) -> StateError:
        """Return the error where records of another version were selected."""
        return StateError(
            f"the state is of {self.named}: open that version, ShardDataset(path, version=...), "
            "and select its records, before you load the state"
        )

    def manifest_with(self, fields: Iterable[str] | None) -> Manifest:
        """Return the manifest of the state's version. Raises StateError if it lacks a field."""
        if lacks := [name for name in fields or () if name not in self.manifest.schema.names]:
            raise StateError(
                f"the state is of {self.named}. That version has no field {printable(lacks[0])!r}: "
                "give fields that it has, or begin anew without the state"
            )
        return self.manifest

    def warn(self) -> None:
        """Say that it is read from now on."""
        warnings.warn(
            f"the state is of {self.named}: it goes on with the state's version, in later epochs "
            "too. To train on the newest one, open the dataset anew after this epoch",
            stacklevel=users_level() + 1,
        )


def named_version(manifest: Manifest) -> str:
    """Name a dataset in states: by its id, and with its version where a commit changed it."""
    version = f"@{manifest.version_id}" if manifest.commit else ""
    return f"{manifest.dataset_id.hex()}{version}"


def check_identity(state: Mapping[str, Any], own: Mapping[str, Any], path: str) -> None:
    """Raise StateError where a state is of other records: own tells which are read here."""
    for name, value in own.items():
        found = state.get(name)
        if found == value:
            continue
        what = "selection of records" if name == "selection" else "dataset"
        if name == "dataset" and str(found).partition("@")[0] == value.partition("@")[0]:
            what = "version of the dataset"
        raise StateError(
            f"the state is of another {what}: {printable(repr(found))}, and this one is {value!r} "
            f"({printable(without_secrets(path))})"
        )


def version_of_state(state: Any, reader: Reader) -> StateVersion | None:
    """Find the version of this dataset that a state is of; None: this one, or it is of another.

    Raises StateError where that version is gone.
    """
    own, named = named_version(reader.manifest), ""
    if isinstance(state, Mapping):
        named = str(state.get("dataset"))
    identity, _, version = named.partition("@")
    if named == own or not named:
        return None
    path = printable(without_secrets(reader.index.url))
    texts = [
        f"version {one}" if one else "the first version" for one in (version, own.partition("@")[2])
    ]
    what = f"{texts[0]} of {path}, and this is {texts[1]}"
    try:
        if version:
            found = load_version(reader.index, version)
        else:
            found = first_version(reader.index, reader.manifest)
    except OptionError as error:
        if identity != own.partition("@")[0]:
            return None
        raise StateError(f"the state is of {what}. {error}") from None
    # `compact` gives versions another dataset id; those before it keep theirs.
    return StateVersion(found, what) if found.dataset_id.hex() == identity else None
