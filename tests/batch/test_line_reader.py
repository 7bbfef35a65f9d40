"""Lines as they come: none lost, none joined, none larger than memory should hold."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hetrun.tools.batch import line_reader as module
from hetrun.tools.batch.line_reader import Line, LineReader

LINES = st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b" ")), max_size=30)


def all_of(data: bytes, most: int = 7) -> list[Line]:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        lines = LineReader(file.fileno(), "x")
        assert lines.size == len(data)
        found: list[Line] = []
        while some := lines.some(most):
            assert len(some) <= most
            found += some
        assert lines.at == len(data)
        return found


@given(LINES, st.booleans(), st.integers(1, 30), st.integers(1, 50))
def test_what_is_between_line_ends(texts: list[bytes], ended: bool, most: int, chunk: int) -> None:
    data = b"\n".join(texts) + b"\n" * ended
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        found = all_of(data, most)
    expected = data.split(b"\n")
    if not expected[-1]:
        del expected[-1]
    assert [line.data for line in found] == [line.removesuffix(b"\r") for line in expected]
    assert [line.number for line in found] == list(range(1, len(expected) + 1))
    assert all(line.whole for line in found)


@given(st.lists(st.integers(0, 60), max_size=12), st.integers(1, 50))
def test_of_lines_that_are_too_long_only_the_number_is_kept(sizes: list[int], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_LINE", 20)
        patch.setattr(module, "CHUNK", chunk)
        found = all_of(b"".join(b"x" * n + b"\n" for n in sizes))
    assert [(line.whole, len(line.data)) for line in found] == [(n <= 20, n if n <= 20 else 0) for n in sizes]


def test_a_pipe_is_not_waited_for_while_there_is_something() -> None:
    out, into = os.pipe()
    try:
        os.write(into, b"one\ntwo\nhal")
        lines = LineReader(out, "a pipe")
        assert lines.size is None
        assert [line.data for line in lines.some(100)] == [b"one", b"two"]

        def end() -> None:
            os.write(into, b"f\n")
            os.close(into)

        late = threading.Timer(0.05, end)
        late.start()
        assert [line.data for line in lines.some(100)] == [b"half"]
        assert lines.some(100) == []
        late.join()
    finally:
        os.close(out)


def test_lines_that_were_looked_at_stay_to_be_read(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"a\nb\nc")
    with (tmp_path / "in.txt").open("rb") as file:
        lines = LineReader(file.fileno(), "in.txt")
        assert [line.data for line in lines.ahead(2)] == [b"a", b"b"]
        assert not lines.at_end
        assert [line.data for line in lines.some(1)] == [b"a"]
        assert [line.data for line in lines.some(9)] == [b"b"]
        assert [line.data for line in lines.some(9)] == [b"c"]
        assert lines.some(9) == []
        assert lines.at_end
