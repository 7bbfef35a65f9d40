"""How kernels are compiled: kept on disk where that can be, for this process only where it cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


# Products may be fused. Sums are reordered where a kernel says so. Infinities and NaN stay what they are.
FAST = {"contract", "nsz", "arcp"}

_not_kept: list[str] = []


def are_kept() -> bool:
    """Whether the next process finds all kernels compiled."""
    return not _not_kept


def compiled(signature: str, *, parallel: bool = False, reorder: bool = False) -> Callable[[F], F]:
    """Compile for these types now, or load what an earlier process has kept.

    numba keeps code in NUMBA_CACHE_DIR, or beside this package, or in the user's cache. Where none of the
    three can be written, each process compiles anew.
    """
    fast = FAST | {"reassoc"} if reorder else FAST

    def decorate(function: F) -> F:
        options: dict[str, Any] = {
            "nogil": True,
            "parallel": parallel,
            "fastmath": fast,
            "boundscheck": False,
        }
        try:
            made = numba.njit(signature, cache=True, **options)(function)
        except (RuntimeError, OSError) as e:
            if isinstance(e, RuntimeError) and "cannot cache" not in str(e):
                raise
            log.debug("compiled for this process only: %s", e)
            _not_kept.append(function.__name__)
            made = numba.njit(signature, **options)(function)
        return cast(F, made)

    return decorate


def inlined(function: F) -> F:
    """A part of kernels, compiled with its callers."""
    return cast(F, numba.njit(fastmath=FAST, boundscheck=False)(function))
