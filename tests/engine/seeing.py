"""Engines of tiny models that see, by a linear encoder, and what such a model says step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetrun.api.local_model import as_options
from hetrun.backend import registry
from hetrun.backend.picture_encoder import PromptRows, Vision
from hetrun.client.events import PICTURE_MARK, GenerateRequest
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import Settings
from hetrun.engine.engine import Engine
from hetrun.engine.factory import load, template_of
from hetrun.executor.planned_model import PlannedModel
from hetrun.executor.steps import Chunk, Step
from hetrun.loader.open_model import open_model
from hetrun.loader.vision import Tower
from hetrun.pictures.picture import Picture
from hetrun.system.file_identity import Stamp
from hetrun.text.chat.renderer import TemplateWorker
from hetrun.text.tokenizer import Tokenizer, open_vocabulary
from tests.engine.asking import Answer
from tests.support.picture_encoder import LinearEncoder, decode, file_of
from tests.support.towers import WIDTH

MARK = PICTURE_MARK


def vision_of(encoder: LinearEncoder) -> Vision:
    """As a header would describe it."""
    stamp = Stamp(0, 0, 0, 0)
    return Vision(
        "a test", stamp, "linear", encoder.nbytes, encoder.width, encoder.deepstack, encoder.spatial,
        encoder.whole, Tower(1, 1, 1, 1, 1, 0, 1, 1, gated=False),
    )  # fmt: skip


@contextmanager
def seeing(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    encoder: LinearEncoder,
    **options: Any,  # noqa: ANN401
) -> Iterator[Engine]:
    """An engine of a model that sees."""
    monkeypatch.setattr(registry, "picture_encoder", lambda: encoder.pictures)
    with opened(path, vision_of(encoder), **options) as engine:
        yield engine


@contextmanager
def opened(path: Path, vision: Vision, **options: Any) -> Iterator[Engine]:  # noqa: ANN401
    """An engine of a model with its tower."""
    given = {
        "planner": "static",
        "kv_type": "f32",
        "backends": "reference",
        "ctx": 512,
        "threads": 1,
        **options,
    }
    settings = Settings.resolve(environ={}, model=str(path), **given)
    source = open_model(path)
    with TemplateWorker(template_of(source, settings)) as templates:
        engine = Engine(
            lambda: load(
                source,
                templates,
                settings,
                as_options(settings),
                None,
                vision=vision,
                decode=decode,
            )
        )
        try:
            yield engine
        finally:
            engine.close()


def ask(engine: Engine, text: str, *pictures: Picture, **params: Any) -> Answer:  # noqa: ANN401
    """Begin a request whose text has a mark for each picture."""
    return ask_file(engine, text, *(file_of(picture) for picture in pictures), **params)


def ask_file(engine: Engine, text: str, *files: bytes, **params: Any) -> Answer:  # noqa: ANN401
    """The same with files as they were sent."""
    answer = Answer()
    params = {"max_tokens": 8, "temperature": 0.0, **params}
    answer.id = engine.submit(GenerateRequest(SamplingParams(**params), text=text, pictures=files), answer)
    return answer


def said(path: Path, encoder: LinearEncoder, text: str, *pictures: Picture, n: int = 8) -> list[int]:
    """What the model says greedily, computed in one step for each piece of the prompt and each token."""
    source = open_model(path)
    vocabulary = open_vocabulary(source)
    assert vocabulary is not None
    tokenizer = Tokenizer(vocabulary)
    settings = Settings.resolve(environ={}, planner="static", kv_type="f32", backends="reference", ctx=512)
    options = as_options(settings)
    object.__setattr__(options, "spatial", encoder.spatial)
    model = PlannedModel(source, options)
    try:
        return _said(model, tokenizer, encoder, text, pictures, n)
    finally:
        model.close()
        tokenizer.close()


def _said(
    model: PlannedModel,
    tokenizer: Tokenizer,
    encoder: LinearEncoder,
    text: str,
    pictures: Sequence[Picture],
    n: int,
) -> list[int]:
    seq, place, found = model.alloc(), 0, list[int]()
    logits = np.zeros((1, 1), np.float32)

    def take(
        ids: Sequence[int], places: np.ndarray, rows: np.ndarray | None = None, whole: bool = False
    ) -> None:
        nonlocal logits
        chunk = Chunk(
            seq, np.array(ids, np.int64), np.array([len(ids) - 1]), places=places, embedded=rows, whole=whole
        )
        logits = model.step(Step((chunk,))).copy()

    def words(ids: Sequence[int]) -> None:
        nonlocal place
        if ids:
            take(ids, place + np.repeat(np.arange(len(ids))[:, None], 3, 1))
            place += len(ids)

    first, *others = text.split(MARK)
    words(tokenizer.encode(first))
    for picture, other in zip(pictures, others, strict=True):
        for piece in encoder.lay_out(picture):
            if isinstance(piece, PromptRows):
                take([0] * piece.count, place + piece.places, encoder.encode(piece), piece.whole)
                place += piece.advance
            else:
                words(piece.tokens)
        words(tokenizer.encode_as(other, False, True))
    for _ in range(n):
        found.append(int(logits[-1].argmax()))
        words(found[-1:])
    return found


__all__ = ["MARK", "WIDTH", "ask", "said", "seeing"]
