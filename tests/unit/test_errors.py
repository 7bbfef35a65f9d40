"""Errors are sentences, wherever their words come from."""

from __future__ import annotations

import errno
import pickle

import pytest

from hetrun.errors import ModelFileError, SystemFault, UserError, system_faults


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


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "it was not done: the system has no memory left; free some, or use less (--ram)"),
        (
            SystemError("error return without exception set"),  # numpy's, where a sum gets no memory
            "it was not done: the system has no memory left; free some, or use less (--ram)",
        ),
        (
            RuntimeError("can't start new thread"),
            "it was not done: the system starts no more threads; check its limits (ulimit -u)",
        ),
        (OSError(errno.EMFILE, "Too many open files", "a\nb"), r"it was not done: a\nb: Too many open files"),
        (OSError(errno.EIO, "Input/output error"), "it was not done: Input/output error"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(error: Exception, said: str) -> None:
    with pytest.raises(SystemFault) as caught, system_faults("it was not done"):
        raise error
    assert str(caught.value) == said
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (SystemFault, said)


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), RuntimeError("a bug"), UserError("no"), SystemError("a bug")]
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, system_faults("it was not done"):
        raise error
    assert caught.value is error
