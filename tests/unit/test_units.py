"""Numbers in words."""

from __future__ import annotations

import pytest

from hetrun.system.units import counted, format_bytes, format_minimum


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1 << 10, "1 KiB"),
        (12_345, "12 KiB"),
        (1 << 20, "1 MiB"),
        (3 << 19, "1.5 MiB"),
        (98_400_000, "94 MiB"),
        (2 << 30, "2.0 GiB"),
        (4_093_870_720, "3.8 GiB"),
        (3000 << 30, "3,000.0 GiB"),
        (-(3 << 19), "-1.5 MiB"),
    ],
)
def test_bytes_in_words(nbytes: int, words: str) -> None:
    assert format_bytes(nbytes) == words


def test_what_is_needed_is_rounded_up() -> None:
    assert [format_minimum(n) for n in (1, 1 << 20, (1 << 20) + 1)] == ["1 MiB", "1 MiB", "2 MiB"]


def test_one_thing_and_several() -> None:
    assert (counted(1, "token"), counted(0.5, "token", ".1f"), counted(1024, "token", ",")) == (
        *("1 token", "0.5 tokens", "1,024 tokens"),
    )
