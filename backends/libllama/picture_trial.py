"""A stranger's vision tower is tried in a process of its own first, as models are: see crash_probe."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from pathlib import Path
from threading import Lock

from hetrun.backend.picture_encoder import PictureSetup, PromptRows, Vision
from hetrun.backends.llamacpp import ggml_api
from hetrun.config import dirs
from hetrun.pictures.picture import Picture
from hetrun.system import subprocesses
from hetrun.system.file_identity import unchanged

CHILD = (
    "from hetrun.backend.picture_encoder import *; from hetrun.loader.vision import Tower; "
    "from hetrun.system.file_identity import Stamp; from hetrun.system.subprocesses import answer; "
    "from functools import partial; from hetrun.backends.libllama.picture_trial import run; "
    "answer(partial(run, vision={vision!r}, threads={threads}))"
)
LEAST_S = 180.0  # to load and to encode three small pictures
SAYS_NOTHING = b"Failed to load CLIP model"
SLOWEST = 20e6  # bytes per second that a disk reads
log = logging.getLogger(__name__)
_one_at_a_time = Lock()  # who comes second finds what the first has found out


def check(setup: PictureSetup) -> None:
    """Encode small pictures in another process, unless that was done with this file before; any thread."""
    with _one_at_a_time:
        mark = _mark(setup.vision)
        if not mark.exists():
            _try(setup, mark)


def _try(setup: PictureSetup, mark: Path) -> None:
    vision = setup.vision
    with unchanged({vision.path: vision.stamp}):
        code = CHILD.format(vision=vision, threads=setup.threads)
        seconds = LEAST_S + vision.stamp.size / SLOWEST
        subprocesses.ask(code, vision.path, seconds, "llama.cpp")
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as e:
        log.debug("%s will be tried again the next time: %s", vision.path, e)


def _mark(vision: Vision) -> Path:
    """The file whose presence says that this one passed, with this version of llama.cpp."""
    facts = (Path(vision.path).resolve(), vision.stamp.size, vision.stamp.mtime_ns, vision.width)
    known = repr((facts, ggml_api.library().version))
    return dirs().cache / "opened" / hashlib.sha256(known.encode()).hexdigest()


def _hear(level: int, line: bytes, _: int | None) -> None:
    """A line of the log, unless it only says again that something failed: the one before says what."""
    if SAYS_NOTHING not in line:
        os.write(2, line)


_heard = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_hear)


def run(path: str, vision: Vision, threads: int) -> str:
    """The child: it encodes a small picture of each form."""
    from hetrun.backends.libllama import mtmd_api
    from hetrun.backends.libllama.pictures import MtmdEncoder
    from hetrun.backends.llamacpp import libllama_api

    libllama_api.library().llama_log_set(None, None)  # to stderr, for the parent to quote
    mtmd_api.library().mtmd_log_set(ctypes.cast(_heard, ctypes.c_void_p), None)
    encoder = MtmdEncoder(PictureSetup(vision, threads, lambda text: [0] * len(text)))
    side = vision.tower.grain
    sizes = (
        ((side, side),) if vision.tower.side else ((side, side), (7 * side, 2 * side), (2 * side, 9 * side))
    )
    for width, height in sizes:
        picture = Picture.of(width, height, bytes(3 * width * height))
        for piece in encoder.lay_out(picture):
            if isinstance(piece, PromptRows):
                encoder.encode(piece)
    encoder.close()
    return ""
