"""Where to decode JPEGs: by the cores, or by the GPU. What an H100's machine did decides.

How it works. The cores of a GPU give so many crops a second. Below what decode="cuda" gave beside a
model they are few, and the GPU is worth a try; else they suffice. What the model takes only its
user knows, so each advice names the rate from which on it holds.

Source: docs/device.md, "When to decode on the GPU": one H100 with 16 cores, one round each, JPEGs
of 500 x 375. No machine with few cores was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

JPEGS_PER_CORE: Final = 589  # crops/s, by the compiled core
TILES_PER_CORE: Final = 780  # of tile JPEGs
PHOTOGRAPH: Final = 20_000  # bytes of a record: of smaller images a core makes many times as many
# decode="cuda", images/s, by nvImageCodec and by torchvision, about 3 cores busy: beside ResNet-50,
# which takes 4,000 where nothing feeds it, and without a model.
TRAINING: Final = 3_000, 3_700
ALONE: Final = 6_000, 10_000
FIGURES: Final = (
    f'on an H100 decode="cuda" gave {TRAINING[0]:,} to {TRAINING[1]:,} images/s beside ResNet-50, '
    f"of the 4,000 that it takes, and {ALONE[0]:,} to {ALONE[1]:,} without a model"
)


@dataclass(frozen=True)
class DecodeAdvice:
    """Say where to decode, as an Advice of `shardio.explain` says what to change."""

    code: str  # for programs: "decode_on_cores", "decode_on_gpu", "try_decode_on_gpu"
    what: str
    mend: str
    cores: int  # for each GPU
    images_per_s: int  # crops of JPEGs of 500 x 375 that these would make

    def __str__(self) -> str:
        return f"{self.what} -> {self.mend}"


def decode_advice(cores: int, *, tiles: bool, on_gpu: bool) -> DecodeAdvice | None:
    """Say which road is the better one; None: the one that is taken.

    cores: for each GPU; tiles: of tile JPEGs; on_gpu: with decode="cuda".
    """
    each = TILES_PER_CORE if tiles else JPEGS_PER_CORE
    rate = cores * each
    what = (
        f"a core decodes about {each} crops/s of {'tile ' * tiles}JPEGs of 500 x 375, so all cores "
        f"for this GPU ({cores}) {rate:,}; {FIGURES}"
    )
    more = f"the model takes more than {rate:,} images/s"
    if rate < TRAINING[0]:
        code, mend = "decode_on_gpu", f'keep decode="cuda" if {more}, else decode="pil"'
        if not on_gpu:
            code, mend = (
                "try_decode_on_gpu",
                f'try decode="cuda" if the images are JPEGs, and {more}',
            )
    elif on_gpu:
        code, mend = "decode_on_cores", 'decode="pil"'
        if rate < ALONE[0]:
            mend += f"; where {more}, compare both"
    else:
        return None
    return DecodeAdvice(code, what, mend, cores, rate)
