"""Libraries of C functions: loaded, and their functions declared from a table."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import Any

# By a function's name: the type of its result, then those of its arguments.
Prototypes = Mapping[str, tuple[Any, ...]]

NONE: Prototypes = {}


class MissingFunction(OSError):
    """A library does not have a function that it is used for."""


def load_library(
    name: str | Path | None, prototypes: Prototypes = NONE, *, keep_errno: bool = False
) -> ctypes.CDLL:
    """A library by its path, or by the name that the system finds it by; None: the C library itself.

    Raises OSError where it does not load, or has not all of the functions. With `keep_errno`, a call's error
    is what ctypes.get_errno says.
    """
    path = str(name) if isinstance(name, Path) else name
    library = ctypes.CDLL(path, use_errno=True) if keep_errno else ctypes.CDLL(path)
    declare(library, prototypes)
    return library


def load_locked(path: str | Path, prototypes: Prototypes = NONE) -> ctypes.CDLL:
    """The same with functions that hold the interpreter's lock, for those that take less than giving it
    away does."""
    library = ctypes.PyDLL(str(path))
    declare(library, prototypes)
    return library


def load_built(
    path: Path, version: tuple[str, int], prototypes: Prototypes = NONE, *, locked: bool = False
) -> ctypes.CDLL | None:
    """A library that is built when hetrun is installed, where there is a C compiler.

    `version`: its function that says which source it was built from, and what that must say. None where the
    library was not built, or from another source than the Python code that calls it.
    """
    function, wanted = version
    try:
        library = load_locked(path) if locked else load_library(path, keep_errno=True)
        found = declare(library, {function: (c_int64,)})[function]()
        if found != wanted:
            return None
        declare(library, prototypes)
    except OSError:
        return None
    return library


def declare(library: ctypes.CDLL, prototypes: Prototypes) -> dict[str, Callable[..., Any]]:
    """Tell ctypes the types of these functions; returns the functions by name."""
    return {name: _declared(library, name, *types) for name, types in prototypes.items()}


def _declared(library: ctypes.CDLL, name: str, result: object, *arguments: object) -> Callable[..., Any]:
    try:
        function = getattr(library, name)
    except AttributeError:
        raise MissingFunction(f"{getattr(library, '_name', None) or 'the C library'} has no {name}") from None
    function.restype, function.argtypes = result, arguments
    declared: Callable[..., Any] = function
    return declared


def address_of(function: Any) -> int:  # noqa: ANN401 - ctypes has no type for its functions
    """Where a C function lies, for C code that calls it; 0 for None."""
    return ctypes.cast(function, c_void_p).value or 0
