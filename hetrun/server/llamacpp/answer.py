"""The answer to a completion in llama.cpp's own shape, whole or in chunks."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

from starlette.requests import Request
from starlette.responses import Response

from hetrun.client.events import Event, PromptProgress, TokenLogprob
from hetrun.server.json_stream import LazyList, json_text
from hetrun.server.llamacpp.request import NativeRequest
from hetrun.server.logprobs import finite
from hetrun.server.request import Order
from hetrun.server.response_driver import (
    ChoiceStream,
    ChoicesWriter,
    Json,
    prompt_progress,
    respond as respond_with,
)
from hetrun.server.service import Service
from hetrun.server.sse import EventStream
from hetrun.server.usage import rates, timings_of


class PlainEvents(EventStream):
    """A stream without [DONE]: its last chunk has `stop: true`."""

    end = b""


async def respond(request: Request, service: Service, native: NativeRequest) -> Response:
    """The response to a request."""

    def in_one(order: Order) -> ChoicesWriter:
        return ChoicesWriter(order, partial(whole, native))

    return await respond_with(
        request, service, native.order, whole=in_one, stream=lambda _: NativeStream(native)
    )


def whole(native: NativeRequest, order: Order, found: Sequence[ChoiceStream]) -> object:
    """The whole answer: an object, or a list where there are several prompts or answers."""
    answers = [_whole(native, i, choice) for i, choice in enumerate(found)]
    return answers[0] if len(answers) == 1 else answers


def _whole(native: NativeRequest, index: int, choice: ChoiceStream) -> Json:
    tokens = choice.tokens if native.return_tokens else []
    answer = final(native, index, choice, choice.end, text=choice.text, tokens=tokens)
    if native.order.wanted.answer:
        answer["completion_probabilities"] = LazyList(probabilities(choice.scores, native.order))
    return selected(answer, native.fields)


def final(
    native: NativeRequest,
    index: int,
    choice: ChoiceStream,
    end: Event,
    *,
    text: str,
    tokens: Sequence[int] = (),
    has_line: bool = False,
) -> Json:
    """The answer, or the last chunk of a stream, which has no text but what was held back."""
    usage, order = end.usage, native.order
    return {
        "index": index,
        "content": text,
        "tokens": list(tokens),
        "id_slot": end.slot,
        "stop": True,
        "model": order.info.id,
        "tokens_predicted": usage.completion_tokens,
        "tokens_evaluated": usage.prompt_tokens,
        "generation_settings": native.settings,
        "prompt": b"".join(choice.leader.prompt_pieces).decode(errors="replace"),
        "has_new_line": has_line or "\n" in text,
        "truncated": _truncated(native, end),
        "stop_type": _stop_type(end),
        "stopping_word": end.stopped,
        "tokens_cached": usage.cached_tokens,
        "timings": timings_of(end),
    }


def _stop_type(end: Event) -> str:
    if end.finish_reason == "length":
        return "limit"
    return "word" if end.stopped else "eos"


def _truncated(native: NativeRequest, end: Event) -> bool:
    """Whether the context was too small: for the answer, or for everything that was said."""
    limit, usage = native.order.prompts[0].most_tokens, end.usage
    full = usage.prompt_tokens + usage.completion_tokens >= native.order.info.context
    cut = full and end.finish_reason == "length" and (limit is None or usage.completion_tokens < limit)
    return cut or end.dropped > 0


def selected(answer: Json, fields: Iterable[str]) -> Json:
    """Only these fields; `a/b` is the field b of a. Those that don't exist are left out."""
    names = tuple(fields)
    if not names:
        return answer
    found: Json = {}
    for name in names:
        value: object = answer
        for part in name.split("/"):
            if not isinstance(value, Mapping) or part not in value:
                break
            value = value[part]
        else:
            found[name] = value
    return found


def probabilities(scores: Iterable[TokenLogprob], order: Order) -> Iterable[Json]:
    """Tokens with their probabilities and the best alternatives: those with which they were drawn, as
    probabilities, if the order asks for them, otherwise the model's own, as logarithms."""
    sampled = order.prompts[0].sampled_logprobs
    tops = "top_probs" if sampled else "top_logprobs"
    for score in scores:
        pieces = score.top_pieces or (b"",) * len(score.top)
        top = [
            _probability(token, logprob, piece, sampled)
            for (token, logprob), piece in zip(score.top, pieces, strict=True)
        ]
        yield {**_probability(score.token, score.logprob, score.piece or b"", sampled), tops: top}


def _probability(token: int, logprob: float, piece: bytes, sampled: bool) -> Json:
    """One token; of a part of a character only the bytes are shown."""
    said: Json = {"id": token, "token": piece.decode(errors="ignore"), "bytes": list(piece)}
    if sampled:
        return said | {"prob": min(math.exp(logprob), 1.0)}
    return said | {"logprob": min(finite(logprob), 0.0)}


@dataclass
class _Stream:
    """One answer of a stream so far."""

    choice: ChoiceStream = field(default_factory=ChoiceStream)  # whose prompt is recorded, and nothing else
    slot: int = -1
    predicted: int = 0
    has_line: bool = False
    progress: PromptProgress | None = None
    first_at: float = 0.0

    def timings(self) -> Json:
        """Times until now, as far as this process sees them."""
        total, cached, prompt_s = 0, 0, 0.0
        if self.progress:
            total, cached, prompt_s = self.progress.total, self.progress.cached, self.progress.seconds
        predicted_ms = 1000 * (perf_counter() - self.first_at) if self.first_at else 0.0
        return {
            "cache_n": cached,
            **rates("prompt", total - cached, 1000 * prompt_s),
            **rates("predicted", self.predicted, predicted_ms),
        }


class NativeStream:
    """The answer in chunks: one for each token, and the last one with everything else."""

    def __init__(self, native: NativeRequest) -> None:
        self._native = native
        self._streams = [_Stream() for _ in range(native.order.choices)]

    def write(self, index: int, event: Event) -> Iterator[str]:
        native, stream = self._native, self._streams[index]
        leader = self._streams[index - index % native.order.tried].choice
        match event.kind:
            case "prompt":
                leader.add_prompt(event)
                stream.slot = max(stream.slot, event.slot)
                stream.progress = event.progress or stream.progress
                if event.progress and native.progress:
                    yield json_text(_chunk(native, index, stream, event))
            case "token":
                stream.predicted += 1
                stream.has_line = stream.has_line or "\n" in event.text
                stream.first_at = stream.first_at or perf_counter()
                yield json_text(_chunk(native, index, stream, event))
            case "done":
                last = final(native, index, leader, event, text=event.text, has_line=stream.has_line)
                yield json_text(selected(last, native.fields))

    def end(self) -> Iterator[str]:
        return iter(())

    def response(self, texts: AsyncGenerator[str, None]) -> PlainEvents:
        return PlainEvents(texts)


def _chunk(native: NativeRequest, index: int, stream: _Stream, event: Event) -> Json:
    chunk: Json = {
        "index": index,
        "content": event.text,
        "tokens": [] if event.token is None else [event.token],
        "stop": False,
        "id_slot": stream.slot,
        "tokens_predicted": stream.predicted,
        "tokens_evaluated": len(stream.choice.prompt_pieces),
    }
    if event.progress:
        chunk["prompt_progress"] = prompt_progress(event.progress)
    elif native.timings_per_token:
        chunk["timings"] = stream.timings()
    if event.logprob is not None and native.order.wanted.answer:
        chunk["completion_probabilities"] = list(probabilities([event.logprob], native.order))
    return chunk
