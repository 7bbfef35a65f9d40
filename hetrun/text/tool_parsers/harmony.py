"""The marks of gpt-oss' harmony, and its messages as parts of a grammar.

An answer is messages, each with a header: who speaks, `<|channel|>` and a channel, perhaps to whom, and
`<|message|>`. The prompt has written `<|start|>assistant`, so an answer begins in the middle of a header.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Part = Any  # as in `forced_calls`

NAME = "harmony"
START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"  # of a message, an answer and a call
ENDS = (END, RETURN, CALL)

ASSISTANT = "assistant"
THINKING, SAYING, ANSWERING = "analysis", "commentary", "final"  # the channels
FUNCTIONS = "functions."  # before the names of tools that a request has
THOUGHT = f"{CHANNEL}{THINKING}{MESSAGE}"  # with which a thought begins


def is_harmony(template: str) -> bool:
    """Whether a chat template writes messages like these."""
    return CHANNEL in template and MESSAGE in template


def next_message() -> list[Part]:
    """What stands before the header of another message."""
    return [{"mark": START}, ASSISTANT]


def thought() -> list[Part]:
    """A message that is thought, and the beginning of another."""
    return [*_header(THINKING), {"until": END}, *next_message()]


def final(form: Part) -> list[Part]:
    """The last message, of this form."""
    return [*_header(ANSWERING), form]


def any_answer(calls: Sequence[Part]) -> list[Part]:
    """Thoughts and texts in any number, and then one of these calls, or a last message."""
    channel = {"any": [THINKING, SAYING]}
    before = [{"mark": CHANNEL}, channel, {"mark": MESSAGE}, {"until": END}, *next_message()]
    return [{"any_times": before}, {"any": [*calls, final({"free": True})]}]


def _header(channel: str) -> list[Part]:
    return [{"mark": CHANNEL}, channel, {"mark": MESSAGE}]
