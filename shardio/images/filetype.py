"""Tell the format of an image file by its first bytes, and how the names of such files end."""

from __future__ import annotations

# First bytes of the image files that the decoders read; 12 bytes are enough to tell.
_SIGNATURES = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "BMP": (b"BM",),
    "TIFF": (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+"),
    "JPEG 2000": (b"\x00\x00\x00\x0cjP  ", b"\xff\x4f\xff\x51"),
    "JPEG XL": (b"\x00\x00\x00\x0cJXL ", b"\xff\x0a"),
    "PNM": tuple(b"P%d%c" % (kind, blank) for kind in range(1, 8) for blank in b" \t\n\v\f\r"),
}
_FTYP_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1")

# How names of such files end, in lower case; the usual way first.
ENDINGS = {
    "JPEG": ("jpg", "jpeg", "jpe", "jfif"),
    "PNG": ("png",),
    "GIF": ("gif",),
    "BMP": ("bmp",),
    "TIFF": ("tif", "tiff"),
    "WEBP": ("webp",),
    "JPEG 2000": ("jp2", "j2k"),
    "JPEG XL": ("jxl",),
    "PNM": ("ppm", "pgm", "pbm", "pnm"),
    "AVIF or HEIF": ("avif", "heic", "heif"),
}
ALL_ENDINGS = frozenset(ending for endings in ENDINGS.values() for ending in endings)


def image_type(start: bytes) -> str | None:
    """Return the format of an image file, such as "JPEG", by its first 12 bytes or more.

    Returns None if the bytes begin no image that the decoders read.
    """
    for kind, signatures in _SIGNATURES.items():
        if start.startswith(signatures):
            return kind
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "WEBP"
    if start[4:8] == b"ftyp" and start[8:12] in _FTYP_BRANDS:
        return "AVIF or HEIF"
    return None
