"""gpt-oss' harmony: messages in channels, of which one is thoughts and one is for calls of tools."""

from __future__ import annotations

from collections.abc import Sequence

from hetrun.text.tool_parsers.dialect import MESSAGE, PEOPLE, Dialect, Header, Kind, Part

NAME = "harmony"
CHANNEL, CONSTRAIN = "<|channel|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"  # of a message, an answer and a call

THINKING, SAYING, ANSWERING = "analysis", "commentary", "final"  # the channels
FUNCTIONS = "functions."  # before the names of tools that a request has
THOUGHT = f"{CHANNEL}{THINKING}{MESSAGE}"


def is_harmony(template: str) -> bool:
    """Whether a chat template writes messages like these."""
    return CHANNEL in template and MESSAGE in template


def any_answer(calls: Sequence[Part]) -> list[Part]:
    """Thoughts and texts in any number, and then one of these calls, or a last message."""
    channel = {"any": [THINKING, SAYING]}
    before = [{"mark": CHANNEL}, channel, {"mark": MESSAGE}, {"until": END}, *HARMONY.next_message]
    return [{"any_times": before}, {"any": [*calls, HARMONY.final({"free": True})]}]


def _kind(header: Header) -> Kind:
    """`analysis` is thought, what is addressed to a tool is a call, everything else is text for people."""
    if header.recipient not in PEOPLE:
        return "call"
    return "thought" if header.channel == THINKING else "text"


def _header(channel: str) -> tuple[Part, ...]:
    return ({"mark": CHANNEL}, channel, {"mark": MESSAGE})


HARMONY = Dialect(
    NAME,
    THOUGHT,
    begins=(CHANNEL,),
    within=(CHANNEL, CONSTRAIN),
    ends=(END, RETURN, CALL),
    kind=_kind,
    is_last=lambda header: _kind(header) == "text" and header.channel == ANSWERING,
    thinking=_header(THINKING),
    answering=_header(ANSWERING),
)
