"""A stranger's file is opened in a process of its own first: what llama.cpp does not like may end a process.

A file that passed is remembered by its path, size and time, so that the second start is quick.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hetrun.backend.library_model import WholeSetup
from hetrun.backends.llamacpp import ggml_api, libllama_api
from hetrun.config import dirs
from hetrun.errors import ModelFileError
from hetrun.graph.quant import by_name
from hetrun.system import subprocesses
from hetrun.system.file_identity import Stamp, unchanged

CHILD = (
    "from hetrun.system.subprocesses import answer; "
    "from hetrun.backends.libllama.crash_probe import {0}; answer({0})"
)
log = logging.getLogger(__name__)

LEAST_S = 60.0  # that a file has to open
SLOWEST = 20e6  # bytes per second that a disk reads


def check(files: Mapping[str, Stamp]) -> None:
    """Open the model, in as many files as it has, in another process, unless that was done before."""
    paths = [Path(path) for path in files]
    mark = _mark(
        [(path.resolve(), s.size, s.mtime_ns) for path, s in zip(paths, files.values(), strict=True)]
    )
    if mark.exists():
        return
    seconds = LEAST_S + sum(s.size for s in files.values()) / SLOWEST
    with unchanged(files):
        code = CHILD.format("run")
        subprocesses.ask(code, str(paths[0]), seconds, "llama.cpp")
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as e:
        log.debug("%s will be tried again the next time: %s", paths[0], e)


def _mark(facts: list[tuple[Path, int, int]]) -> Path:
    """The file whose presence says that these passed, with this version of llama.cpp."""
    known = repr((facts, ggml_api.library().version))
    return dirs().cache / "opened" / hashlib.sha256(known.encode()).hexdigest()


def look(files: Mapping[str, Stamp]) -> None:
    """Have its header read in another process: settings and vocabulary, which takes no weights."""
    with unchanged(files):
        code = CHILD.format("read")
        subprocesses.ask(code, next(iter(files)), LEAST_S, "llama.cpp")


def read(path: str) -> str:
    """The child that reads the header."""
    lib = _library()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise ModelFileError(path, f"llama.cpp cannot load it; {subprocesses.AGAIN}")
    lib.llama_model_free(model)
    return ""


def run(path: str) -> str:
    """The child that opens the file and takes one token in."""
    from hetrun.backends.libllama.runner import LlamaRunner

    _library()
    runner = LlamaRunner(Path(path), WholeSetup(64, 1, 1, 16, 16, by_name("F16")), trial=True)
    one = np.zeros(1, np.int64)
    if np.isnan(runner.run(one, one, one, np.ones(1, np.bool_))).any():
        raise ModelFileError(path, f"its weights give results that are not numbers; {subprocesses.AGAIN}")
    runner.close()
    return ""


def _library() -> Any:  # noqa: ANN401 - a ctypes library
    """llama.cpp, which writes its log to stderr, for the parent to quote."""
    lib = libllama_api.library()
    lib.llama_log_set(None, None)
    return lib
