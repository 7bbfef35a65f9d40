"""What a file is, by its first bytes: one of the formats that are read, or why it is not."""

from __future__ import annotations

import re

from hetrun.errors import PictureError

READ = "PNG, JPEG, WebP, GIF and BMP"
LOOK = 1024  # bytes

# As Pillow calls them.
FORMATS = {
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "JPEG": re.compile(rb"\xff\xd8\xff"),
    "WEBP": re.compile(rb"RIFF....WEBP", re.DOTALL),
    "GIF": re.compile(rb"GIF8[79]a"),
    "BMP": re.compile(rb"BM"),
}
TEXT = rb"(?:\xef\xbb\xbf)?\s*"
OTHERS = {
    "an SVG drawing": re.compile(
        TEXT + rb"(?:<\?xml.*?)?(?:<!--.*?-->\s*|<!DOCTYPE svg.*?)*<svg\b", re.DOTALL
    ),
    "a web page (HTML)": re.compile(
        TEXT + rb"(?:<!--.*?-->\s*)?<(?:!doctype\s+html|html|head|body)\b", re.I | re.S
    ),
    "an AVIF picture": re.compile(rb"....ftypavi[fs]", re.DOTALL),
    "a HEIC picture": re.compile(rb"....ftyp(?:hei[cxms]|hev[cx]|mif1|msf1)", re.DOTALL),
    "a video": re.compile(rb"....ftyp|\x1aE\xdf\xa3|RIFF....AVI ", re.DOTALL),
    "a TIFF picture": re.compile(rb"II\*\0|MM\0\*"),
    "a JPEG XL picture": re.compile(rb"\xff\x0a|\0\0\0\x0cJXL "),
    "a JPEG 2000 picture": re.compile(rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51"),
    "an icon (ICO)": re.compile(rb"\0\0[\x01\x02]\0"),
    "a Photoshop file": re.compile(rb"8BPS"),
    "a PDF document": re.compile(rb"%PDF-"),
    "an archive": re.compile(rb"PK\x03\x04|\x1f\x8b|7z\xbc\xaf|BZh|\xfd7zXZ"),
    "JSON": re.compile(TEXT + rb"[{\[]\s*[\"{\[]"),
}


def format_of(data: bytes) -> str:
    """Pillow's name of the file's format; PictureError if it is none that is read."""
    if not data:
        raise PictureError("the picture is empty: its file has no bytes")
    first = data[:LOOK]
    for name, magic in FORMATS.items():
        if magic.match(first):
            return name
    what = next((what for what, magic in OTHERS.items() if magic.match(first)), "")
    if what:
        raise PictureError(f"this is {what}, which is not read as a picture; convert it to PNG or JPEG")
    raise PictureError(f"this is not a picture in a format that is read ({READ})")
