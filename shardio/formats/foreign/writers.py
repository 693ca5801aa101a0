"""The formats that `export` writes, by name. A format is one file beside this one, and one row."""

from __future__ import annotations

from ...errors import OptionError, printable, there_are
from .caffe_writer import Caffe
from .imagefolder_writer import ImageFolder
from .mds_writer import Mds
from .recordio_writer import RecordIO
from .tfrecord_writer import TFRecord
from .webdataset_writer import WebDataset
from .writer import Target

TARGETS: dict[str, type[Target]] = {
    "webdataset": WebDataset,
    "tfrecord": TFRecord,
    "recordio": RecordIO,
    "mds": Mds,
    "lmdb-caffe": Caffe,
    "imagefolder": ImageFolder,
}


def target(name: str) -> type[Target]:
    """Raises OptionError."""
    if name not in TARGETS:
        raise OptionError(
            f"format {printable(str(name))!r} is not one that is exported; "
            f"{there_are(TARGETS, str(name))}"
        )
    return TARGETS[name]
