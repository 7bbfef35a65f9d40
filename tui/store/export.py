"""Conversations as files: Markdown for people, JSON for programs and for hetrun itself.

Pictures are files in a folder beside Markdown, and data URLs within JSON.
"""

from __future__ import annotations

import binascii
import json
import os
import re
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from hetrun.client.events import MOST_PICTURE_BYTES
from hetrun.client.pictures import data_url
from hetrun.errors import PictureError, UserError
from hetrun.pictures.kinds import format_of
from hetrun.system.files import sync_names
from hetrun.system.strict_json import parsed
from hetrun.system.units import format_bytes
from hetrun.tui.store.tree import Conversation, Role, Tree, Turn, TurnPicture, title_of

FORMAT = "hetrun conversation 1"
MOST_BYTES = 256 << 20  # of a file that is read, most of it pictures
MOST_TURNS = 100_000
ROLES: dict[str, Role] = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
DATA = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,", re.IGNORECASE)
MOST_SIDE = 65_535  # pixels

PictureOf = Callable[[str], bytes]  # a picture's file by its digest


class ImportedConversation(NamedTuple):
    """A conversation of a file."""

    conversation: Conversation
    turns: list[Turn]
    pictures: list[tuple[TurnPicture, bytes]]


def to_markdown(conversation: Conversation, tree: Tree, folder: str = "") -> str:
    """The path that is shown; its pictures are in this folder."""
    parts = [f"# {conversation.title}"]
    if conversation.system:
        parts.append(f"**System**\n\n{conversation.system}")
    names = {"user": "You", "assistant": "Answer"}
    for turn in tree.path:
        shown = [f"![{_alt(p.name)}]({folder}/{_file_name(p)})" for p in turn.pictures]
        parts.append("\n\n".join([f"**{names[turn.role]}**", *shown, turn.text]))
    return "\n\n".join(parts) + "\n"


def _alt(name: str) -> str:
    """A file's name as Markdown takes it, in one line."""
    return re.sub(r"([\\\[\]!`*_<>])", r"\\\1", " ".join(name.split()))


def _file_name(picture: TurnPicture) -> str:
    """By its bytes: people's names of files are not for every system."""
    suffix = Path(picture.name).suffix.lower()
    return picture.digest[:16] + (suffix if re.fullmatch(r"\.[a-z0-9]{1,5}", suffix) else ".png")


def to_json(conversation: Conversation, tree: Tree, picture_of: PictureOf | None = None) -> str:
    """Everything, versions beside the path too."""

    def pictured(picture: TurnPicture) -> dict[str, object]:
        assert picture_of is not None, "who has pictures has their files"
        url = data_url(picture_of(picture.digest))
        return {"name": picture.name, "width": picture.width, "height": picture.height, "url": url}

    turns = [
        {
            "id": turn.id,
            "parent": turn.parent,
            "role": turn.role,
            "content": turn.text,
            "note": turn.note,
            "figures": dict(turn.figures),
            "opened": turn.opened,
            **({"pictures": [pictured(picture) for picture in turn.pictures]} if turn.pictures else {}),
        }
        for turn in tree
    ]
    facts = {
        "format": FORMAT,
        "title": conversation.title,
        "system": conversation.system,
        "sampling": dict(conversation.sampling),
        "leaf": tree.leaf,
        "turns": turns,
    }
    return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"


def write(path: Path, conversation: Conversation, tree: Tree, picture_of: PictureOf | None = None) -> None:
    """A new file, Markdown or JSON by its name, and beside Markdown a folder with its pictures."""
    if path.suffix == ".json":
        nbytes = sum(picture.nbytes for turn in tree for picture in turn.pictures)
        if 4 * nbytes // 3 > MOST_BYTES - (MOST_BYTES >> 4):
            raise UserError(
                f"its pictures have {format_bytes(nbytes)}, too much for a JSON file: export it as Markdown"
            )
        text, pictures = to_json(conversation, tree, picture_of), {}
    else:
        folder = path.with_name(f"{path.stem}-pictures")
        text = to_markdown(conversation, tree, quote(folder.name))
        pictures = {folder / _file_name(p): p.digest for turn in tree.path for p in turn.pictures}
    try:
        if path.exists():
            raise FileExistsError
        for place, digest in pictures.items():
            assert picture_of is not None, "who has pictures has their files"
            place.parent.mkdir(exist_ok=True)
            _write_whole(place, picture_of(digest))
        # The last one: where it is, all is.
        _write_whole(path, text.encode("utf-8", "replace"), is_new=True)
        for folder in {path.parent, path.parent.parent, *(place.parent for place in pictures)}:
            sync_names(folder)
    except FileExistsError as error:
        raise UserError(f"{path} exists already; give another name") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be written: {error}") from error


def _write_whole(path: Path, content: bytes, is_new: bool = False) -> None:
    """A file that has its name when all of it is on the disk. FileExistsError: one that `is_new` is not."""
    beside = path.with_name(f".{path.name}.part")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            (os.link if is_new else os.replace)(beside, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read(path: Path) -> list[ImportedConversation]:
    """The conversations of a file: ours, or messages as OpenAI's interface has them, one list or several."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if len(raw) > MOST_BYTES:
        raise UserError(f"{path} is larger than {format_bytes(MOST_BYTES)}, the limit for a conversation")
    try:
        return list(_conversations(parsed(raw)))
    except (ValueError, RecursionError, PictureError) as error:
        raise UserError(f"{path} is not a conversation: {error}") from error


def _conversations(value: object) -> Iterator[ImportedConversation]:
    match value:
        case {"format": str(name)} if name != FORMAT:
            raise ValueError(f"its format is {name!r}, and {FORMAT!r} is known")
        case {"format": str(), "turns": [*turns], **facts}:
            yield _ours(facts, turns)
        case {"messages": [*messages], **facts}:
            title = facts.get("title")
            yield _of_messages(messages, title if isinstance(title, str) else "")
        case [{"role": str()}, *_] as messages:
            yield _of_messages(list(messages), "")
        case [*several] if several:
            for one in several:
                if isinstance(one, list) and not (one and isinstance(one[0], dict) and "role" in one[0]):
                    raise ValueError("a list within a list has no messages")
                yield from _conversations(one)
        case _:
            raise ValueError("it is neither a conversation of hetrun's nor a list of messages")


def _ours(value: Mapping[Any, object], rows: list[Any]) -> ImportedConversation:
    known: set[int] = set()
    pictures: list[tuple[TurnPicture, bytes]] = []
    turns: list[Turn] = []
    for row in _few(rows):
        match row:
            case {
                "id": int(number),
                "parent": parent,
                "role": "user" | "assistant" as role,
                "content": str(text),
            }:
                if number in known or not (parent is None or (isinstance(parent, int) and parent in known)):
                    raise ValueError(f"turn {number} has a parent that does not come before it")
                known.add(number)
                figures, note, opened = row.get("figures"), row.get("note"), row.get("opened")
                shown = _pictures(row.get("pictures", []))
                pictures += shown
                turns.append(
                    Turn(
                        number,
                        parent,
                        role,
                        text,
                        note if isinstance(note, str) else "",
                        figures if isinstance(figures, dict) else {},
                        opened if isinstance(opened, str) else "",
                        tuple(picture for picture, _ in shown),
                    )
                )
            case _:
                raise ValueError("a turn needs id, parent, role (user or assistant) and content")
    title, system, sampling = value.get("title"), value.get("system"), value.get("sampling")
    leaf = value.get("leaf")
    conversation = Conversation(
        0,
        title_of(title) if isinstance(title, str) and title.strip() else _title(turns),
        system if isinstance(system, str) else "",
        sampling if isinstance(sampling, dict) else {},
        leaf if isinstance(leaf, int) and leaf in known else None,
    )
    return ImportedConversation(conversation, turns, pictures)


def _pictures(value: object) -> list[tuple[TurnPicture, bytes]]:
    """Pictures of a turn, as `to_json` writes them."""
    if not isinstance(value, list):
        raise ValueError("pictures must be a list")
    found = []
    for row in value:
        match row:
            case {"name": str(name), "url": str(url), **facts}:
                found.append(_picture(name, url, facts.get("width"), facts.get("height")))
            case _:
                raise ValueError("a picture needs a name and a url")
    return found


def _picture(name: str, url: str, *sides: object) -> tuple[TurnPicture, bytes]:
    """A picture in a data URL. What it says of its size is for the room that is kept for it."""
    begun = DATA.match(url)
    if begun is None:
        raise ValueError("a picture must be a data URL, as data:image/png;base64,...")
    try:
        file = b64decode(url[begun.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("a picture is not in base64") from None
    if len(file) > MOST_PICTURE_BYTES:
        raise ValueError(f"a picture has more than {format_bytes(MOST_PICTURE_BYTES)}")
    format_of(file)
    width, height = (side if isinstance(side, int) and 0 < side <= MOST_SIDE else 0 for side in sides)
    return TurnPicture(sha256(file).hexdigest(), " ".join(name.split())[:200], width, height, len(file)), file


def _of_messages(messages: list[Any], title: str) -> ImportedConversation:
    system: list[str] = []
    turns: list[Turn] = []
    pictures: list[tuple[TurnPicture, bytes]] = []
    for message in _few(messages):
        match message:
            case {"role": "system" | "developer", "content": content}:
                system.append(_content(content))
            case {"role": str(role), "content": content} if role in ROLES:
                shown = _shown(content, len(pictures)) if ROLES[role] == "user" else []
                pictures += shown
                turn = Turn(len(turns) + 1, len(turns) or None, ROLES[role], _content(content))
                turn.pictures = tuple(picture for picture, _ in shown)
                turns.append(turn)
            case {"role": "tool" | "function"}:
                raise ValueError("it has calls of tools, which the chat does not know")
            case _:
                raise ValueError("a message needs a role (system, user or assistant) and content")
    conversation = Conversation(0, title_of(title) or _title(turns), "\n\n".join(system))
    return ImportedConversation(conversation, turns, pictures)


def _shown(content: object, before: int) -> list[tuple[TurnPicture, bytes]]:
    """The pictures of a message's parts; what is elsewhere on the net is not fetched, and left out."""
    found: list[tuple[TurnPicture, bytes]] = []
    for part in content if isinstance(content, list) else ():
        match part:
            case {"image_url": {"url": str(url)}} if DATA.match(url):
                suffix = url[len("data:image/") :].partition(";")[0].lower()
                found.append(_picture(f"picture {before + len(found) + 1}.{suffix}", url, 0, 0))
    return found


def _few(rows: list[Any]) -> list[Any]:
    if len(rows) > MOST_TURNS:
        raise ValueError(f"it has {len(rows)} turns, but at most {MOST_TURNS} are allowed")
    return rows


def _title(turns: list[Turn]) -> str:
    return title_of(turns[0].text if turns else "") or "Imported"


def _content(content: object) -> str:
    """A text, or parts of which the texts count."""
    match content:
        case str():
            return content
        case [*parts]:
            return "".join(p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))
        case None:
            return ""
    raise ValueError("content must be a text")
