"""The command in this process, and a tiny model for it."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from hetrun import cli
from tests.models.tiny import TinyLlama, write_gguf

TINY = TinyLlama("tiny", layers=1, embd=64, ffn=64, heads=2, kv_heads=2, context=20_000)

Run = Callable[..., "Result"]


class Result:
    """What a command left behind."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def sentence(self) -> str:
        """The only line of stderr."""
        (line,) = self.err.splitlines()
        return line


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(TINY, tmp_path_factory.mktemp("cli") / "tiny.gguf"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command in this process."""

    def run(*arguments: str, stdin: bytes | None = None) -> Result:
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = cli.exit_code(list(arguments))
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def answer(run: Run, tiny: str) -> Run:
    """`hetrun run` with a tiny model on the reference backend, greedy."""

    def answer(*arguments: str, stdin: bytes | None = None) -> Result:
        options = ("-m", tiny, "--backend", "reference", "--temp", "0")
        return run("run", *arguments, *options, stdin=stdin)

    return answer
