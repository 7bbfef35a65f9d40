"""Honest pictures: the same pixels as Pillow gives in this process, and as files made by hand have."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from hetrun.client.events import MOST_PICTURE_BYTES
from hetrun.errors import EngineStopped, PictureError
from hetrun.pictures import decoder as decoders, limits
from hetrun.pictures.decoder import PictureDecoder
from hetrun.pictures.kinds import FORMATS
from hetrun.system.sandbox.child import ENVIRONMENT
from tests.support.hostile_pictures import chunk, png

Bytes = NDArray[np.uint8]
ORIENTATION = 274


@pytest.fixture(scope="module")
def decoder() -> Iterator[PictureDecoder]:
    with PictureDecoder() as made:
        yield made


def file_of(picture: Image.Image, name: str, **options: object) -> bytes:
    file = BytesIO()
    picture.save(file, name, **options)
    return file.getvalue()


def pixels(decoder: PictureDecoder, file: bytes) -> Bytes:
    picture = decoder.decode(file)
    return np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, 3)


def noise(width: int = 61, height: int = 37) -> Image.Image:
    values = np.random.default_rng(5).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def test_a_png_made_by_hand(decoder: PictureDecoder) -> None:
    values = np.random.default_rng(1).integers(0, 256, (19, 23, 3), np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    picture = decoder.decode(png(23, 19, 8, 2, rows))
    assert (picture.width, picture.height, picture.rgb) == (23, 19, values.tobytes())
    head = (23).to_bytes(4, "little") + (19).to_bytes(4, "little")
    assert picture.digest == sha256(head + values.tobytes()).digest()


def test_greys_of_1_and_16_bits(decoder: PictureDecoder) -> None:
    bits = pixels(decoder, png(8, 2, 1, 0, b"\0\xaa\0\x0f"))
    assert bits[..., 0].tolist() == [[255, 0] * 4, [0] * 4 + [255] * 4]
    values = np.array([[0, 255, 256, 65535, 40000]], ">u2")
    upper = pixels(decoder, png(5, 1, 16, 0, b"\0" + values.tobytes()))
    assert upper.tolist() == [[[v] * 3 for v in (0, 0, 1, 255, 156)]]


def test_colours_of_16_bits_and_a_palette(decoder: PictureDecoder) -> None:
    values = np.random.default_rng(2).integers(0, 65536, (1, 7, 3)).astype(">u2")
    found = pixels(decoder, png(7, 1, 16, 2, b"\0" + values.tobytes()))
    assert (found == values // 256).all()
    palette = chunk(b"PLTE", bytes([9, 8, 7, 100, 150, 200]))
    assert pixels(decoder, png(8, 1, 1, 3, b"\0\x0f", palette)).tolist() == [
        [[9, 8, 7]] * 4 + [[100, 150, 200]] * 4
    ]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "CMYK"])
def test_as_in_this_process(decoder: PictureDecoder, name: str, mode: str) -> None:
    if mode == "CMYK" and name != "JPEG":
        pytest.skip("the format has no such pixels")
    picture = noise().convert(mode)
    file = file_of(picture.convert("L") if name == "JPEG" and mode == "P" else picture, name)
    wanted = np.asarray(Image.open(BytesIO(file)).convert("RGB"))
    assert (pixels(decoder, file) == wanted).all()


def test_what_is_transparent_is_white(decoder: PictureDecoder) -> None:
    values = np.zeros((1, 3, 4), np.uint8)
    values[0, :, 3] = 0, 128, 255
    picture = Image.fromarray(values)
    assert pixels(decoder, file_of(picture, "PNG"))[0, :, 0].tolist() == [255, 127, 0]
    webp = pixels(decoder, file_of(picture, "WEBP", lossless=True))
    assert webp[0, :, 0].tolist() == [255, 127, 0]
    grey = Image.new("L", (2, 1), 40)
    grey.putpixel((1, 0), 50)
    assert pixels(decoder, file_of(grey, "PNG", transparency=50))[0, :, 1].tolist() == [40, 255]
    palette = Image.new("P", (2, 1), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.putpixel((0, 0), 0)
    assert pixels(decoder, file_of(palette, "GIF", transparency=0)).tolist() == [
        [[255, 255, 255], [10, 20, 30]]
    ]


@pytest.mark.parametrize("orientation", range(10))
def test_it_is_upright(decoder: PictureDecoder, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    file = file_of(noise(), "PNG", exif=exif)
    opened = Image.open(BytesIO(file))
    wanted = ImageOps.exif_transpose(opened) if 1 < orientation < 9 else opened
    assert (pixels(decoder, file) == np.asarray(wanted)).all()


@pytest.mark.parametrize("name", ["GIF", "WEBP", "PNG"])
def test_the_first_frame(decoder: PictureDecoder, name: str) -> None:
    colours = [(250, 0, 0), (0, 250, 0), (0, 0, 250)]
    frames = [Image.new("RGB", (9, 9), colour) for colour in colours]
    options = {"lossless": True} if name == "WEBP" else {}
    file = file_of(frames[0], name, save_all=True, append_images=frames[1:], **options)
    assert pixels(decoder, file)[4, 4].tolist() == [250, 0, 0]


def test_4096_by_4096_is_kept_and_more_is_scaled_down(decoder: PictureDecoder) -> None:
    picture = Image.linear_gradient("L").resize((4096, 4096))
    found = decoder.decode(file_of(picture, "PNG", compress_level=1))
    assert found.rgb == picture.convert("RGB").tobytes()
    wide = picture.resize((8190, 2100))
    for name, options in (("PNG", {"compress_level": 1}), ("JPEG", {"quality": 95})):
        small = pixels(decoder, file_of(wide, name, **options))
        assert small.shape == (1050, 4095, 3)
        near = np.asarray(wide.reduce(2))
        assert np.abs(small[..., 0].astype(int) - near).max() <= 4


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (b"", "the picture is empty: its file has no bytes"),
        (b"\n<svg width='1'/>", "this is an SVG drawing, which is not read as a picture; convert it to PNG"),
        (b"<!doctype html><p>", r"this is a web page \(HTML\), which is not read"),
        (b"\0\0\0\x18ftypheic", "this is a HEIC picture, which is not read"),
        (b"Hello", r"not a picture in a format that is read \(PNG, JPEG, WebP, GIF and BMP\)"),
        (png(60_000, 60_000, 8, 2, b""), "PNG picture cannot be read: it has more than 67,108,864 pixels"),
        (png(8_200, 8_200, 8, 2, b""), "it has 8200 x 8200 pixels, and up to 67,108,864 are read"),
        (png(8_000, 8_000, 8, 2, b""), "decoding its 8000 x 8000 pixels takes .* MiB, and 256 may be used"),
        (png(8, 8, 8, 2, b"\0" * 60), "PNG picture cannot be read: its end is missing"),
        (png(0, 8, 8, 2, b""), "PNG picture cannot be read: its (header is damaged|size is 0)"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", "JPEG picture cannot be read: its end is missing"),
        (bytes(MOST_PICTURE_BYTES + 1), "the picture's file has 32 MiB, and up to 32 MiB are read"),
    ],
    ids=range(12),
)
def test_a_sentence_for_each(decoder: PictureDecoder, file: bytes, said: str) -> None:
    with pytest.raises(PictureError, match=said):
        decoder.decode(file)


def test_one_process_for_all_threads(decoder: PictureDecoder) -> None:
    files = [file_of(noise(8 + i, 9), "PNG") for i in range(20)]
    decoder.decode(files[0])
    pid = decoder.pid
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(decoder.decode, files))
    assert [picture.width for picture in found] == [8 + i for i in range(20)]
    assert decoder.pid == pid


def test_what_the_process_has_given_up(decoder: PictureDecoder) -> None:
    decoder.decode(file_of(noise(), "PNG"))
    proc = Path(f"/proc/{decoder.pid}")
    names = [os.readlink(path) for path in (proc / "fd").iterdir()]
    assert sorted(name.partition(":")[0] for name in names) == ["/dev/null"] * 3 + ["socket"]
    environment = (proc / "environ").read_bytes().split(b"\0")
    assert {entry.partition(b"=")[0].decode() for entry in environment if entry} <= {*ENVIRONMENT}
    assert (proc / "oom_score_adj").read_text().strip() == "1000"  # killed before the process with the model
    found = {line[:26].strip(): line[26:].split() for line in (proc / "limits").read_text().splitlines()}
    assert found["Max open files"][0] == found["Max file size"][0] == "0"
    assert int(found["Max address space"][0]) < 1 << 30


def test_a_killed_process_is_started_again() -> None:
    with PictureDecoder() as decoder:
        file = file_of(noise(), "PNG")
        first = decoder.decode(file)
        assert decoder.pid
        assert decoder._kept.child
        os.kill(decoder.pid, signal.SIGKILL)
        decoder._kept.child._popen.wait()
        assert decoder.decode(file) == first


def test_a_process_without_work_ends_and_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    brief = "from hetrun.pictures import limits; limits.IDLE_S = 0.01; "
    monkeypatch.setattr(decoders, "CHILD", brief + decoders.CHILD)
    with PictureDecoder() as decoder:
        file = file_of(noise(), "PNG")
        first = decoder.decode(file)
        assert decoder._kept.child
        assert decoder._kept.child._popen.wait(30) == 0
        assert decoder.decode(file) == first
        # It may also end while the next picture is on its way: then it has not been looked at yet.
        assert decoder._kept.child._popen.wait(30) == 0
        monkeypatch.setattr(decoders.DecoderProcess, "alive", True)
        assert decoder.decode(file) == first


def breaking(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that a picture has taken over: it does this in place of decoding, once it has begun."""
    hook = "import os; import hetrun.pictures.decoder_main as m; framed = m.framed; "
    hook += f"m.prime = lambda p=m.prime: (p(), exec({code!r}, dict(m=m, os=os, framed=framed))); "
    monkeypatch.setattr(decoders, "CHILD", hook + decoders.CHILD)


READY = "framed(x if 'ready' in x else"
TAKEN_OVER = {
    "memory": ("m.loaded = lambda *a: [0] * (1 << 30)", "takes more than 256 MiB of memory to decode"),
    "time": ("m.limits.DECODE_S = 0.2; m.loaded = lambda *a: [0 for _ in iter(int, 1)]", "takes too long"),
    "crash": ("m.loaded = lambda *a: os.kill(os.getpid(), 11)", r"its process crashed \(SIGSEGV\)"),
    "exit": ("m.loaded = lambda *a: os._exit(0)", "its process exited with code 0"),
    "file": (
        "m.loaded = lambda *a: open('/etc/passwd')",
        r"it is damaged \(.*(Too many open files|ot permitted)",
    ),
    "length": ("m.framed = lambda x: framed(x) if 'ready' in x else bytes([255] * 4)", "unreadable answer"),
    "size": (f"m.framed = lambda x: {READY} dict(width=4096, height=9999))", "unreadable answer"),
    "words": (f"m.framed = lambda x: {READY} dict(reason=9))", "unreadable answer"),
}


@pytest.mark.parametrize("way", TAKEN_OVER)
def test_a_process_that_was_taken_over(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = TAKEN_OVER[way]
    breaking(code, monkeypatch)
    with PictureDecoder() as decoder, pytest.raises(PictureError, match=said):
        decoder.decode(file_of(noise(), "PNG"))


def test_a_closed_decoder() -> None:
    decoder = PictureDecoder()
    decoder.close()
    decoder.close()
    with pytest.raises(EngineStopped):
        decoder.decode(file_of(noise(), "PNG"))


def test_how_far_a_picture_is_scaled_down() -> None:
    found = [
        limits.scale(pixels) for pixels in (1, limits.MOST_KEPT, limits.MOST_KEPT + 1, limits.MOST_PIXELS)
    ]
    assert found == [1, 1, 2, 2]
