"""The other ways to store and read the same images, each as its own users are told to.

`RIVALS` has a row for each; `base` says what an adapter is. Their environments are made by
benchmarks/setup_rivals from the exact releases in `requirements/`.
"""

from __future__ import annotations

from .base import Rival, Transform, decoded
from .folder import Folder
from .litdata import litdata_dataset, litdata_process, optimize, write_litdata
from .lmdb import Lmdb, lmdb_writer, open_lmdb, write_lmdb
from .packed import write_packed, write_tar

__all__ = [
    "ACCURATE",
    "FAST",
    "FFCV",
    "FOLDER",
    "RIVALS",
    "Folder",
    "Lmdb",
    "Rival",
    "Transform",
    "decoded",
    "litdata_dataset",
    "litdata_process",
    "lmdb_writer",
    "open_lmdb",
    "optimize",
    "write_litdata",
    "write_lmdb",
    "write_packed",
    "write_tar",
]

FOLDER = Rival("image folder + DataLoader", "folder", "pillow")
FFCV = Rival("FFCV (re-encoded)", "ffcv", "ffcv", raw=False)
RIVALS = (
    FOLDER,
    Rival("WebDataset", "webdataset", "webdataset"),
    Rival("MosaicML Streaming", "mosaicml", "mosaicml-streaming"),
    Rival("LitData", "litdata", "litdata"),
    FFCV,
    Rival("tf.data", "tfdata", "tensorflow-cpu"),
    Rival("DALI (CPU)", "dali", "nvidia-dali-cuda120", raw=False),
    Rival("SPDL", "spdl", "spdl", raw=False),
    Rival("ArrayRecord + DataLoader", "array_record", "array_record", environment="grain"),
    Rival("Grain", "grain", "grain", writes="array_record", raw=False),
    Rival("LMDB, map-style", "lmdb", "lmdb", environment="folder"),
    Rival("HDF5, map-style", "hdf5", "h5py", environment="folder"),
    Rival("zip, stored, map-style", "zip_stored", "pillow", environment="folder"),
    Rival("SQLite, map-style", "sqlite", "pillow", environment="folder"),
    Rival("SquashFS, mounted", "squashfs", "pillow", environment="folder", extra="mksquashfs"),
    Rival("HF datasets", "huggingface", "datasets"),
)

# No loaders: what the decoders allow.
FAST = Rival("bare loop, fast decoder", "bare", "simplejpeg", raw=False)
ACCURATE = Rival("bare loop, accurate decoder", "bare", "pillow", raw=False)
