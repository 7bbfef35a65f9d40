"""Columns of text."""

from __future__ import annotations

from hetrun.system.terminal_text import align_columns


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    rows = [("name", "bytes", "of"), ("a", "1", ""), ("longer", "1,000", "disk")]
    assert align_columns(rows) == ["name    bytes  of", "a       1", "longer  1,000  disk"]
    assert align_columns(rows, left={0, 2}) == ["name    bytes  of", "a           1", "longer  1,000  disk"]
    assert align_columns([]) == []


def test_columns_have_a_least_width_and_a_row_may_end_with_a_wider_cell() -> None:
    rows = [("a", "1", "x"), ("", "a remark to it")]
    assert align_columns(rows, left={0, 1}, least=(4, 2)) == ["a     1   x", "      a remark to it"]
