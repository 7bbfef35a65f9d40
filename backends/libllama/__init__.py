"""llama.cpp as a whole: for architectures that hetrun has no file for, and for who asks for it by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from hetrun.backend import Available, Backend, Descriptor, Probe, Unavailable
from hetrun.backend.library_model import LibraryBackend, WholeRunner, WholeSetup
from hetrun.backend.picture_encoder import PictureEncoder, Pictures, PictureSetup
from hetrun.errors import BackendUnavailable, OptionError
from hetrun.system.file_identity import Stamp, unchanged


def probe() -> Probe:
    """Whether libllama is there and is a version whose structures we know."""
    from hetrun.backends.llamacpp import ggml_api, libllama_api

    try:
        libllama_api.library()
    except BackendUnavailable as e:
        return Unavailable(str(e))
    return Available(f"llama.cpp with ggml {ggml_api.library().version}, for whole models")


def create() -> Backend:
    """There is nothing that could take a segment."""
    raise OptionError("libllama runs whole models, not parts of one; name another backend for parts")


def open_whole(
    files: Mapping[str, Stamp], setup: WholeSetup, progress: Callable[[float], None] | None
) -> WholeRunner:
    """The model in a file, which is tried in a process of its own first: llama.cpp may end the process.

    It reads all of it before it answers, and maps nothing: the file may be cut meanwhile.
    """
    from hetrun.backends.libllama import crash_probe
    from hetrun.backends.libllama.runner import LlamaRunner

    path = Path(next(iter(files)))  # llama.cpp finds the other parts by their names
    with ExitStack() as undo:
        with unchanged(files):
            crash_probe.check(files)
            runner = LlamaRunner(path, setup, progress)
            undo.callback(runner.close)
        undo.pop_all()
    return runner


def look(files: Mapping[str, Stamp]) -> None:
    """Have llama.cpp read the header, in a process of its own."""
    from hetrun.backends.libllama import crash_probe

    crash_probe.look(files)


PROMISES_OFF = (
    "a choice of backends for parts of the model, and streaming: llama.cpp runs all of it on the CPU",
    "one bill: llama.cpp allocates by itself; the figures above are estimates, and so is the check of --ram",
    "one numeric path: a token's logits depend a little on what else is in its step",
    "a cancel within 40 ms: it is heard between two operations of llama.cpp",
    "cheap cuts: where a model keeps a state instead of keys and values, or has given up keys and values "
    "outside its window, a sequence that was cut or whose step was cancelled is computed again",
)


def open_encoder(setup: PictureSetup) -> PictureEncoder:
    """A vision tower, whose file is tried in a process of its own first: llama.cpp may end the process."""
    from hetrun.backends.libllama.pictures import MtmdEncoder

    try_out(setup)
    return MtmdEncoder(setup)


def try_out(setup: PictureSetup) -> None:
    """Have llama.cpp encode small pictures in a process of its own, once for each file."""
    from hetrun.backends.libllama import picture_trial

    picture_trial.check(setup)


def bytes_for(setup: PictureSetup, width: int, height: int) -> int:
    """Memory that encoding a picture will take, beside the tower's weights."""
    from hetrun.backends.libllama import pictures

    return pictures.bytes_for(setup, width, height)


descriptor = Descriptor(
    "libllama",
    probe,
    create,
    "llama.cpp as a whole, for architectures that hetrun does not know",
    preference=1,
    whole=LibraryBackend(open_whole, PROMISES_OFF, look),
    pictures=Pictures(open_encoder, bytes_for, try_out),
)
