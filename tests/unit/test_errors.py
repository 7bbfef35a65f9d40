"""Errors are sentences, wherever their words come from."""

from __future__ import annotations

import pickle

import pytest

from hetrun.errors import ModelFileError


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("is damaged", "is damaged"),
        ("says 'é 你 😀'", "says 'é 你 😀'"),
        ("says\na\r\tb", r"says\na\r\tb"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\ud800 \u202e", r"\ud800 \u202e"),
    ],
)
def test_what_a_stranger_wrote_can_be_printed(reason: str, said: str) -> None:
    error = ModelFileError("a\nb.gguf", reason)
    assert str(error) == rf"a\nb.gguf: {said}"
    assert (error.path, error.reason) == ("a\nb.gguf", said)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.path) == (ModelFileError, str(error), error.path)
