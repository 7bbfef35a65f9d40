"""The output items of a response: messages, reasoning and function calls, as they arrive."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from hetrun.server.json_stream import json_text
from hetrun.server.response_driver import Json


def new_id(kind: str) -> str:
    """A new id, which cannot be guessed."""
    return f"{kind}_{secrets.token_hex(24)}"


def with_list(fields: Json, name: str, items: Iterable[str]) -> str:
    """An object as JSON, whose last field is a list of JSON texts."""
    return f'{json_text(fields)[:-1]},"{name}":[{",".join(items)}]}}'


class NumberedEvents:
    """The numbered events of a stream; none if the response is not streamed."""

    def __init__(self, listened: bool) -> None:
        self._listened = listened
        self._number = -1
        self._told: list[str] = []

    def tell(self, kind: str, fields: Json, **as_json: str) -> None:
        """Add the next event; JSON texts are inserted unchanged."""
        if not self._listened:
            return
        self._number += 1
        text = json_text({"type": kind, "sequence_number": self._number} | fields)
        more = "".join(f',"{name}":{value}' for name, value in as_json.items())
        self._told.append(f"event: {kind}\ndata: {text[:-1]}{more}}}")

    def taken(self) -> list[str]:
        """The events since the last call."""
        told, self._told = self._told, []
        return told


class Item(ABC):
    """One of them."""

    prefix = ""

    def __init__(self, index: int) -> None:
        self.id = new_id(self.prefix)
        self.index = index
        self.status = "in_progress"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The whole text; of a call its arguments."""
        return "".join(self._texts)

    @abstractmethod
    def json(self) -> str:
        """The item in the response's format."""

    def begin(self, telling: NumberedEvents) -> None:
        """Announce the item."""
        telling.tell("response.output_item.added", {"output_index": self.index}, item=self.json())

    def add(self, telling: NumberedEvents, text: str, scores: Sequence[str] = ()) -> None:
        """Add text, with its log-probabilities as JSON."""
        self._texts.append(text)

    def end(self, telling: NumberedEvents, status: str) -> None:
        """Finish the item, complete or not."""
        self.status = status
        telling.tell("response.output_item.done", {"output_index": self.index}, item=self.json())


class Content(Item):
    """An item that has its text in a part."""

    part_type = ""

    def part(self) -> str:
        """The part as JSON."""
        return json_text({"type": self.part_type, "text": self.text})

    def begin(self, telling: NumberedEvents) -> None:
        super().begin(telling)
        telling.tell("response.content_part.added", self._place, part=self.part())

    def end(self, telling: NumberedEvents, status: str) -> None:
        telling.tell("response.content_part.done", self._place, part=self.part())
        super().end(telling, status)

    @property
    def _place(self) -> Json:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    def _parts(self) -> list[str]:
        """The part without text, when the item has just begun."""
        return [] if self.status == "in_progress" else [self.part()]


class Message(Content):
    """A message with text."""

    prefix = "msg"
    part_type = "output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._scores: list[str] = []

    def part(self) -> str:
        fields: Json = {"type": self.part_type, "annotations": [], "text": self.text}
        return with_list(fields, "logprobs", self._scores)

    def json(self) -> str:
        fields: Json = {"id": self.id, "type": "message", "role": "assistant", "status": self.status}
        return with_list(fields, "content", self._parts())

    def add(self, telling: NumberedEvents, text: str, scores: Sequence[str] = ()) -> None:
        super().add(telling, text)
        self._scores += scores
        told = f"[{','.join(scores)}]"
        telling.tell("response.output_text.delta", self._place | {"delta": text}, logprobs=told)

    def end(self, telling: NumberedEvents, status: str) -> None:
        told = f"[{','.join(self._scores)}]"
        telling.tell("response.output_text.done", self._place | {"text": self.text}, logprobs=told)
        super().end(telling, status)


class Reasoning(Content):
    """The model's reasoning before its answer."""

    prefix = "rs"
    part_type = "reasoning_text"

    def json(self) -> str:
        fields: Json = {"id": self.id, "type": "reasoning", "summary": [], "status": self.status}
        return with_list(fields, "content", self._parts())

    def add(self, telling: NumberedEvents, text: str, scores: Sequence[str] = ()) -> None:
        super().add(telling, text)
        telling.tell("response.reasoning_text.delta", self._place | {"delta": text})

    def end(self, telling: NumberedEvents, status: str) -> None:
        telling.tell("response.reasoning_text.done", self._place | {"text": self.text})
        super().end(telling, status)


class Call(Item):
    """A function call; its text is its arguments."""

    prefix = "fc"

    def __init__(self, index: int, name: str, call_id: str) -> None:
        super().__init__(index)
        self.name = name
        self.call_id = call_id

    def json(self) -> str:
        fields: Json = {"id": self.id, "type": "function_call", "status": self.status}
        return json_text(fields | {"call_id": self.call_id, "name": self.name, "arguments": self.text})

    def add(self, telling: NumberedEvents, text: str, scores: Sequence[str] = ()) -> None:
        super().add(telling, text)
        telling.tell("response.function_call_arguments.delta", self._place | {"delta": text})

    def end(self, telling: NumberedEvents, status: str) -> None:
        said: Json = {"name": self.name, "arguments": self.text}
        telling.tell("response.function_call_arguments.done", self._place | said)
        super().end(telling, status)

    @property
    def _place(self) -> Json:
        return {"item_id": self.id, "output_index": self.index}
