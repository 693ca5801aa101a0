"""A folder of images: class folders where the labels have names, else the paths that the keys are.

A key that begins with its class (`cat/1.jpg`) is the file's path; any other is put into the class's
folder. A key without the ending of an image file gets that of its real type, since readers look for
it. Classes whose folders were empty are empty folders again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...errors import DamageError, ExistsError, OptionError, StorageError, printable
from ...images.filetype import ALL_ENDINGS
from ...names import KEY, is_name, key_text
from ..sample import Sample
from ..tree import Tree, class_bytes, class_folders, is_raw, key_parts, raw_ending
from .writer import ExportSpec, FormatWriter, image_and_label, image_ending, misfit


class ImageFolder(FormatWriter):
    """A folder of images that is being written."""

    keeps_classes = True

    def __init__(self, spec: ExportSpec) -> None:
        super().__init__(spec)
        where = spec.manifest.where
        self._image, self._label = image_and_label(spec, "imagefolder", ("int",))
        self.exported_names = {self._image: "files"}
        self._manifest = spec.manifest
        self._raw = is_raw(spec.manifest, self._image)
        self._classes: list[bytes] = []
        if self._label is not None:
            if spec.manifest.classes is None:
                raise OptionError(
                    f"{where}: {printable(self._label)} has no names of classes, which "
                    "folders could have. Leave it out, and the paths are the keys: --fields "
                    f"{printable(self._image)}"
                )
            self._classes = [class_bytes(name) for name in spec.manifest.classes]
            known = zip(spec.manifest.classes, self._classes, strict=True)
            if odd := [name for name, stored in known if not is_name(key_text(stored))]:
                raise OptionError(
                    f"{where}: the class {printable(odd[0])!r} cannot be the name of one "
                    "folder. Leave the label out, and the paths are the keys: --fields "
                    f"{printable(self._image)}"
                )
            if len(set(self._classes)) < len(self._classes):
                raise OptionError(f"{where}: two classes have one name, so one folder")
            self.exported_names[self._label] = "folders"
            if self._classes != sorted(self._classes):
                self.notes.append("classes: readers number folders by their names, so not as here")
        self._tree = Tree(spec.folder, False)
        self._filled: set[bytes] = set()  # classes that have a folder
        if self._label is not None:
            for name in class_folders(spec.manifest):
                self._tree.folder(self._path(class_bytes(name)))
                self._filled.add(class_bytes(name))

    def add(self, number: int, sample: Sample) -> bool:
        """Write a record; False if it has nothing to write. Raises SampleError, RestartExport."""
        data = sample[self._image]
        if data is None:
            return False
        key = self._in_class(sample)
        name = key.rpartition(b"/")[2]
        stem, _, ending = name.rpartition(b".")
        if self._raw:
            key += raw_ending(key)
        elif not stem or ending.decode("latin-1").lower() not in ALL_ENDINGS:
            found = image_ending(data)
            if found is not None:
                key += b"." + found.encode()
        parts = self._path(key)
        try:
            self._tree.write(parts, data)
        except ExistsError:
            raise self._clash(key) from None
        except StorageError:
            above = (b"/".join(parts[:at]) for at in range(1, len(parts)))
            if any(os.path.isfile(os.path.join(os.fsencode(self._tree._root), p)) for p in above):
                raise self._clash(key) from None
            raise
        return True

    def finish(self) -> None:
        """Complete all files, and flush them."""
        missing = [name for name in self._classes if name not in self._filled]
        if missing:
            self.notes.append(
                f"classes: {len(missing):,} of {len(self._classes):,} have no image here, so no "
                f"folder ({', '.join(map(printable, missing[:5]))}), and readers number those "
                "behind them differently"
            )
        self.close()
        os.sync()  # one call; a million files' fsync would be most of the time

    def close(self) -> None:
        """Give up what is open."""
        self._tree.close()

    def _in_class(self, sample: Sample) -> bytes:
        key: bytes = sample[KEY]
        if self._label is None:
            return key
        label = sample[self._label]
        if label is None or not 0 <= label < len(self._classes):
            why = "it has no class" if label is None else f"{label} is no class"
            raise misfit(
                sample,
                self._label,
                f"{why}, so no folder. Paths are the keys with --fields {printable(self._image)}",
            )
        self._filled.add(self._classes[label])
        folder = self._classes[label] + b"/"
        return key if key.startswith(folder) else folder + key

    def _path(self, key: bytes) -> Sequence[bytes]:
        try:
            return key_parts(key, self._manifest.where)
        except DamageError:
            raise OptionError(
                f"the key {printable(key)} is no path within a directory; `--keys number` names "
                "the files by the numbers of their records"
            ) from None

    def _clash(self, key: bytes) -> OptionError:
        return OptionError(
            f"the path {printable(key)} is that of two records, or of one and the folder of "
            "another; `--keys number` names the files by the numbers of their records"
        )
