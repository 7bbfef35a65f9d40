"""Gemma 4's marks, and its thoughts as parts of a grammar.

An answer is text in which thoughts and calls stand between marks: `<|channel>thought`, what is thought,
`<channel|>`; `<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>`. Values are like JSON's, but keys have no
quotes and texts stand between two marks, with nothing escaped.
"""

from __future__ import annotations

from typing import Any

Part = Any  # as in `forced_calls`

NAME = "gemma4"
CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"  # of the channels, this is the only one:
THINKING = "thought"
CALL, CALL_END = "<|tool_call>", "<tool_call|>"
CALLED = "call:"  # before the name of a tool
QUOTE = '<|"|>'  # before and after a text

THOUGHT = CHANNEL + THINKING  # with which a thought begins


def thought() -> list[Part]:
    """A thought up to its end."""
    return [{"mark": CHANNEL}, THINKING, {"until": CHANNEL_END}, {"space": True}]
