"""The answer to a chat or a generation: one object, or a line of JSON for each piece."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter, time

from hetrun.client.events import Event
from hetrun.server import logprobs
from hetrun.server.errors import ApiError
from hetrun.server.json_stream import json_text
from hetrun.server.ollama.catalog import time_text
from hetrun.server.ollama.options import Json
from hetrun.server.request import Order
from hetrun.server.response_driver import finish_reason, pieces_of
from hetrun.server.sse import JsonLines
from hetrun.server.usage import timings_of
from hetrun.text.answers.reading import ChoiceReader
from hetrun.text.tool_parsers.parts import Arguments, CallStart, Piece, Prose, Thought

MS = 1_000_000  # nanoseconds


@dataclass
class PartialAnswer:
    """Some of an answer."""

    text: str = ""
    thought: str = ""
    calls: list[Json] = field(default_factory=list)
    scores: list[Json] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.thought or self.calls or self.scores)

    def add(self, other: PartialAnswer) -> None:
        """Add what follows."""
        self.text += other.text
        self.thought += other.thought
        self.calls += other.calls
        self.scores += other.scores


def chat_fields(some: PartialAnswer) -> Json:
    """The fields of a chat's answer."""
    message: Json = {"role": "assistant", "content": some.text}
    if some.thought:
        message["thinking"] = some.thought
    if some.calls:
        message["tool_calls"] = some.calls
    return {"message": message} | _scores(some)


def generated_fields(some: PartialAnswer) -> Json:
    """The fields of a generation's answer."""
    said: Json = {"response": some.text}
    if some.thought:
        said["thinking"] = some.thought
    return said | _scores(some)


def _scores(some: PartialAnswer) -> Json:
    return {"logprobs": some.scores} if some.scores else {}


@dataclass(frozen=True)
class AnswerHeader:
    """What all lines of an answer share."""

    model: str  # as the client calls it
    fields: Callable[[PartialAnswer], Json]
    began: float  # on the clock of `perf_counter`
    asleep: bool  # whether the model had to be loaded first

    def line(self, some: PartialAnswer, *, done: bool = False, **more: object) -> Json:
        """The answer, or a part of it."""
        head: Json = {"model": self.model, "created_at": time_text(time())}
        return head | self.fields(some) | {"done": done} | more

    def alone(self, reason: str) -> Json:
        """The answer to a request that only loads or unloads the model."""
        return self.line(PartialAnswer(), done=True, done_reason=reason)


class OllamaOutput:
    """Reads an answer's events."""

    def __init__(self, order: Order, heading: AnswerHeader) -> None:
        self._reader = order.reading.reader() if order.reading else None
        self._heading = heading
        self._scored = order.wanted.answer is not None
        self._call: tuple[int, str, list[str]] | None = None  # number, name and arguments so far
        self._first = 0.0  # when the first event came

    def observe(self, event: Event) -> PartialAnswer:
        """What became certain with an event."""
        self._first = self._first or perf_counter()
        some = PartialAnswer()
        for piece in self._pieces(event):
            self._take(piece, some)
        if event.kind == "done":
            self._end_call(some)
        elif self._scored and event.logprob is not None:
            some.scores.append(logprobs.entry(event.logprob))
        return some

    def metrics(self, event: Event) -> Json:
        """The fields of the last line: why the answer ended, counts, and times in nanoseconds."""
        times = timings_of(event)
        now, began = perf_counter(), self._heading.began
        load = self._first - began - event.timings.ttft_s if self._heading.asleep else 0.0
        return {
            "done_reason": finish_reason(event),
            "total_duration": int((now - began) * 1e9),
            "load_duration": max(int(load * 1e9), 0),
            "prompt_eval_count": event.usage.prompt_tokens,
            "prompt_eval_duration": int(float(str(times["prompt_ms"])) * MS),
            "eval_count": event.usage.completion_tokens,
            "eval_duration": int(float(str(times["predicted_ms"])) * MS),
        }

    def _pieces(self, event: Event) -> list[Piece]:
        if self._reader:
            return pieces_of(self._reader, event)
        return [Prose(event.text)] if event.text else []

    def _take(self, piece: Piece, some: PartialAnswer) -> None:
        match piece:
            case Arguments(_, text):
                if self._call:
                    self._call[2].append(text)
                return
            case CallStart(index, name):
                self._end_call(some)
                self._call = index, name, []
            case Prose(text):
                self._end_call(some)
                some.text += text
            case Thought(text):
                self._end_call(some)
                some.thought += text

    def _end_call(self, some: PartialAnswer) -> None:
        """A call is sent when it is complete. One without an object of arguments, such as the last of an
        answer that was cut off, is sent as text, so that it is not lost."""
        if self._call is None or self._reader is None:
            return
        index, name, texts = self._call
        self._call, text = None, "".join(texts)
        try:
            arguments = json.loads(text or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            some.calls.append(_call(self._reader, index, name, arguments))
        else:
            some.text += f'{{"name": {json.dumps(name)}, "arguments": {text}'


def _call(reader: ChoiceReader, index: int, name: str, arguments: Json) -> Json:
    return {"id": reader.new_id(), "function": {"index": index, "name": name, "arguments": arguments}}


class OllamaWriter:
    """The answer as one object, or in lines, of which the last one has counts and times, and no text."""

    def __init__(self, order: Order, heading: AnswerHeader) -> None:
        self._output = OllamaOutput(order, heading)
        self._heading = heading
        self._all = PartialAnswer()
        self._metrics: Json = {}

    def add(self, index: int, event: Event) -> None:
        self._all.add(self._output.observe(event))
        if event.kind == "done":
            self._metrics = self._output.metrics(event)

    def answer(self) -> Json:
        return self._heading.line(self._all, done=True, **self._metrics)

    def write(self, index: int, event: Event) -> Iterator[str]:
        if some := self._output.observe(event):
            yield json_text(self._heading.line(some))
        if event.kind == "done":
            yield json_text(self._heading.line(PartialAnswer(), done=True, **self._output.metrics(event)))

    def end(self) -> Iterator[str]:
        return iter(())

    def response(self, texts: AsyncGenerator[str, None]) -> OllamaLines:
        return OllamaLines(texts)


class OllamaLines(JsonLines):
    """A streamed answer; an error in the middle is a line of its own."""

    def failed(self, error: ApiError) -> bytes:
        """The line for an error."""
        return self.framed(json_text({"error": str(error)}))
