"""The process that decodes strangers' pictures: what it takes from itself first, and what it does then.

It says that it is ready, and decodes one picture after the other: it gets a format and a file, and answers
with a size and pixels, or with what is wrong. By then it has no file but its pipe and can open none, its
memory ends 256 MiB above what it has, and the system ends it when a picture computes for too long.
"""

from __future__ import annotations

import os
import select
import struct
import warnings
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from typing import NoReturn

from PIL import (  # noqa: F401 - what Pillow imports on use must be there before no file can be opened
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    ImageFile,
    ImageOps,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
)

with suppress(ImportError):  # a Pillow that was built without it
    from PIL import WebPImagePlugin  # noqa: F401

from hetrun.pictures import limits
from hetrun.system.sandbox.framing import HEAD, framed, length
from hetrun.system.sandbox.inside import bound_memory, bounded_time, give_up_rights, read, write

STRIP = 1 << 18  # pixels that are converted at once
ORIENTATION = 274  # in EXIF
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2}  # of a pixel in memory, by mode; of others: 4
WEBP_BYTES = 16  # two canvases, the frame and the picture


class DecodingTimeout(BaseException):
    """Decoding takes too long; no `except Exception` may stop this one."""


class PictureRefused(Exception):
    """The picture is not decoded; the text says why."""


def main(pipe: int) -> None:
    """The child's whole life; `pipe` is its end of the pipe."""
    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = limits.MOST_PIXELS
    prime()
    used = give_up_rights()
    write(pipe, framed({"ready": True}))
    bound_memory(used + limits.MEMORY, used + limits.MEMORY)
    try:
        while True:
            serve(pipe)
    except MemoryError:
        os._exit(limits.NO_MEMORY)
    except DecodingTimeout:
        os._exit(limits.NO_TIME)


def prime() -> None:
    """Decode a small picture of each format: codecs and modules that come on use."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        with suppress(KeyError, OSError):  # built without it
            file = BytesIO()
            Image.new("RGB", (8, 4)).save(file, name, exif=exif)
            for _ in strips(decoded(file.getvalue(), name)):
                pass


def serve(pipe: int) -> None:
    """One picture."""
    if not select.select([pipe], [], [], limits.IDLE_S)[0]:
        os._exit(0)
    name = read(pipe, HEAD.size).decode("ascii").strip()
    data = read(pipe, length(read(pipe, HEAD.size)))
    try:
        picture = decoded(data, name)
    except DecodingTimeout:
        give_up(pipe, limits.NO_TIME)
    except MemoryError:
        give_up(pipe, limits.NO_MEMORY)
    except Exception as error:
        write(pipe, framed({"reason": reason_of(error), "over": False}))
        return
    del data
    write(pipe, framed({"width": picture.width, "height": picture.height}))
    for strip in strips(picture):
        write(pipe, strip)


def give_up(pipe: int, code: int) -> NoReturn:
    """What was interrupted anywhere may hold a lock, and what filled the memory may still lie there."""
    write(pipe, framed({"reason": limits.FAULTS[code], "over": True}))
    os._exit(code)


# What Pillow says, in words for the person who sent the picture.
MEANINGS = {
    "runcated": "its end is missing",
    "data stream": "its data is damaged",
    "decoder object": "its header is damaged",
    "Decompressed data too large": "a text or a colour profile in it is too large",
}


def reason_of(error: Exception) -> str:
    """What is wrong with a picture."""
    said = str(error)
    match error:
        case PictureRefused():
            return said
        case Image.DecompressionBombError():
            return f"it has more than {limits.MOST_PIXELS:,} pixels; scale it down"
        case UnidentifiedImageError():
            return "its header is damaged"
    known = (meaning for words, meaning in MEANINGS.items() if words in said)
    return next(known, f"it is damaged ({said or type(error).__name__})")


def decoded(data: bytes, name: str) -> Image.Image:
    """The picture, upright and not too large."""
    with bounded_time(limits.OPEN_S, DecodingTimeout):
        if name == "WEBP":  # its decoder takes memory for a canvas as soon as it is opened
            width, height = webp_size(data)
            spared(WEBP_BYTES * checked(width, height) + 2 * len(data), width, height)
        try:
            picture = Image.open(BytesIO(data), formats=(name,))
        except KeyError:
            raise PictureRefused("this Pillow was built without this format") from None
        pixels = checked(*picture.size)
    with bounded_time(limits.seconds(pixels), DecodingTimeout):
        return upright(loaded(picture, name, len(data)))


def checked(width: int, height: int) -> int:
    """How many pixels these are; refused if they are too many, or none."""
    pixels = width * height
    if min(width, height) <= 0:
        raise PictureRefused(f"its size is {width} x {height} pixels")
    if pixels > limits.MOST_PIXELS or max(width, height) > limits.MOST_SIDE:
        raise PictureRefused(
            f"it has {width} x {height} pixels, and up to {limits.MOST_PIXELS:,} are read, with at most "
            f"{limits.MOST_SIDE:,} to a side; scale it down"
        )
    return pixels


def webp_size(data: bytes) -> tuple[int, int]:
    """The size of a WebP picture's canvas."""
    kind, size = data[12:16], data[20:30]
    if len(size) == 10:
        if kind == b"VP8X":
            return int.from_bytes(size[4:7], "little") + 1, int.from_bytes(size[7:10], "little") + 1
        if kind == b"VP8 ":
            width, height = struct.unpack("<HH", size[6:10])
            return width & 0x3FFF, height & 0x3FFF
        if kind == b"VP8L":
            (bits,) = struct.unpack("<I", size[1:5])
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    raise PictureRefused("its header is damaged")


def loaded(picture: ImageFile.ImageFile, name: str, size: int) -> Image.Image:
    """Its first frame, scaled down if it is large."""
    width, height = picture.size
    divisor = limits.scale(width * height)
    # What a progressive JPEG keeps until its end.
    kept = 2 * len(picture.getbands()) * width * height if picture.info.get("progressive") else 0
    if name == "JPEG" and divisor > 1:  # scaled as it is decoded
        picture.draft(None, (width // divisor, height // divisor))
        divisor = limits.scale(picture.width * picture.height)
    pixels = picture.width * picture.height
    small = 4 * pixels // divisor**2 if divisor > 1 else 0
    depth = WEBP_BYTES if name == "WEBP" else BYTES.get(picture.mode, 4)
    spared(kept + depth * pixels + small + 2 * size, width, height)
    picture.load()
    return picture if divisor == 1 else reduced(picture, divisor)


def spared(wanted: int, width: int, height: int) -> None:
    """Refuse what would take more memory than there may be."""
    if wanted + limits.SLACK > limits.MEMORY:
        raise PictureRefused(
            f"decoding its {width} x {height} pixels takes {(wanted + limits.SLACK) // limits.MIB} MiB, and "
            f"{limits.MEMORY // limits.MIB} may be used; scale it down"
        )


def reduced(picture: Image.Image, divisor: int) -> Image.Image:
    """The picture with each side divided, in parts: a whole copy may not fit."""
    width, height = (-(-side // divisor) for side in picture.size)
    small = Image.new("RGB", (width, height))
    rows = divisor * max(1, STRIP // picture.width // divisor)
    for top in range(0, picture.height, rows):
        part = picture.crop((0, top, picture.width, min(top + rows, picture.height)))
        small.paste(on_white(part).reduce(divisor), (0, top // divisor))
    small.info = {key: found for key, found in picture.info.items() if key == "exif"}
    return small


def upright(picture: Image.Image) -> Image.Image:
    """Turned as its camera says."""
    try:
        turn = TURNS.get(picture.getexif().get(ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:  # a stranger's tags: without them it is the same picture
        turn = None
    return picture if turn is None else picture.transpose(turn)


def strips(picture: Image.Image) -> Iterator[bytes]:
    """All pixels, in parts: red, green and blue."""
    rows = max(1, STRIP // picture.width)
    with bounded_time(limits.seconds(picture.width * picture.height), DecodingTimeout):
        for top in range(0, picture.height, rows):
            part = picture.crop((0, top, picture.width, min(top + rows, picture.height)))
            yield on_white(part).tobytes()


def on_white(part: Image.Image) -> Image.Image:
    """In red, green and blue; what is transparent is white."""
    if part.mode.startswith("I"):  # 16 bits of grey: the upper 8
        grey = part.convert("I").point(lambda value: value * (1 / 256)).convert("L")
        grey.info = {}  # such as the one grey of 16 bits that is transparent
        return grey.convert("RGB")
    if not part.has_transparency_data:
        return part.convert("RGB")
    shown = part.convert("RGBA")
    white = Image.new("RGBA", shown.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, shown).convert("RGB")
