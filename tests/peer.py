"""llama.cpp through its own Python package: the peer that answers are compared with."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hetrun.backends.llamacpp import llama, native


def llama_cpp() -> Any:  # noqa: ANN401 - the package has no types
    """The package. Its import turns llama.cpp's log on, for this whole process: it is turned off again."""
    package = import_module("llama_cpp")
    llama.library().llama_log_set(native.libc_address("abs"), None)
    return package
