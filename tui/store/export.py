"""Conversations as files: Markdown for people, JSON for programs and for hetrun itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hetrun.errors import UserError
from hetrun.system.strict_json import parsed
from hetrun.tui.store.tree import Conversation, Role, Tree, Turn, title_of

FORMAT = "hetrun conversation 1"
MOST_BYTES = 64 << 20  # of a file that is read
MOST_TURNS = 100_000
ROLES: dict[str, Role] = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


def to_markdown(conversation: Conversation, tree: Tree) -> str:
    """The path that is shown."""
    parts = [f"# {conversation.title}"]
    if conversation.system:
        parts.append(f"**System**\n\n{conversation.system}")
    names = {"user": "You", "assistant": "Answer"}
    parts += [f"**{names[turn.role]}**\n\n{turn.text}" for turn in tree.path]
    return "\n\n".join(parts) + "\n"


def to_json(conversation: Conversation, tree: Tree) -> str:
    """Everything, versions beside the path too."""
    turns = [
        {
            "id": turn.id,
            "parent": turn.parent,
            "role": turn.role,
            "content": turn.text,
            "note": turn.note,
            "figures": dict(turn.figures),
            "opened": turn.opened,
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


def write(path: Path, conversation: Conversation, tree: Tree) -> None:
    """A new file, Markdown or JSON by its name."""
    text = to_json(conversation, tree) if path.suffix == ".json" else to_markdown(conversation, tree)
    try:
        with path.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(f"{path} exists already; give another name") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be written: {error}") from error


def read(path: Path) -> list[tuple[Conversation, list[Turn]]]:
    """The conversations of a file: ours, or messages as OpenAI's interface has them, one list or several."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if len(raw) > MOST_BYTES:
        raise UserError(f"{path} is larger than {MOST_BYTES >> 20} MiB, the limit for a conversation")
    try:
        return list(_conversations(parsed(raw)))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a conversation: {error}") from error


def _conversations(value: object) -> Iterator[tuple[Conversation, list[Turn]]]:
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


def _ours(value: Mapping[Any, object], rows: list[Any]) -> tuple[Conversation, list[Turn]]:
    known: set[int] = set()
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
                turns.append(
                    Turn(
                        number,
                        parent,
                        role,
                        text,
                        note if isinstance(note, str) else "",
                        figures if isinstance(figures, dict) else {},
                        opened if isinstance(opened, str) else "",
                    )
                )
            case _:
                raise ValueError("a turn needs id, parent, role (user or assistant) and content")
    title, system, sampling = value.get("title"), value.get("system"), value.get("sampling")
    leaf = value.get("leaf")
    return Conversation(
        0,
        title_of(title) if isinstance(title, str) and title.strip() else _title(turns),
        system if isinstance(system, str) else "",
        sampling if isinstance(sampling, dict) else {},
        leaf if isinstance(leaf, int) and leaf in known else None,
    ), turns


def _of_messages(messages: list[Any], title: str) -> tuple[Conversation, list[Turn]]:
    system: list[str] = []
    turns: list[Turn] = []
    for message in _few(messages):
        match message:
            case {"role": "system" | "developer", "content": content}:
                system.append(_content(content))
            case {"role": str(role), "content": content} if role in ROLES:
                turns.append(Turn(len(turns) + 1, len(turns) or None, ROLES[role], _content(content)))
            case {"role": "tool" | "function"}:
                raise ValueError("it has calls of tools, which the chat does not know")
            case _:
                raise ValueError("a message needs a role (system, user or assistant) and content")
    return Conversation(0, title_of(title) or _title(turns), "\n\n".join(system)), turns


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
