"""llama.cpp through its own Python package: the peer that answers are compared with."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from hetrun.backends.llamacpp import amx_check, ggml_api, libllama_api

FOLDER = "LLAMA_CPP_LIB_PATH"


@cache
def llama_cpp() -> Any:  # noqa: ANN401 - the package has no types
    """The package. Its import turns llama.cpp's log on, for this whole process: it is turned off again."""
    package = _with_our_libraries("llama_cpp")
    for file in (package._utils.outnull_file, package._utils.errnull_file):
        atexit.register(file.close)  # it leaves them open, and the interpreter complains at its end
    libllama_api.library().llama_log_set(ggml_api.libc_address("abs"), None)
    package.llama_cpp.llama_decode = _with_tiles(package.llama_cpp.llama_decode)
    return package


@cache
def mtmd_cpp() -> Any:  # noqa: ANN401
    """Its module of vision towers."""
    llama_cpp()
    return _with_our_libraries("llama_cpp.mtmd_cpp")


def _with_our_libraries(module: str) -> Any:  # noqa: ANN401
    """A module of the package, which finds its libraries when it is imported. Of two copies of llama.cpp, one
    would not hear what the other is told (to be silent)."""
    os.environ[FOLDER] = str(ggml_api.library().folder)
    try:
        return import_module(module)
    finally:
        del os.environ[FOLDER]


def _with_tiles(decode: Callable[..., int]) -> Callable[..., int]:
    """torch has taken ggml's tiles away from these threads, if an earlier test used it."""
    keeper = amx_check.keeper()

    def restored(*arguments: object) -> int:
        if keeper:
            keeper.restore(os.cpu_count() or 1)
        return decode(*arguments)

    return restored
