"""llama.cpp through its own Python package: the peer that answers are compared with."""

from __future__ import annotations

import atexit
from importlib import import_module
from typing import Any

from hetrun.backends.llamacpp import llama, native


def llama_cpp() -> Any:  # noqa: ANN401 - the package has no types
    """The package. Its import turns llama.cpp's log on, for this whole process: it is turned off again."""
    package = import_module("llama_cpp")
    for file in (package._utils.outnull_file, package._utils.errnull_file):
        atexit.register(file.close)  # it leaves them open, and the interpreter complains at its end
    llama.library().llama_log_set(native.libc_address("abs"), None)
    return package
