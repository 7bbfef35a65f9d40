"""Tags between which calls stand, family by family."""

from __future__ import annotations

from dataclasses import dataclass

CLOSE = "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
SEED_CALL, SEED_CLOSE = "<seed:tool_call>", "</seed:tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


@dataclass(frozen=True)
class Tags:
    """The tags of a call with a name, and a tag for each argument."""

    begin: str  # the name follows, and
    close: str  # what ends the name and each key
    end: str
    key: str
    value_end: str


FUNCTION_TAGS = Tags(FUNCTION, ">", FUNCTION_END, PARAMETER, PARAMETER_END)


def invoking(prefix: str) -> Tags:
    """Tags with attributes, which families put different words before."""
    return Tags(
        f'<{prefix}invoke name="', '">', f"</{prefix}invoke>", f'<{prefix}parameter name="',
        f"</{prefix}parameter>",
    )  # fmt: skip


MINIMAX_TAGS = invoking("")
MINIMAX_CALLS, MINIMAX_CALLS_END = "<minimax:tool_call>", "</minimax:tool_call>"
