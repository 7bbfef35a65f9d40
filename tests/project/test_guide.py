"""What the pages for users show can be typed, and where their links lead there is something."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import click
import pytest

from hetrun.cli.app import hetrun

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PICTURES = sorted((DOCS / "pictures").glob("*.svg"))
USED = (
    "guide",
    "installing",
    "gpu",
    "bench",
    "serving",
    "batches",
    "sampling",
    "python",
    "conformance",
    "models",
)
SHOWN = [REPOSITORY / "README.md", *(DOCS / f"{name}.md" for name in USED)]
PAGES = sorted([REPOSITORY / "README.md", *DOCS.glob("*.md")])
MOST_BYTES = 60_000
FENCE = re.compile(r"^ *```")
# What stands before the command, and what a page says behind it, in another column.
COMMAND = re.compile(r"^ *(?:\$ )?(?:[^'\"]*\| *)?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(hetrun (?!:).*)$")
BESIDE = re.compile(r" {3,}\S.*$")
ENDS = {"|", "&", ";", ">", "<", ">>", "2>", "&&"}
SPAN = re.compile(r"(?<!`)`(hetrun [^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def blocks(page: Path) -> Iterator[list[str]]:
    """The lines of each code block, fenced or indented."""
    fenced, block = False, list[str]()
    for line in page.read_text(encoding="utf-8").splitlines():
        if FENCE.match(line) or not (fenced or line.startswith("    ")):
            yield block
            fenced, block = fenced != bool(FENCE.match(line)), []
        else:
            block.append(line)
    yield block


def prose(page: Path) -> str:
    """The others."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


def commands(page: Path) -> list[str]:
    """What a block has typed: all of it, or where it shows what comes out, too, what stands behind a `$`."""
    found = []
    for block in blocks(page):
        typed = [line for line in block if line.lstrip().startswith("$ ")] or block
        found += [match[1] for line in typed if (match := COMMAND.match(line))]
    return [BESIDE.sub("", line) for line in found]


def arguments(line: str) -> list[str]:
    """What the shell gives to hetrun."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if word in ENDS:
            break
        words.append(word)
    return words[1:]


def parse(words: list[str]) -> None:
    """As `hetrun` does, up to where something would run."""
    try:
        with hetrun.make_context(
            "hetrun", words[:1] if words[0] in hetrun.commands else list(words)
        ) as group:
            name, command, _ = hetrun.resolve_command(group, list(words))
            assert command is not None
            command.make_context(name, words[1:], parent=group)
    except click.exceptions.Exit:  # --help and --version end there
        pass


@pytest.mark.parametrize(
    ("page", "line"), [pytest.param(page.name, line, id=line) for page in SHOWN for line in commands(page)]
)
def test_a_command_can_be_typed(page: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        parse(arguments(line))
    except click.ClickException as error:
        pytest.fail(f"{page}: {line}: {error.format_message()}")


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.name)
def test_options_that_are_named_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in SPAN.findall(prose(page)):
        try:
            parse(arguments(line))
        except click.MissingParameter:
            pass  # a sentence names a command without its arguments
        except click.ClickException as error:
            pytest.fail(f"{line}: {error.format_message()}")


def test_the_guide_shows_every_command() -> None:
    guide = DOCS / "guide.md"
    text = "\n".join([*commands(guide), *SPAN.findall(prose(guide))])
    missing = [name for name in hetrun.commands if f"hetrun {name}" not in text]
    assert missing in ([], ["completion"])  # which installing.md explains


@pytest.mark.parametrize("wrong", ["hetrun nothing", "hetrun run hi --nothing", "hetrun bench -r many"])
def test_what_cannot_be_typed_is_found(wrong: str) -> None:
    with pytest.raises(click.UsageError):
        parse(arguments(wrong))


def test_commands_are_found_in_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        'hetrun no\n\n    .venv/bin/hetrun run "a  b"   an answer\n\n```\n$ echo x | hetrun run -n 3 > out\n'
        "hetrun: an error\n$ HETRUN_RAM=1GiB hetrun plan\n```\n"
    )
    assert [arguments(line) for line in commands(page)] == [["run", "a  b"], ["run", "-n", "3"], ["plan"]]


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    nowhere = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / unquote(place)).resolve() if place else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            nowhere.append(link)
    assert nowhere == []


def test_the_index_has_every_page() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"README.md"}
    assert pages - set(LINK.findall(index)) == set()


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_light_and_needs_nothing_from_elsewhere(picture: Path) -> None:
    drawn = picture.read_text(encoding="utf-8")
    assert len(drawn.encode()) <= MOST_BYTES
    assert "url(" not in drawn
    assert "@font-face" not in drawn
    assert not re.search(r"/(?:home|root|tmp|work|Users)/", drawn)
    assert any(f"pictures/{picture.name}" in page.read_text(encoding="utf-8") for page in PAGES)
