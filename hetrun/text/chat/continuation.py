"""A conversation whose last message is unfinished: the model continues it, instead of beginning an answer.

The prompt is cut where the message ends, in the way of transformers: a mark is put after the message's text,
and what the template writes from the mark on is left out. A template that trims messages has no space at the
end of the prompt then, either.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetrun.errors import FieldError, OptionError
from hetrun.text.chat.messages import THOUGHTS
from hetrun.text.chat.reasoning import opened_in, unclosed_in

Json = dict[str, Any]

OPTION = "continue_final_message"
CONTENT, REASONING = "content", THOUGHTS[0]  # what of the message is continued, as in llama.cpp


def part_of(message: Mapping[str, object], wanted: object) -> str:
    """What of a message is continued: what was asked for by name, else its content, or its reasoning if it
    has no content."""
    if wanted not in (True, CONTENT, REASONING):
        raise FieldError(f"{OPTION} must be true, false, {CONTENT} or {REASONING}, not {wanted!r}", OPTION)
    if message.get("role") != "assistant":
        raise FieldError(f"{OPTION} needs a last message of the assistant", OPTION)
    if message.get("tool_calls"):
        raise FieldError(f"{OPTION}: a message with tool_calls cannot be continued", OPTION)
    has_thoughts = _thoughts(message) is not None
    if wanted == REASONING and not has_thoughts:
        raise FieldError(f"{OPTION}: the last message has no {REASONING}", OPTION)
    if wanted is True:
        return REASONING if has_thoughts and not message.get(CONTENT) else CONTENT
    return str(wanted)


def _thoughts(message: Mapping[str, object]) -> str | None:
    return next((str(message[name]) for name in THOUGHTS if message.get(name) is not None), None)


@dataclass(frozen=True)
class ContinuedChat:
    """A conversation with a mark where its last message ends."""

    messages: list[Json]
    mark: str

    @classmethod
    def after_last(cls, messages: list[Json], wanted: object) -> ContinuedChat:
        """Put the mark after the text that is continued."""
        last, mark = dict(messages[-1]), f"{secrets.token_hex(12)} "
        if part_of(last, wanted) == CONTENT:
            last[CONTENT] = f"{last.get(CONTENT) or ''}{mark}"
        else:
            # Under every name that a template may read, and nothing after it.
            last |= {name: f"{last[name]}{mark}" for name in THOUGHTS if name in last}
            last[CONTENT] = ""
        return cls([*messages[:-1], last], mark)

    def of(self, text: str) -> str:
        """The text up to the mark. Without space there, if the template has trimmed the message."""
        at = text.rfind(self.mark.strip())
        if at < 0:
            message = f"{OPTION}: the chat template leaves the last message out, so it cannot be continued"
            raise OptionError(message)
        return text[:at] if text.startswith(self.mark, at) else text[:at].rstrip()


def written(prompt: str, message: Mapping[str, object], wanted: object) -> str:
    """The text of the message that the answer continues, as it stands at the end of the prompt."""
    part = part_of(message, wanted)
    said = str(message.get(CONTENT) or "") if part == CONTENT else _thoughts(message) or ""
    return next((text for text in (said, said.rstrip(), said.strip()) if prompt.endswith(text)), "")


def thought_within(prompt: str, message: Mapping[str, object], wanted: object) -> str:
    """The mark of the thought in which the message ends; nothing if it ends in its text."""
    said = written(prompt, message, wanted)
    if part_of(message, wanted) == CONTENT:
        return unclosed_in(said) or ("" if said else opened_in(prompt))
    return opened_in(prompt[: len(prompt) - len(said)])
