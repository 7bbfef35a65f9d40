"""The families that write an answer as messages."""

from __future__ import annotations

from hetrun.text.tool_parsers.dialect import Dialect
from hetrun.text.tool_parsers.harmony import HARMONY, is_harmony
from hetrun.text.tool_parsers.muse import MUSE, is_muse

BY_NAME = {each.name: each for each in (HARMONY, MUSE)}
BY_THOUGHT = {each.thought: each for each in BY_NAME.values()}


def of_template(template: str) -> Dialect | None:
    """The one that a chat template writes, if it does."""
    if is_harmony(template):
        return HARMONY
    return MUSE if is_muse(template) else None
