"""Text from a model, made safe for a terminal."""

from __future__ import annotations

# A terminal obeys these: a model that writes escape sequences could set the clipboard or the window's title.
_CONTROL = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_CONTROL |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """The text with control characters shown instead of obeyed; line ends and tabs stay."""
    # Almost always there is nothing to replace, and isprintable is much faster than translate.
    return text if text.isprintable() else text.translate(_CONTROL)
