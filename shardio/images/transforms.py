"""Turn encoded images into crops of one size. It holds the built-in transforms.

How it works. A built-in transform takes encoded bytes and hands the box of the crop to PIL's
`resize(box=)`, so that only the crop is resampled, with antialiasing. A rotated photograph is never
rotated whole: its box is mapped into the stored orientation, and the small result is turned.

Of a tile JPEG (jpeg_tiles.py) only the tiles under the box are decoded. The pixels stay the same.

    bytes --open--> header --limit, decode--> pixels --box, resize--> small --turn, flip--> array

Where the native core was built, it transforms JPEGs, and PIL transforms the rest. The core has the
same pixels as PIL before the resize, and is within one level of Pillow's after it.

Sources. The random box is the "inception crop": Szegedy et al., Going Deeper with Convolutions
(2014), section 6, in the form that torchvision's RandomResizedCrop made customary: area uniform in
`scale`, logarithm of the aspect ratio uniform, ten tries, then the largest central crop within the
ratios. Random numbers: those of order/rng.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import native
from ..errors import DecodeError, OptionError, printable
from ..order.rng import GAMMA, MASK, splitmix64, word
from ..units import check_bool, check_int, refuse_unknown
from . import decode, jpeg_tiles
from .decode import UPRIGHT, Box, Turn, decode_errors, pil_module, raw_pixels, to_rgb

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

# Tile JPEGs with fewer pixels are decoded whole: 192 x 144 take 0.3 ms, and 7 % more by tiles;
# 256 x 192 take the same either way, 500 x 375 a quarter less by tiles.
MIN_TILED_PIXELS = 2**16

# How far PIL's filters reach from their centre, in pixels.
_SUPPORTS = {"nearest": 0, "bilinear": 1, "bicubic": 2, "lanczos": 3, "box": 0.5, "hamming": 1}


@dataclass(frozen=True)
class Transform:
    """Turn one image into a uint8 array of one size. It is the base of the built-in transforms.

    It is not a base for yours: any callable serves as `transform=`, and is given decoded images.
    A dataset hands a built-in transform encoded bytes, and one random word to draw from.

    size           of the result, in pixels: an int, or (height, width)
    interpolation  nearest, bilinear, bicubic, lanczos, box or hamming. All but nearest antialias
    fast           whether libjpeg may decode a JPEG at 1/2, 1/4 or 1/8 where the crop is at least
                   that many times larger than the result. It changes pixels a little. Of no effect
                   where the device decodes
    upright        whether an image is turned as its EXIF orientation says
    max_pixels     of an image that is decoded; a larger one is an error
    fields         the fields of a sample that one draw is for, such as ("image", "mask"): all of
                   one size. The dataset's first image is resampled as `interpolation` says. Of
                   every other one, values are taken as stored, by nearest, so that class ids stay
                   what they are. None: the first image alone
    boxes          a field of boxes in pixels of the image, [x, y, width, height]. They are moved
                   and clipped; those of which less than a pixel is left are left out

    Raises OptionError if an option has another form.
    """

    size: int | tuple[int, int]
    interpolation: str = field(default="bilinear", kw_only=True)
    fast: bool = field(default=False, kw_only=True)
    upright: bool = field(default=True, kw_only=True)
    max_pixels: int | None = field(default=None, kw_only=True)
    fields: tuple[str, ...] | None = field(default=None, kw_only=True)
    boxes: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check the options, and bring them to one form. Raises OptionError."""
        where = type(self).__name__
        pair = tuple(self.size) if isinstance(self.size, tuple | list) else (self.size, self.size)
        if len(pair) != 2:
            raise OptionError(
                f"{where}: size is {self.size!r}, expected an int or (height, width) in pixels"
            )
        pair = tuple(check_int(f"{where}: size", side, 1, 2**15) for side in pair)
        object.__setattr__(self, "size", pair)
        check_bool(**{f"{where}: fast": self.fast, f"{where}: upright": self.upright})
        if self.interpolation not in _SUPPORTS:
            raise OptionError(
                f"{where}: interpolation is {self.interpolation!r}, expected one of "
                + ", ".join(_SUPPORTS)
            )
        if self.max_pixels is not None:
            limit = check_int(f"{where}: max_pixels", self.max_pixels, 1)
            object.__setattr__(self, "max_pixels", limit)
        if self.fields is not None:
            object.__setattr__(self, "fields", _check_names(where, self.fields))
        if self.boxes is not None and not isinstance(self.boxes, str):
            raise OptionError(
                f"{where}: boxes is {self.boxes!r}, expected the name of one field, such as "
                "'annotations'"
            )

    def __call__(
        self,
        image: bytes | memoryview | Image.Image,
        draw: int = 0,
        out: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.uint8]:
        """Turn one image into an (H, W, 3) uint8 RGB array.

        image: encoded bytes, or a PIL image, which is left as it is.
        draw: 64-bit unsigned; the result is a pure function of (image, draw).
        out: an (H, W, 3) uint8 array, with any strides, that is written and returned instead of a
        new one: such as a row of a batch. Nothing is written to it when this raises.

        A new array is C-contiguous, writable, and owned by the caller. Raises DecodeError;
        OptionError when `out` is no such array.
        """
        if out is None:
            out = np.empty((*self.shape, 3), np.uint8)
        else:
            self._check_out(out)
        with decode_errors(image):
            if native.core is None or not self._by_core(image, draw, out):
                self.by_pil(image, draw, out)
        return out

    @property
    def shape(self) -> tuple[int, int]:
        """Return the height and width of the result, in pixels."""
        return self.size  # type: ignore[return-value]  # __post_init__ makes it a pair

    def limited(self, max_pixels: int) -> Transform:
        """Return the same transform with this max_pixels."""
        return replace(self, max_pixels=max_pixels)

    def together(
        self,
        sample: dict[str, Any],
        main: str,
        alike: Collection[str],
        draw: int,
        make: Callable[[Any, int], Any] | None = None,
    ) -> None:
        """Replace the images of `fields`, and `boxes`, in a sample by the results of one draw.

        main: the field that `make` makes, of the image and the draw; None: this transform makes it.
        The fields in `alike` are made by this transform, too. All other images are resampled by
        nearest, with values as stored: (H, W) or (H, W, C). None stays None.

        Raises DecodeError, also when the images are not of one size.
        """
        size: tuple[int, int] | None = None
        first = ""
        for name in self.fields or (main,):
            image = sample[name]
            if image is None:
                continue
            if name == main or name in alike:
                with decode_errors(image):
                    image, here = self._sized(image)
                _check_same(first, size, name, here)
                sample[name] = (make or self)(image, draw) if name == main else self(image, draw)
            else:
                if isinstance(image, bytes | bytearray | memoryview):
                    image = decode.stored(image, upright=self.upright, max_pixels=self.max_pixels)
                here = _checked(image).size
                _check_same(first, size, name, here)
                with decode_errors(image):
                    sample[name] = self._nearest(image, draw)
            if size is None:
                size, first = here, name
        if self.boxes is not None and size is not None and sample[self.boxes] is not None:
            box, flip = self._box(*size, draw)
            try:
                sample[self.boxes] = move_boxes(sample[self.boxes], box, self.shape, flip)
            except DecodeError as error:
                raise DecodeError(f"{self.boxes!r}: {error}") from None

    def _sized(self, image: Any) -> tuple[Any, tuple[int, int]]:
        """Return an image in a form that `__call__` takes, and its upright width and height.

        Raw pixels and JPEGs stay bytes. Other bytes become a loaded PIL image, so that they are
        decoded once.
        """
        if isinstance(image, bytes | bytearray | memoryview):
            if (raw := raw_pixels(image, self.max_pixels)) is not None:
                return image, (raw.shape[1], raw.shape[0])
            core = native.core
            header = None if core is None else core.header(image)
            if header is not None and (not self.upright or header[2]):
                width, height, orientation = header
                swap = self.upright and decode.TURNS.get(orientation, UPRIGHT).swap
                return image, (height, width) if swap else (width, height)
            source = decode.open_image(image, self.max_pixels)
            if source.format not in ("JPEG", "MPO"):
                source.load()  # once, and not again in `__call__`
                image = source
        else:
            source = _checked(image)
        width, height = source.size
        swap = self.upright and decode.turn_of(source).swap
        return image, (height, width) if swap else (width, height)

    def _nearest(self, image: Image.Image, draw: int) -> NDArray[Any]:
        """Resample the same part of another image by nearest, so that its values stay.

        The image must be upright already.
        """
        high, wide = self.shape
        box, flip = self._box(*image.size, draw)
        array = decode.stored_array(
            image.resize((wide, high), pil_module().Resampling.NEAREST, box)
        )
        return np.ascontiguousarray(array[:, ::-1]) if flip else array

    def _by_core(
        self, image: bytes | memoryview | Image.Image, draw: int, out: NDArray[np.uint8]
    ) -> bool:
        """Make the result by the native core. Returns False if the core cannot make it.

        The pixels are decoded as PIL decodes them. After the resize they are at most one level from
        Pillow's.
        """
        core = native.core
        if core is None or self.interpolation == "nearest" or out.strides[2] != 1:
            return False
        if not isinstance(image, bytes | bytearray | memoryview):
            return False
        limit = decode.MAX_PIXELS if self.max_pixels is None else self.max_pixels
        if (header := core.header(image)) is None or header[0] * header[1] > limit:
            return False
        width, height, orientation = header
        turn = UPRIGHT
        if self.upright and orientation != 1:
            turn = (
                decode.TURNS[orientation]
                if orientation
                else decode.turn_of(decode.open_image(image, self.max_pixels))
            )
        box, _, factor, flip = self.choose_crop(width, height, turn, draw, self.fast)
        # The core writes pixels as stored; `out` is seen as they lie, so they come out upright.
        if flip:
            out = out[:, ::-1]
        if turn.swap:
            out = out.swapaxes(0, 1)
        if turn.mirror_x:
            out = out[:, ::-1]
        if turn.mirror_y:
            out = out[::-1]
        done: bool = core.crop(image, box, out, self.interpolation, factor, limit)
        return done

    def _check_out(self, out: Any) -> None:
        """Raise OptionError unless `out` can take the result."""
        shape = (*self.shape, 3)
        fits = isinstance(out, np.ndarray) and out.dtype == np.uint8 and out.shape == shape
        if not fits or not out.flags.writeable:
            found = getattr(out, "shape", None), str(getattr(out, "dtype", type(out).__name__))
            raise OptionError(
                f"{type(self).__name__}: out is {found[1]} of shape {found[0]}, expected a "
                f"writable numpy array, uint8 of shape {shape}"
            )

    def by_pil(
        self, image: bytes | memoryview | Image.Image, draw: int, out: NDArray[np.uint8]
    ) -> None:
        """Make the result by PIL, never by the native core, and write it to `out`.

        The arguments are those of `__call__`. Packing uses this, since what it writes must not
        depend on where the core was built. Raises DecodeError, and any exception that PIL raises
        for damaged bytes: call it within `decode_errors`.
        """
        source: Any = None
        tiled, fast, turn = None, False, UPRIGHT
        if (raw := raw_pixels(image, self.max_pixels)) is not None:
            width, height = raw.shape[1], raw.shape[0]
        elif isinstance(image, bytes | bytearray | memoryview):
            tiled = jpeg_tiles.tiles(image, min_pixels=MIN_TILED_PIXELS)
            if tiled is None or (tiled.has_app1 and self.upright):
                source = decode.open_image(image, self.max_pixels)
            else:
                width, height = tiled.width, tiled.height
                decode.check_pixels("JPEG", (width, height), self.max_pixels)
            fast = self.fast and (tiled is not None or source.format in ("JPEG", "MPO"))
        else:
            source = _checked(image)
        if source is not None:
            if tiled is None and not fast:
                source.load()  # before size and EXIF are asked: TIFF and PNG settle them here
            width, height = source.size
            if self.upright:
                turn = decode.turn_of(source)
        box, target, factor, flip = self.choose_crop(width, height, turn, draw, fast)
        if raw is not None:
            left, top = round(box[0]), round(box[1])
            right, bottom = left + target[0], top + target[1]
            if box == (left, top, right, bottom):  # what PIL's resize would copy
                out[...] = raw[top:bottom, left:right][:, :: -1 if flip else 1]
                return
            source = decode.raw_image(raw)
        elif tiled is not None:
            cut = cut_tiles(tiled, box, target, self.interpolation, factor)
            source = _placed(cut, width, height, factor)
        else:
            _draft(source, factor)
        # Grey is made RGB after the resize: the same pixels for a third of the work.
        # Every other mode must be RGB before: palettes cannot be averaged, and alpha would
        # weigh the colours.
        if source.mode not in ("RGB", "L"):
            source = to_rgb(source)
        # `box=` and not crop(): no copy, and at an inner border the filter sees the true
        # neighbours. reducing_gap stays None: it would be faster and change pixels.
        small = to_rgb(
            source.resize(target, pil_module().Resampling[self.interpolation.upper()], box)
        )
        if turn.method:
            small = small.transpose(pil_module().Transpose[turn.method])
        out[...] = decode.rgb_array(small, mirrored=flip)

    def choose_crop(
        self, width: int, height: int, turn: Turn, draw: int, fast: bool
    ) -> tuple[Box, tuple[int, int], int, bool]:
        """Return box, target, factor and flip: how to make the result of width x height pixels.

        width, height: as stored. box: the crop in the picture that is decoded at 1 / factor.
        target: the size of the crop in the result before that is turned, as (width, height).
        flip: whether to mirror the upright result.
        """
        high, wide = self.shape
        box, flip = self._box(*((height, width) if turn.swap else (width, height)), draw)
        box, target = turn.stored(box, width, height), (high, wide) if turn.swap else (wide, high)
        factor = _factor(box, target) if fast else 1
        return _reduced(box, (width, height), factor), target, factor, flip

    def _box(self, width: int, height: int, draw: int) -> tuple[Box, bool]:
        """Return the part of an upright width x height image to show, and whether to mirror it.

        The box is in pixels: left, top, right, bottom.
        """
        raise NotImplementedError


@refuse_unknown
@dataclass(frozen=True)
class RandomResizedCrop(Transform):
    """Crop a random part of the image and resize it: the standard ImageNet training crop.

    size   of the result, in pixels: an int, or (height, width)
    scale  the crop's share of the image's area, uniform between these; 0 < low <= high <= 1
    ratio  width / height of the crop, its logarithm uniform between these; 0 < low <= high
    flip   mirror left-right with probability 1/2. The box is the same with and without

    All other options are those of Transform. Box and flip depend on the random word that the
    dataset gives, and on the image's size, alone: see `crop_box`.
    """

    scale: tuple[float, float] = field(default=(0.08, 1.0), kw_only=True)
    ratio: tuple[float, float] = field(default=(3 / 4, 4 / 3), kw_only=True)
    flip: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Check the options. Raises OptionError."""
        super().__post_init__()
        check_bool(**{"RandomResizedCrop: flip": self.flip})
        object.__setattr__(self, "scale", _check_range("scale", self.scale, 1.0))
        object.__setattr__(self, "ratio", _check_range("ratio", self.ratio, math.inf))

    def _box(self, width: int, height: int, draw: int) -> tuple[Box, bool]:
        """Return the box of `crop_box`, and whether to mirror it."""
        left, top, wide, high, flip = crop_box(width, height, draw, self.scale, self.ratio)
        return (left, top, left + wide, top + high), flip and self.flip


@refuse_unknown
@dataclass(frozen=True)
class CenterCrop(Transform):
    """Crop the centre of the image: the standard ImageNet validation crop.

    size    of the result, in pixels: an int, or (height, width)
    resize  the short side that the image is resized to before; None: the central pixels
            themselves, unscaled

    All other options are those of Transform.

    CenterCrop(224, 256) is torchvision's Resize(256) followed by CenterCrop(224): the short side
    becomes 256 pixels, then the central 224 x 224 are kept. Here one resize of the box that those
    pixels come from does both (equal within 1 level of 255).

    An image that is smaller than the crop (after `resize`) is enlarged until it just covers the
    crop, where torchvision would pad it with black.
    """

    resize: int | None = None

    def __post_init__(self) -> None:
        """Check the options. Raises OptionError."""
        super().__post_init__()
        if self.resize is None:
            return
        object.__setattr__(self, "resize", check_int("CenterCrop: resize", self.resize, 1, 2**15))
        if self.resize < (short := min(self.shape)):
            raise OptionError(
                f"CenterCrop: resize is {self.resize}, less than the crop's short side {short}, so "
                f"no image could fill it: give resize >= {short}"
            )

    def _box(self, width: int, height: int, draw: int) -> tuple[Box, bool]:
        """Return the central box, which is never mirrored. `draw` has no effect."""
        high, wide = self.shape
        scaled_width, scaled_height = width, height
        if self.resize is not None:
            short = min(width, height)
            scaled_width = self.resize * width // short  # the long side is cut, as torchvision does
            scaled_height = self.resize * height // short
        if scaled_width < wide or scaled_height < high:
            grow = max(wide / width, high / height)
            scaled_width = max(wide, round(width * grow))
            scaled_height = max(high, round(height * grow))
        left = round((scaled_width - wide) / 2)
        top = round((scaled_height - high) / 2)
        x, y = width / scaled_width, height / scaled_height
        return (
            left * x,
            top * y,
            min(width, (left + wide) * x),  # min: a rounded product may be above, by one bit,
            min(height, (top + high) * y),  # and a mirrored box would then begin below 0
        ), False


def crop_box(
    width: int, height: int, draw: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int, bool]:
    """Draw the random box of RandomResizedCrop: (left, top, width, height, flip) in pixels.

    width, height: of the image. draw: 64-bit unsigned. scale, ratio: as for RandomResizedCrop.

    The box is inside the image and at least 1 x 1. Words of `draw`: 1 flip; 2 + 2i and 3 + 2i area
    and ratio of try i of ten; 22 and 23 the place. Their places are fixed, so that options which do
    not concern the box (flip) do not change it.
    """
    flip = bool(word(draw, 1) >> 63)
    area = width * height
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for attempt in range(10):
        target = area * (scale[0] + (scale[1] - scale[0]) * _uniform(draw, 2 + 2 * attempt))
        aspect = math.exp(low + (high - low) * _uniform(draw, 3 + 2 * attempt))
        w = round(math.sqrt(target * aspect))
        h = round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            left = int((width - w + 1) * _uniform(draw, 22))
            top = int((height - h + 1) * _uniform(draw, 23))
            return left, top, w, h, flip
    w, h = width, height
    if width / height < ratio[0]:
        h = max(1, round(width / ratio[0]))
    elif width / height > ratio[1]:
        w = max(1, round(height * ratio[1]))
    return (width - w) // 2, (height - h) // 2, w, h, flip


def crop_boxes(
    sizes: NDArray[np.int64],
    draws: NDArray[np.uint64],
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Draw what `crop_box` does, of many: (B, 4) left, top, width, height, and (B,) flip.

    sizes: (B, 2), width and height of each. draws: (B,).

    Every number is made as `crop_box` makes it, to the bit: so exp is Python's, and not numpy's.
    """
    boxes = np.empty((len(draws), 4), np.int64)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    left = np.arange(len(draws))  # those whose box is not drawn yet
    for attempt in range(10):
        size, drawn = sizes[left], draws[left]
        area = size[:, 0] * size[:, 1]
        target = area * (scale[0] + (scale[1] - scale[0]) * _uniforms(drawn, 2 + 2 * attempt))
        logs = low + (high - low) * _uniforms(drawn, 3 + 2 * attempt)
        aspect = np.array([math.exp(one) for one in logs.tolist()])
        box = np.rint(np.sqrt(np.stack((target * aspect, target / aspect), 1)))
        fits = ((box > 0) & (box <= size)).all(1)
        chosen, box = left[fits], box[fits].astype(np.int64)
        place = np.stack([_uniforms(draws[chosen], k) for k in (22, 23)], 1)
        boxes[chosen, :2] = (sizes[chosen] - box + 1) * place
        boxes[chosen, 2:] = box
        left = left[~fits]
        if not left.size:
            break
    for i in left.tolist():
        width, height = sizes[i].tolist()
        boxes[i] = crop_box(width, height, int(draws[i]), scale, ratio)[:4]
    return boxes, splitmix64(draws + np.uint64(GAMMA)) >> np.uint64(63) == 1


def crops_many(transform: Transform) -> bool:
    """Say whether the core crops many images by this transform in one call, where it was built."""
    return transform.interpolation != "nearest" and not transform.fast


def crop_many(
    transform: Transform, images: Sequence[bytes], draws: NDArray[np.uint64], out: NDArray[np.uint8]
) -> int:
    """Write what the transform makes of each of these images, by one call of the core.

    draws: (B,), of each image its own. out: (B, H, W, 3) uint8, contiguous; row i is image i's.
    What the core leaves, and images to be turned, are made one by one. Returns how many the core
    cropped. Raises DecodeError.
    """
    core = native.core
    done = np.zeros(len(images), np.uint8)
    if core is not None and crops_many(transform):
        limit = decode.MAX_PIXELS if transform.max_pixels is None else transform.max_pixels
        headers = np.frombuffer(core.headers(images), np.uint32).reshape(-1, 3).astype(np.int64)
        sizes, orientations = headers[:, :2], headers[:, 2]
        plain = (sizes[:, 0] > 0) & (sizes.prod(1) <= limit)
        if transform.upright:
            plain &= orientations == 1
        boxes = np.zeros((len(images), 4), np.float32)  # of the others: none
        flips = np.zeros(len(images), bool)
        boxes[plain], flips[plain] = _boxes(transform, sizes[plain], draws[plain])
        mask = core.crop_many(images, boxes, flips, out, transform.interpolation, limit)
        done = np.frombuffer(mask, np.uint8)
    for i in np.flatnonzero(done == 0).tolist():
        transform(images[i], int(draws[i]), out[i])
    return int(done.sum())


def _boxes(
    transform: Transform, sizes: NDArray[np.int64], draws: NDArray[np.uint64]
) -> tuple[NDArray[np.int64] | NDArray[np.float64], NDArray[np.bool_]]:
    """Return the boxes of upright images, (B, 4), and which to mirror, (B,)."""
    if isinstance(transform, RandomResizedCrop):
        boxes, flips = crop_boxes(sizes, draws, transform.scale, transform.ratio)
        boxes[:, 2:] += boxes[:, :2]
        return boxes, flips & transform.flip
    found = [
        transform.choose_crop(width, height, UPRIGHT, draw, fast=False)
        for (width, height), draw in zip(sizes.tolist(), draws.tolist(), strict=True)
    ]
    some = np.array([box for box, *_ in found], np.float64).reshape(-1, 4)
    return some, np.array([flip for *_, flip in found], bool)


# What annotations say in pixels of the whole image, besides their bbox: untrue of a crop.
_STALE = frozenset(("segmentation", "keypoints", "num_keypoints", "area"))


def move_boxes(value: Any, box: Box, size: tuple[int, int], flip: bool) -> Any:
    """Move boxes of an image to a crop of it: they are shifted, scaled, mirrored, and clipped.

    value: one of
        [{"bbox": [x, y, width, height], ...}, ...]    annotations of COCO: dicts
        [[x, y, width, height, ...], ...]              lists; or an array (N, 4 or more)
    box: of the crop, in pixels of the image: left, top, right, bottom.
    size: (height, width) of the result.
    flip: whether the result is mirrored.

    A box of which less than one pixel is left, in width or height of the result, is left out, with
    all that stands beside it: the rest of its dict (category_id, label, iscrowd), or of its row. Of
    a dict go the values that would be untrue of the crop: segmentation, keypoints, num_keypoints,
    area. A dict without bbox stays. An array comes back as floats: of its own dtype, or float32 for
    integers. The value that was given stays as it is.

    Raises DecodeError if the value has none of these forms.
    """
    if isinstance(value, np.ndarray):
        if value.ndim != 2 or value.shape[1] < 4 or value.dtype.kind not in "iuf":
            raise _no_boxes(value)
        dtype = value.dtype if value.dtype.kind == "f" else np.dtype(np.float32)
        rows = [(row, _moved(row[:4], box, size, flip)) for row in value]
        kept = np.array([row for row, moved in rows if moved], dtype).reshape(-1, value.shape[1])
        kept[:, :4] = np.array([moved for _, moved in rows if moved], dtype).reshape(-1, 4)
        return kept
    if not isinstance(value, list | tuple):
        raise _no_boxes(value)
    out: list[Any] = []
    for one in value:
        if isinstance(one, dict):
            left = {name: v for name, v in one.items() if name not in _STALE}
            if "bbox" in one:
                left["bbox"] = _moved(one["bbox"], box, size, flip)
            if left.get("bbox", one) is not None:
                out.append(left)
        elif isinstance(one, list | tuple) and len(one) >= 4:
            if (moved := _moved(one[:4], box, size, flip)) is not None:
                out.append([*moved, *one[4:]])
        else:
            raise _no_boxes(one)
    return out


def _moved(one: Any, box: Box, size: tuple[int, int], flip: bool) -> list[float] | None:
    """Move one box, [x, y, width, height], as `move_boxes` does; None: too little of it is left."""
    left, top, right, bottom = box
    high, wide = size
    try:
        x, y, w, h = (float(v) for v in one)
    except (TypeError, ValueError):
        raise _no_boxes(one) from None
    x_scale, y_scale = wide / (right - left), high / (bottom - top)
    x0, x1 = (min(max((v - left) * x_scale, 0.0), wide) for v in (x, x + w))
    y0, y1 = (min(max((v - top) * y_scale, 0.0), high) for v in (y, y + h))
    if flip:
        x0, x1 = wide - x1, wide - x0
    seen = x1 - x0 >= 1 and y1 - y0 >= 1
    return [x0, y0, x1 - x0, y1 - y0] if seen else None


def _no_boxes(found: Any) -> DecodeError:
    """Make the error for a value that holds no boxes."""
    shape = getattr(found, "shape", None)
    what = printable(repr(found)) if shape is None else f"an array {shape} of {found.dtype}"
    return DecodeError(
        "expected boxes: dicts with bbox [x, y, width, height], as COCO has them, or rows that "
        f"begin so; found {what}. Give `map=` to move boxes of another form"
    )


def _check_same(first: str, size: tuple[int, int] | None, name: str, here: tuple[int, int]) -> None:
    """Raise DecodeError if the image `name` has another size than the image `first`.

    size, here: (width, height) of `first` and of `name`, in pixels. size is None before the first.
    """
    if size is not None and size != here:
        raise DecodeError(
            f"{first!r} is {size[0]} x {size[1]} pixels, and {name!r} {here[0]} x {here[1]}: one "
            "crop of several fields needs them of one size. Give `map=` to resize one of them first"
        )


# A part of a picture --------------------------------------------------------------------------


def _checked(image: Any) -> Image.Image:
    """Return the value if it is a PIL image. Raises DecodeError otherwise."""
    if not isinstance(image, pil_module().Image):
        raise DecodeError(
            f"expected encoded image bytes or a PIL image, found {type(image).__name__}"
        )
    return image  # type: ignore[no-any-return]


def _factor(box: Box, target: tuple[int, int]) -> int:
    """Return how many times smaller libjpeg may decode a box that becomes target: 1, 2, 4 or 8.

    target: width and height of the result. The decoded box still covers it.
    """
    reduce = min((box[2] - box[0]) / target[0], (box[3] - box[1]) / target[1])
    return next((f for f in (8, 4, 2) if reduce >= f), 1)


def _placed(cut: jpeg_tiles.Cut, width: int, height: int, factor: int) -> Image.Image:
    """Decode a cut at 1 / factor into its place in the width x height pixels of the whole.

    Moving the pixels to 0, 0, and the box with them, would be the obvious way, but PIL computes the
    centres of its filters in floating point: at other places it rounds in another way, which ties
    show, in a few pixels of some crops. And from Pillow 13 on the size of the whole decides whether
    rows or columns are resampled first. Nobody sees the pixels beside the cut; they are not set.

    PIL's decoder is used as its ImageFile.load uses it, but without its plugin, which would take
    the header apart once more (50 us), and straight into the place.
    """
    mode = "L" if cut.grey else "RGB"
    left, top = cut.left // factor, cut.top // factor
    right, bottom = left + -(-cut.width // factor), top + -(-cut.height // factor)
    picture: Image.Image = pil_module().new(mode, (-(-width // factor), -(-height // factor)), None)
    unread, status = 0, 0
    with suppress(AttributeError, TypeError):  # a PIL that is another one inside
        decoder = pil_module()._getdecoder(mode, "jpeg", (mode, "", factor, 0))
        decoder.setimage(picture.im, (left, top, right, bottom))
        unread, status = decoder.decode(cut.data)
    if unread >= 0 or status:
        image = decode.open_image(cut.data, None)
        _draft(image, factor)
        picture.paste(image, (left, top))  # loads it, and so says what is wrong, as ever
    return picture


def _draft(image: Any, factor: int) -> None:
    """Ask libjpeg for the picture at 1 / factor. For a factor of 1 it asks nothing."""
    if factor > 1:
        width, height = image.size
        # draft takes the least size wanted; W // (W // f) lies in [f, 2f) where the image has 8
        # pixels a side, so it is factor that it takes.
        image.draft("RGB", (max(1, width // factor), max(1, height // factor)))


def _reduced(box: Box, size: tuple[int, int], factor: int) -> Box:
    """Map a box of a picture of this size to the same picture decoded at 1 / factor."""
    if factor == 1:
        return box
    return (
        box[0] / factor,
        box[1] / factor,
        min(-(-size[0] // factor), box[2] / factor),
        min(-(-size[1] // factor), box[3] / factor),
    )


def cut_tiles(
    tiles: jpeg_tiles.Tiles, box: Box, target: tuple[int, int], interpolation: str, factor: int = 1
) -> jpeg_tiles.Cut:
    """Cut out the tiles that a resize of the box reads.

    box, target, factor: of Transform.choose_crop.
    """
    support = _SUPPORTS[interpolation]
    return tiles.cut(_room(box, target, support, tiles.width, tiles.height, factor))


def _room(
    box: Box, target: tuple[int, int], support: float, width: int, height: int, factor: int
) -> tuple[int, int, int, int]:
    """Return the pixels that PIL's resize reads: those under the box and under its filters.

    Each pixel of the result is a filter around its centre in the box, `support` wide on each side,
    in pixels of the result where it shrinks; of the picture's pixels those count whose centres it
    covers. The box lies in the picture at 1 / factor. The result is left, top, right, bottom in
    the width x height pixels of the whole.
    """
    sides = []
    for low, high, size, end in zip(box[:2], box[2:], target, (width, height), strict=True):
        scale = (high - low) / size
        beyond = max(0.5, support * max(scale, 1.0) - scale / 2) - 0.49  # 0.01 is for rounding
        first = max(0, math.floor(low - beyond) * factor)
        sides.append((first, min(end, math.ceil(high + beyond) * factor)))
    (left, right), (top, bottom) = sides
    return left, top, right, bottom


# Options --------------------------------------------------------------------------------------


def _check_range(name: str, value: Any, limit: float) -> tuple[float, float]:
    """Return two limits of RandomResizedCrop as (low, high). Raises OptionError."""
    try:
        low, high = (float(v) for v in value)
    except (TypeError, ValueError):
        low, high = 0.0, 0.0
    if 0 < low <= high <= limit and high < math.inf:
        return low, high
    within = " <= 1" if limit == 1 else ""
    raise OptionError(
        f"RandomResizedCrop: {name} is {value!r}, expected (low, high) with 0 < low <= high{within}"
    )


def _check_names(where: str, value: Any) -> tuple[str, ...]:
    """Return names of fields as a tuple. Raises OptionError unless each is there once."""
    names = tuple(value) if isinstance(value, tuple | list) else ()
    if not names or not all(isinstance(n, str) for n in names) or len(set(names)) < len(names):
        example = f"({value!r},)" if isinstance(value, str) else "('image', 'mask')"
        raise OptionError(
            f"{where}: fields is {value!r}, expected names of fields, each once, such as {example}"
        )
    return names


def _uniform(draw: int, k: int) -> float:
    """Return word k of a draw as a float in [0, 1), made of its upper 53 bits."""
    return (word(draw, k) >> 11) * 2.0**-53


def _uniforms(draws: NDArray[np.uint64], k: int) -> NDArray[np.float64]:
    """Return `_uniform` of each of these draws."""
    upper: NDArray[np.uint64] = splitmix64(draws + np.uint64(k * GAMMA & MASK)) >> np.uint64(11)
    return upper.astype(np.float64) * 2.0**-53
