"""Pictures that do harm, or try to, from a seed: the same ones each time."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from io import BytesIO

PNG = b"\x89PNG\r\n\x1a\n"
ZEROS = 1 << 26  # bytes in a bomb
GOOD_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colours: int, pixels: bytes, *extra: bytes) -> bytes:
    """A PNG file; `pixels` with a filter's byte before each row, `extra` chunks before them."""
    header = struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0)
    return (
        PNG
        + chunk(b"IHDR", header)
        + b"".join(extra)
        + chunk(b"IDAT", zlib.compress(pixels))
        + chunk(b"IEND", b"")
    )


@cache
def bomb() -> bytes:
    """64 MiB of zeros, compressed."""
    return zlib.compress(bytes(ZEROS), 9)


def jpeg(width: int, height: int, marker: int = 0xC0) -> bytes:
    """The header of a JPEG of this size, and no data."""
    frame = struct.pack(">BHHB", 8, height, width, 3) + b"\1\x11\0\2\x11\0\3\x11\0"
    return (
        b"\xff\xd8\xff"
        + bytes([marker])
        + struct.pack(">H", 2 + len(frame))
        + frame
        + b"\xff\xda\0\x0c\3\1\0\2\0\3\0\0\x3f\0\xff\xd9"
    )


def webp(width: int, height: int) -> bytes:
    """The header of an extended WebP of this size, and no data."""
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + size
    return b"RIFF" + struct.pack("<I", len(body)) + body


def gif(width: int, height: int, frames: int, data: bytes = b"\2\x4c\1\0") -> bytes:
    """A GIF with this many frames of one pixel."""
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + data
    return (
        b"GIF89a"
        + struct.pack("<HH", width, height)
        + b"\x80\0\0\0\0\0\xff\xff\xff"
        + frame * frames
        + b"\x3b"
    )


def bmp(width: int, height: int, bits: int = 24, compression: int = 0) -> bytes:
    """The header of a BMP, and four bytes."""
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 58, 0, 0, 54) + info + bytes(4)


def exif_loop(random_: random.Random) -> bytes:
    """EXIF whose directories point to themselves and to each other."""
    entries = [
        struct.pack("<HHII", tag, 4, 1, random_.choice((8, 8, 20, 0xFFFFFFFF)))
        for tag in (0x8769, 0x8825, 0xA005)
    ]
    entries += [struct.pack("<HHII", 274, random_.choice((3, 5, 12)), random_.choice((1, 1 << 31)), 6)]
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + struct.pack("<I", 8)
    tiff = b"Exif\0\0II*\0\x08\0\0\0" + directory
    return b"\xff\xe1" + struct.pack(">H", 2 + len(tiff)) + tiff


@cache
def good() -> tuple[bytes, ...]:
    """Small pictures that are all right, in many forms."""
    from PIL import Image

    noise = Image.effect_noise((48, 32), 90)
    forms = {
        "PNG": [noise, *(noise.convert(mode) for mode in ("1", "P", "RGB", "RGBA", "LA", "I;16"))],
        "JPEG": [noise, noise.convert("RGB"), noise.convert("CMYK")],
        "WEBP": [noise.convert("RGB"), noise.convert("RGBA")],
        "GIF": [noise, noise.convert("P"), noise.convert("1")],
        "BMP": [noise, noise.convert("RGB"), noise.convert("1"), noise.convert("P")],
    }
    found = []
    for name, pictures in forms.items():
        for picture in pictures:
            options = {"progressive": True} if name == "JPEG" and picture.mode == "RGB" else {}
            file = BytesIO()
            picture.save(file, name, **options)
            found.append(file.getvalue())
    for name in ("GIF", "WEBP", "PNG"):
        file = BytesIO()
        frames = [noise.convert("RGB").rotate(30 * i) for i in range(5)]
        frames[0].save(file, name, save_all=True, append_images=frames[1:])
        found.append(file.getvalue())
    return tuple(found)


def bombs(random_: random.Random) -> bytes:
    """A small file that asks for much."""
    size = random_.choice((8_193, 60_000, 65_535, 1 << 20, (1 << 31) - 1))
    other = random_.choice((size, 1, 8_192, 60_000))
    little, small = min(size, 65_535), min(other, 65_535)
    made: tuple[Callable[[], bytes], ...] = (
        lambda: png(size, other, 8, 2, bytes(100)),
        lambda: png(60_000, 60_000, 8, 6, b""),
        lambda: png(size, other, 1, 0, bytes(100)),
        lambda: png(8, 8, 8, 0, bytes(72), chunk(b"iCCP", b"x\0\0" + bomb())),
        lambda: png(8, 8, 8, 0, bytes(72), chunk(b"zTXt", b"x\0\0" + bomb())),
        lambda: png(8, 8, 8, 0, bytes(72), *[chunk(b"iTXt", b"x\0\1\0\0\0" + bomb())] * 5),
        lambda: PNG + png(8, 8, 8, 0, b"")[8:33] + chunk(b"IDAT", bomb()) + chunk(b"IEND", b""),
        lambda: PNG + png(8192, 8192, 8, 0, b"")[8:33] + chunk(b"IDAT", bomb()) + chunk(b"IEND", b""),
        lambda: PNG + png(8192, 8192, 8, 2, b"")[8:33] + chunk(b"IDAT", bomb()) + chunk(b"IEND", b""),
        lambda: jpeg(little, small, random_.choice((0xC0, 0xC1, 0xC2, 0xC3, 0xC9))),
        lambda: webp(min(size, 1 << 24), min(other, 1 << 24)),
        lambda: gif(little, small, random_.choice((1, 1000, 50_000))),
        lambda: bmp(
            min(size, 1 << 30),
            random_.choice((-1, 1)) * min(other, 1 << 30),
            random_.choice((1, 4, 8, 24, 32)),
            random_.choice((0, 1, 2, 3)),
        ),
        lambda: b"\xff\xd8" + exif_loop(random_) + good()[8][2:],
    )
    return random_.choice(made)()


def strange(random_: random.Random) -> bytes:
    """What is no picture, or two things at once."""
    first = random_.choice(good())
    made = (
        b"",
        b"<svg xmlns='http://www.w3.org/2000/svg' width='9'><script>alert(1)</script></svg>",
        b"<?xml version='1.0'?>\n<!DOCTYPE svg [<!ENTITY a 'b'>]>\n<svg/>",
        b"<!DOCTYPE html><html><img src=x></html>",
        b'{"error": "not found"}',
        b"%PDF-1.7\n",
        b"II*\0" + random_.randbytes(100),
        b"\0\0\0\x20ftypheic" + random_.randbytes(100),
        b"\0\0\0\x20ftypavif" + random_.randbytes(100),
        b"PK\3\4" + first,
        b"GIF89a" + first,
        b"BM" + first,
        b"\x89PNG\r\n\x1a\n" + first,
        b"\xff\xd8\xff" + first,
        first + b"<script>alert(1)</script>" + first,
        b"RIFF\xff\xff\xff\xffWEBP" + first,
        random_.randbytes(random_.randrange(1, 2000)),
        random_.choice((PNG, b"\xff\xd8\xff", b"GIF87a", b"BM", b"RIFF1234WEBPVP8 "))
        + random_.randbytes(300),
        b"RIFF@\0\0\0WEBP" + random_.choice((b"VP8 ", b"VP8L", b"VP8X", b"ANIM")) + random_.randbytes(80),
    )
    return random_.choice(made)


def truncated(random_: random.Random) -> bytes:
    """A picture without its end."""
    file = random_.choice(good())
    return file[: random_.randrange(len(file))]


def flipped(random_: random.Random) -> bytes:
    """A picture with some bits or bytes changed, most of them near its beginning; PNG with right sums."""
    file = bytearray(random_.choice(good()))
    for _ in range(random_.choice((1, 1, 2, 8, 64))):
        place = random_.randrange(min(len(file), random_.choice((40, 120, 1 << 20))))
        file[place] = random_.choice(
            (file[place] ^ 1 << random_.randrange(8), 0, 0xFF, random_.randrange(256))
        )
    return mended(bytes(file)) if random_.random() < 0.7 else bytes(file)


def mended(file: bytes) -> bytes:
    """A PNG with the checksums of its chunks made right, so that the change is looked at."""
    if not file.startswith(PNG):
        return file
    parts, place = [PNG], 8
    while place + 12 <= len(file):
        size = struct.unpack(">I", file[place : place + 4])[0]
        if place + 12 + size > len(file):
            break
        parts.append(chunk(file[place + 4 : place + 8], file[place + 8 : place + 8 + size]))
        place += 12 + size
    return b"".join(parts) + file[place:]


def spliced(random_: random.Random) -> bytes:
    """The beginning of one picture and the end of another."""
    one, other = random_.choice(good()), random_.choice(good())
    return one[: random_.randrange(len(one))] + other[random_.randrange(len(other)) :]


MAKERS = (truncated, truncated, flipped, flipped, flipped, bombs, strange, spliced)


def hostile(count: int, seed: int = 40) -> Iterator[bytes]:
    """This many of them."""
    random_ = random.Random(seed)
    for i in range(count):
        yield MAKERS[i % len(MAKERS)](random_)
