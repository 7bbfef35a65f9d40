"""Libraries of C functions: found or not, declared or refused."""

import ctypes
from ctypes import c_int, c_int64
from pathlib import Path

import pytest

from hetrun.system import native_library
from hetrun.system.native_library import MissingFunction, address_of, declare, load_built, load_library

SEATS = Path(native_library.__file__).parent / "affinity_calls.so"


def test_functions_are_declared_from_their_table() -> None:
    libc = load_library(None, {"llabs": (c_int64, c_int64)})
    assert libc.llabs(-(1 << 40)) == 1 << 40
    assert address_of(libc.llabs)
    assert address_of(None) == 0


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFunction, match="no_such_function"):
        declare(ctypes.CDLL(None), {"no_such_function": (c_int,)})
    with pytest.raises(OSError, match=r"nothing\.so"):
        load_library(tmp_path / "nothing.so")


@pytest.mark.skipif(not SEATS.exists(), reason="hetrun was installed without a C compiler")
def test_only_a_library_of_the_same_source_is_used(tmp_path: Path) -> None:
    assert load_built(SEATS, ("hetrun_seats_version", 1))
    assert load_built(SEATS, ("hetrun_seats_version", 2)) is None
    assert load_built(SEATS, ("no_such_function", 1)) is None
    assert load_built(SEATS, ("hetrun_seats_version", 1), {"no_such_function": (c_int,)}) is None
    assert load_built(tmp_path / "nothing.so", ("hetrun_seats_version", 1)) is None
