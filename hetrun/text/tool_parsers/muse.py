"""Muse Glimmer's messages: a header says for whom each is, and calls stand between tags of their own.

To itself it thinks, to the user it answers, and to a tool it writes a call.
"""

from __future__ import annotations

from hetrun.text.tool_parsers.dialect import MESSAGE, PEOPLE, Dialect, Header, Kind, Part
from hetrun.text.tool_parsers.tags import (
    invoking,
)

NAME = "muse"
NEXT, END = "<|eom|>", "<|eot|>"  # of a message, and of an answer
ITSELF, USER = "self", "user"
CALLS, CALLS_END = "<atem:function_calls>", "</atem:function_calls>"
TAGS = invoking("atem:")


def is_muse(template: str) -> bool:
    """Whether a chat template writes messages like these."""
    return CALLS in template and NEXT in template


def _kind(header: Header) -> Kind:
    if header.recipient == ITSELF:
        return "thought"
    return "text" if header.recipient in PEOPLE else "call"


def _header(recipient: str) -> tuple[Part, ...]:
    return (f" to={recipient}", {"mark": MESSAGE})


THOUGHT = f" to={ITSELF}{MESSAGE}"
MUSE = Dialect(
    NAME,
    THOUGHT,
    begins=(THOUGHT.lstrip(), f"to={USER}{MESSAGE}"),
    within=(),
    ends=(NEXT, END),
    kind=_kind,
    is_last=lambda header: _kind(header) == "text",
    thinking=_header(ITSELF),
    answering=_header(USER),
    tagged=True,
)
