"""Conversations in a file of SQLite.

Every change is a transaction that is on the disk when the call returns, so nothing that was kept is lost,
however the program ends. Two programs may use the file together. Pictures are in the file, too, each once,
for as long as a turn shows it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from time import time
from typing import Any

from hetrun.errors import UserError
from hetrun.system.files import make_folder
from hetrun.system.units import format_bytes
from hetrun.tui.store.tree import Conversation, Role, Tree, Turn, TurnPicture

VERSION = 2
WAIT_S = 5.0  # for another program that is writing
SCHEMA = """
CREATE TABLE conversation (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    title TEXT NOT NULL,
    system TEXT NOT NULL DEFAULT '',
    sampling TEXT NOT NULL DEFAULT '{}',
    leaf INTEGER,
    changed REAL NOT NULL
) STRICT;
CREATE TABLE turn (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    conversation INTEGER NOT NULL REFERENCES conversation (id) ON DELETE CASCADE,
    parent INTEGER REFERENCES turn (id) ON DELETE CASCADE,
    role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
    text TEXT NOT NULL,
    note TEXT NOT NULL DEFAULT '',
    figures TEXT NOT NULL DEFAULT '{}',
    opened TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX turn_of ON turn (conversation);
CREATE INDEX turn_parent ON turn (parent);
CREATE TABLE preset (
    name TEXT PRIMARY KEY,
    system TEXT NOT NULL,
    sampling TEXT NOT NULL
) STRICT;
CREATE TABLE choice (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
"""
# Since version 2. A picture is known by its bytes: it is kept once, however many turns show it.
PICTURES = """
CREATE TABLE picture (
    digest TEXT PRIMARY KEY,
    file BLOB NOT NULL,
    width INTEGER NOT NULL,
    height INTEGER NOT NULL
) STRICT;
CREATE TABLE shown (
    turn INTEGER NOT NULL REFERENCES turn (id) ON DELETE CASCADE,
    place INTEGER NOT NULL,
    digest TEXT NOT NULL REFERENCES picture (digest),
    name TEXT NOT NULL,
    PRIMARY KEY (turn, place)
) STRICT;
CREATE INDEX shown_picture ON shown (digest);
"""
MOST_KEPT = 4 << 30  # bytes of all pictures
MOST_UNUSED = 64 << 20  # bytes in the file that were of pictures; more are given back to the disk
_UNSHOWN = "DELETE FROM picture WHERE NOT EXISTS (SELECT 1 FROM shown WHERE digest = picture.digest)"
_CONVERSATION = "SELECT id, title, system, sampling, leaf, changed, {turns} FROM conversation"
_COUNTED = _CONVERSATION.format(turns="(SELECT count(*) FROM turn WHERE conversation = conversation.id)")


class ConversationStore:
    """The file; used by one thread at a time. `None` keeps everything in memory, for as long as it lives."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        with self._explained():
            if path is not None:
                make_folder(path.parent, mode=0o700)
            self._db = sqlite3.connect(
                ":memory:" if path is None else path,
                timeout=WAIT_S,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    def _prepare(self) -> None:
        if self.path is not None:
            self.path.chmod(0o600)  # what people say to a model is private
        # A reader does not wait for a writer then; FULL: a transaction is on the disk when it has ended.
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA foreign_keys = ON")
        self._db.create_function("folded", 1, _folded, deterministic=True)
        with self._change():
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version > VERSION:
                raise UserError(
                    f"{self.path} was written by a newer hetrun (its format is {version}, and {VERSION} is "
                    "the newest that this one knows): update hetrun"
                )
            for needed in (SCHEMA, PICTURES)[version:]:
                for statement in needed.split(";"):
                    self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {VERSION}")

    def close(self) -> None:
        with suppress(sqlite3.Error):  # such as another program that has it open: then it does so later
            self._shrink()
        self._db.close()

    def _shrink(self) -> None:
        """What pictures that are gone took is the disk's again."""
        (unused,) = self._db.execute("PRAGMA freelist_count").fetchone()
        (page,) = self._db.execute("PRAGMA page_size").fetchone()
        if self.path is not None and unused * page > MOST_UNUSED:
            self._db.execute("VACUUM")

    # --- conversations

    def conversations(self, containing: str = "", most: int = 1000) -> list[Conversation]:
        """The newest first; those in whose title or turns a text stands."""
        where, values = "", dict[str, str]()
        if containing:
            where = (
                " WHERE instr(folded(title), :text) OR EXISTS (SELECT 1 FROM turn"
                " WHERE conversation = conversation.id AND instr(folded(text), :text))"
                " OR EXISTS (SELECT 1 FROM shown JOIN turn ON turn.id = shown.turn"
                " WHERE conversation = conversation.id AND instr(folded(name), :text))"
            )
            values = {"text": containing.casefold()}
        with self._explained():
            rows = self._db.execute(f"{_COUNTED}{where} ORDER BY changed DESC, id DESC LIMIT {most}", values)
            return [_conversation(row) for row in rows]

    def conversation(self, number: int) -> Conversation | None:
        with self._explained():
            row = self._db.execute(f"{_COUNTED} WHERE id = ?", (number,)).fetchone()
        return None if row is None else _conversation(row)

    def begin(self, title: str, system: str = "", sampling: Mapping[str, Any] | None = None) -> Conversation:
        """A new one."""
        now = time()
        with self._change():
            added = self._db.execute(
                "INSERT INTO conversation (title, system, sampling, changed) VALUES (?, ?, ?, ?)",
                (_text(title), _text(system), _json(sampling or {}), now),
            )
        return Conversation(_id(added), title, system, sampling or {}, changed=now)

    def rename(self, number: int, title: str) -> None:
        self._update("title = ?", _text(title), number)

    def choose(self, number: int, system: str, sampling: Mapping[str, Any]) -> None:
        """What the model is told first, and how it is sampled."""
        with self._change():
            self._db.execute(
                "UPDATE conversation SET system = ?, sampling = ? WHERE id = ?",
                (_text(system), _json(sampling), number),
            )

    def lead_to(self, number: int, leaf: int | None) -> None:
        """The path that is shown ends here."""
        self._update("leaf = ?", leaf, number)

    def delete(self, number: int) -> None:
        with self._change():
            self._db.execute("DELETE FROM conversation WHERE id = ?", (number,))
            self._db.execute(_UNSHOWN)

    def _update(self, change: str, value: object, number: int) -> None:
        with self._change():
            self._db.execute(f"UPDATE conversation SET {change} WHERE id = ?", (value, number))

    # --- turns

    def tree(self, conversation: Conversation) -> Tree:
        """Its turns."""
        with self._explained():
            rows = self._db.execute(
                "SELECT id, parent, role, text, note, figures, opened FROM turn"
                " WHERE conversation = ? ORDER BY id",
                (conversation.id,),
            )
            turns = [Turn(i, parent, r, t, n, json.loads(f), o) for i, parent, r, t, n, f, o in rows]
            shown = self._shown(conversation.id)
        for turn in turns:
            turn.pictures = tuple(shown.get(turn.id, ()))
        return Tree(turns, conversation.leaf)

    def _shown(self, conversation: int) -> dict[int, list[TurnPicture]]:
        """The pictures of its turns, in order."""
        found: dict[int, list[TurnPicture]] = {}
        for turn, *facts in self._db.execute(
            "SELECT turn, digest, name, width, height, length(file) FROM shown JOIN picture USING (digest)"
            " WHERE turn IN (SELECT id FROM turn WHERE conversation = ?) ORDER BY turn, place",
            (conversation,),
        ):
            found.setdefault(turn, []).append(TurnPicture(*facts))
        return found

    def picture(self, digest: str) -> bytes:
        """A picture's file."""
        with self._explained():
            row = self._db.execute("SELECT file FROM picture WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            raise UserError("a picture of this conversation is not kept any more")
        return bytes(row[0])

    def add(
        self,
        conversation: int,
        parent: int | None,
        role: Role,
        text: str,
        note: str = "",
        figures: Mapping[str, Any] | None = None,
        pictures: Sequence[tuple[TurnPicture, bytes]] = (),
    ) -> Turn:
        """A turn after another one, with pictures and their files; the path leads to it."""
        shown = tuple(picture for picture, _ in pictures)
        with self._change():
            self._keep_pictures(pictures)
            turn = self._add(conversation, Turn(0, parent, role, text, note, figures or {}, pictures=shown))
            self._db.execute(
                "UPDATE conversation SET leaf = ?, changed = ? WHERE id = ?", (turn.id, time(), conversation)
            )
        return turn

    def _add(self, conversation: int, turn: Turn) -> Turn:
        added = self._db.execute(
            "INSERT INTO turn (conversation, parent, role, text, note, figures, opened)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                conversation,
                turn.parent,
                turn.role,
                _text(turn.text),
                _text(turn.note),
                _json(turn.figures),
                turn.opened,
            ),
        )
        number = _id(added)
        for place, picture in enumerate(turn.pictures):
            self._db.execute(
                "INSERT INTO shown VALUES (?, ?, ?, ?)", (number, place, picture.digest, _text(picture.name))
            )
        return Turn(
            number, turn.parent, turn.role, turn.text, turn.note, turn.figures, turn.opened, turn.pictures
        )

    def _keep_pictures(self, pictures: Iterable[tuple[TurnPicture, bytes]]) -> None:
        for picture, file in pictures:
            if picture.digest != sha256(file).hexdigest():
                raise ValueError(f"{picture.name} is another picture")
            self._db.execute(
                "INSERT OR IGNORE INTO picture VALUES (?, ?, ?, ?)",
                (picture.digest, file, picture.width, picture.height),
            )
            (kept,) = self._db.execute("SELECT sum(length(file)) FROM picture").fetchone()
            if kept > MOST_KEPT:
                raise UserError(
                    f"there is no room for {picture.name}: the pictures of all conversations may have "
                    f"{format_bytes(MOST_KEPT)}; delete conversations with pictures (F2)"
                )

    def write(self, turn: Turn) -> None:
        """What became of an answer so far."""
        with self._change():
            self._db.execute(
                "UPDATE turn SET text = ?, note = ?, figures = ?, opened = ? WHERE id = ?",
                (_text(turn.text), _text(turn.note), _json(turn.figures), turn.opened, turn.id),
            )

    def remove(self, turn: Turn) -> None:
        """A turn to which nothing was answered."""
        with self._change():
            self._db.execute("UPDATE conversation SET leaf = ? WHERE leaf = ?", (turn.parent, turn.id))
            self._db.execute("DELETE FROM turn WHERE id = ?", (turn.id,))
            self._db.execute(_UNSHOWN)

    def keep(
        self,
        conversation: Conversation,
        turns: Iterable[Turn],
        pictures: Iterable[tuple[TurnPicture, bytes]] = (),
    ) -> Conversation:
        """A conversation from elsewhere, all of it or nothing, with pictures that are not kept yet.

        A turn comes after its parent.
        """
        new: dict[int, int] = {}
        with self._change():
            self._keep_pictures(pictures)
            added = self._db.execute(
                "INSERT INTO conversation (title, system, sampling, changed) VALUES (?, ?, ?, ?)",
                (_text(conversation.title), _text(conversation.system), _json(conversation.sampling), time()),
            )
            number = _id(added)
            for turn in turns:
                parent = None if turn.parent is None else new[turn.parent]
                kept = replace(turn, id=0, parent=parent)
                new[turn.id] = self._add(number, kept).id
            leaf = (
                new.get(conversation.leaf)
                if conversation.leaf is not None
                else max(new.values(), default=None)
            )
            self._db.execute("UPDATE conversation SET leaf = ? WHERE id = ?", (leaf, number))
        found = self.conversation(number)
        assert found is not None, "it was kept just now"
        return found

    def said(self, most: int = 200) -> list[str]:
        """What users have written, the newest last, each text once."""
        with self._explained():
            rows = self._db.execute(
                "SELECT text, max(id) FROM turn WHERE role = 'user' GROUP BY text ORDER BY 2 DESC LIMIT ?",
                (most,),
            ).fetchall()
        return [text for text, _ in rows][::-1]

    # --- presets, and what was chosen for the screen

    def presets(self) -> dict[str, tuple[str, Mapping[str, Any]]]:
        """System prompts and sampling that have a name."""
        with self._explained():
            rows = self._db.execute("SELECT name, system, sampling FROM preset ORDER BY name").fetchall()
        return {name: (system, json.loads(sampling)) for name, system, sampling in rows}

    def save_preset(self, name: str, system: str, sampling: Mapping[str, Any]) -> None:
        with self._change():
            self._db.execute(
                "INSERT OR REPLACE INTO preset VALUES (?, ?, ?)",
                (_text(name), _text(system), _json(sampling)),
            )

    def delete_preset(self, name: str) -> None:
        with self._change():
            self._db.execute("DELETE FROM preset WHERE name = ?", (name,))

    def choice(self, name: str, otherwise: str = "") -> str:
        """What was chosen for the screen, such as a theme."""
        with self._explained():
            row = self._db.execute("SELECT value FROM choice WHERE name = ?", (name,)).fetchone()
        return otherwise if row is None else str(row[0])

    def save_choice(self, name: str, value: str) -> None:
        with self._change():
            self._db.execute("INSERT OR REPLACE INTO choice VALUES (?, ?)", (name, value))

    # --- transactions

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._explained():
            # At once, so that two programs wait for each other instead of failing halfway.
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, ValueError) as error:
            raise UserError(
                f"conversations cannot be saved in {self.path}: {error}; "
                "move the file away to start a new one, or free some space"
            ) from error


def _conversation(row: Sequence[Any]) -> Conversation:
    number, title, system, sampling, leaf, changed, turns = row
    return Conversation(number, title, system, json.loads(sampling), leaf, changed, turns)


def _folded(text: str) -> str:
    return text.casefold()


def _text(text: str) -> str:
    """Halves of characters, which a broken model or terminal may give, cannot be written."""
    return text.encode("utf-8", "replace").decode()


def _json(value: object) -> str:
    return json.dumps(value, default=str)


def _id(cursor: sqlite3.Cursor) -> int:
    assert cursor.lastrowid is not None, "a row was added"
    return cursor.lastrowid
