"""Prompts with pictures: the engine says what a model says that is given rows and places by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.seeing import MARK, WIDTH, ask, said, seeing
from tests.support.once import once
from tests.support.picture_encoder import LinearEncoder, drawn
from tests.support.towers import write_text

TEXTS = (
    f"Look: {MARK} what is it?",
    f"{MARK}What is on this picture, and why?",
    f"The first one {MARK} and the second one {MARK} differ in",
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The text model of a family."""

    def text_of(family: str) -> Path:
        def make(folder: Path) -> None:
            write_text(family, folder / "text.gguf")

        return once(tmp_path_factory, f"sees-{family}", make) / "text.gguf"

    return text_of


@pytest.mark.parametrize("family", ["qwen35", "mistral3", "qwen3vl-flat"])
@pytest.mark.parametrize("text", TEXTS)
def test_greedy(
    monkeypatch: pytest.MonkeyPatch, texts: Callable[[str], Path], family: str, text: str
) -> None:
    path, spatial = texts(family), family != "mistral3"
    pictures = [drawn(48, 32, seed) for seed in range(text.count(MARK))]
    expected = said(path, LinearEncoder(WIDTH, spatial), text, *pictures)
    encoder = LinearEncoder(WIDTH, spatial)
    with seeing(monkeypatch, path, encoder) as engine:
        answer = ask(engine, text, *pictures, ignore_eos=True).wait()
        assert answer.tokens == expected
        assert encoder.threads == {engine.thread_id}
        assert len(encoder.encoded) == len(pictures)
