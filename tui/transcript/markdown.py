"""Lines of a terminal from Markdown that grows at its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from io import StringIO
from typing import TYPE_CHECKING, ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import Heading, Markdown
from rich.segment import Segment
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme
from textual.strip import Strip

from hetrun.system.terminal_text import visible

if TYPE_CHECKING:
    from markdown_it.token import Token

COPY = "copy"  # at the right of a code block's first line
# Rich's own colours for code stand on black, which a light terminal has not.
_PLAIN = {"markdown.code": "bold", "markdown.block_quote": "italic", "markdown.item.bullet": "bold"}
_PLAIN |= {"markdown.table.header": "bold", "markdown.table.border": "dim", "markdown.hr": "dim"}
_PLAIN |= {f"markdown.h{i}": "bold" for i in range(1, 7)}
_PLAIN |= {"markdown.link": "underline", "markdown.link_url": "underline", "markdown.item.number": "bold"}
MOST_CODE = 400  # lines of a block that are coloured; more of them would hold up every key


@dataclass(slots=True)
class MarkdownBlock:
    """A paragraph, a list, a table, or code, and its lines."""

    lines: list[Strip]
    code: str | None = None


class _LeftHeading(Heading):
    """Rich centres headings, and frames the largest."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield Text.assemble((f"{'#' * int(self.tag[1:])} ", "dim"), self.text)


class _Markdown(Markdown):
    """Of tokens that are there already: parsing is half of what drawing a block takes."""

    elements: ClassVar = {**Markdown.elements, "heading_open": _LeftHeading}

    def __init__(self, tokens: list[Token]) -> None:
        # Not Rich's own, which makes a parser each time.
        self.markup, self.parsed, self.style, self.justify = "", tokens, "none", None
        self.hyperlinks, self.inline_code_lexer = False, None
        self.code_theme = self.inline_code_theme = "monokai"


@cache
def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"])


@cache
def _console() -> Console:
    return Console(
        file=StringIO(),
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
        theme=Theme(_PLAIN),
        _environ={},
    )


def blocks_of(text: str) -> Iterator[tuple[int, list[Token]]]:
    """The blocks of a text: where each begins, and its tokens."""
    starts = [0]
    for line in text.split("\n"):  # as the parser cuts it; splitlines knows more ends
        starts.append(starts[-1] + len(line) + 1)
    block: list[Token] = []
    for token in _parser().parse(text):
        block.append(token)
        if token.level == 0 and token.nesting <= 0:
            begin = block[0].map
            yield starts[begin[0]] if begin else 0, block
            block = []


def lines_of(renderable: RenderableType, width: int, *, pad: bool = False) -> list[Strip]:
    """What Rich makes of it, in lines of at most `width` cells."""
    console = _console()
    options = console.options.update(width=max(width, 1), height=None)
    return [Strip(line) for line in console.render_lines(renderable, options, pad=pad)]


class Document:
    """Markdown in lines; text added at the end changes only its last block and those after it."""

    def __init__(self, width: int, dark: bool) -> None:
        self._width = width
        self._dark = dark
        self._text = ""
        self._sure = 0  # here the last block begins
        self.blocks: list[MarkdownBlock] = []

    def write(self, text: str) -> None:
        """The text so far; it has grown, or else everything is made again."""
        if not text.startswith(self._text[: self._sure]) or len(text) < len(self._text):
            self._sure = 0
            self.blocks.clear()
        elif text == self._text:
            return
        elif self.blocks:
            self.blocks.pop()
        self._text = text
        begin = self._sure
        for at, tokens in blocks_of(visible(text[begin:])):
            self.blocks.append(self._block(tokens))
            self._sure = begin + at

    def _block(self, tokens: list[Token]) -> MarkdownBlock:
        if tokens[0].type in ("fence", "code_block"):
            return self._code(tokens[0])
        return MarkdownBlock([*_trimmed(lines_of(_Markdown(tokens), self._width)), Strip.blank(0)])

    def _code(self, token: Token) -> MarkdownBlock:
        code = token.content.rstrip("\n")
        language = (token.info.split() or [""])[0][:20]
        head = Text(f"{language:<{max(self._width - len(COPY) - 1, 0)}}{COPY} ", style="dim", no_wrap=True)
        plain = code.count("\n") > MOST_CODE
        body = Syntax(
            code.expandtabs(4),
            "text" if plain else language or "text",
            theme="monokai" if self._dark else "friendly",
            background_color="default",
            word_wrap=True,
        )
        lines = [_without_background(line) for line in lines_of(body, self._width)]
        return MarkdownBlock([*lines_of(head, self._width), *lines, Strip.blank(0)], code)


def _without_background(line: Strip) -> Strip:
    """That of the screen shows through: a terminal's own may be another one."""
    return Strip(
        [Segment(text, _ink(style) if style else style) for text, style, _ in line], line.cell_length
    )


@lru_cache(256)
def _ink(style: Style) -> Style:
    return Style(color=style.color, bold=style.bold, italic=style.italic, underline=style.underline)


def _trimmed(lines: list[Strip]) -> list[Strip]:
    """Without empty lines at both ends; each kind of block has its own."""
    begin, end = 0, len(lines)
    while begin < end and not lines[begin].text.strip():
        begin += 1
    while end > begin and not lines[end - 1].text.strip():
        end -= 1
    return lines[begin:end]


def plain_lines(text: str, width: int, style: str = "") -> list[Strip]:
    """A text as it was written, wrapped."""
    return lines_of(Text(visible(text).expandtabs(4), style=Style.parse(style), overflow="fold"), width)
