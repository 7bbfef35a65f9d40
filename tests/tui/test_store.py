"""Conversations in their file: strangers' files, programs that end at any point, two at once."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hetrun.errors import UserError
from hetrun.tui.store.export import FORMAT, read, to_json
from hetrun.tui.store.store import VERSION, ConversationStore
from hetrun.tui.store.tree import Conversation, Tree, Turn

# Writes turns for ever, and says of each that it is kept once it should be.
WRITER = """
import sys
from pathlib import Path
from hetrun.tui.store.store import ConversationStore
store = ConversationStore(Path(sys.argv[1]))
number = store.begin("written").id
parent = None
for i in range(1_000_000):
    turn = store.add(number, parent, "user" if i % 2 == 0 else "assistant", f"turn {i} " * 50)
    turn.text += "more"
    store.write(turn)
    parent = turn.id
    print(number, i, flush=True)
"""


def test_killed_at_any_point_nothing_kept_is_lost(tmp_path: Path) -> None:
    place = tmp_path / "conversations.db"
    chance = random.Random(13)
    kept: dict[int, int] = {}
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(place)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline(), "it has begun"
        time.sleep(chance.uniform(0, 0.1))
        os.kill(writer.pid, signal.SIGKILL)
        for line in writer.stdout.read().splitlines():
            if len(words := line.split()) == 2:
                kept[int(words[0])] = int(words[1])
        writer.wait()
        writer.stdout.close()
    store = ConversationStore(place)
    for number, last in kept.items():
        conversation = store.conversation(number)
        assert conversation is not None
        path = store.tree(conversation).path
        assert len(path) > last
        assert [turn.text for turn in path[: last + 1]] == [
            f"turn {i} " * 50 + "more" for i in range(last + 1)
        ]
    store.close()
    with closing(sqlite3.connect(place)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_two_programs_use_one_file(tmp_path: Path) -> None:
    one, other = ConversationStore(tmp_path / "c.db"), ConversationStore(tmp_path / "c.db")
    number = one.begin("from one").id
    other.add(number, None, "user", "from the other")
    found = one.conversation(number)
    assert found is not None
    assert [turn.text for turn in one.tree(found).path] == ["from the other"]
    one.close()
    other.close()


def test_a_file_of_a_newer_hetrun_is_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "c.db"
    ConversationStore(place).close()
    with closing(sqlite3.connect(place)) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(UserError, match="written by a newer hetrun"):
        ConversationStore(place)
    with closing(sqlite3.connect(place)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (VERSION + 1,)


def test_only_the_user_reads_what_was_said(tmp_path: Path) -> None:
    ConversationStore(tmp_path / "new" / "c.db").close()
    assert (tmp_path / "new" / "c.db").stat().st_mode & 0o077 == 0
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", ["cut", "zeros", "noise", "folder"])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, damage: str) -> None:
    place = tmp_path / "c.db"
    store = ConversationStore(place)
    number = store.begin("long").id
    for i in range(200):
        store.add(number, None, "user", f"{i} " * 100)
    store.close()
    whole = place.read_bytes()
    if damage == "folder":
        place.unlink()
        place.mkdir()
    else:
        spoilt = {
            "cut": whole[: len(whole) // 3],
            "zeros": whole[:100] + bytes(len(whole) - 100),
            "noise": whole[:4096] + random.Random(1).randbytes(len(whole) - 4096),
        }[damage]
        place.write_bytes(spoilt)
    with pytest.raises(UserError, match="cannot be saved"):
        _read_all(place)


def _read_all(place: Path) -> None:
    store = ConversationStore(place)
    try:
        for conversation in store.conversations("9"):
            store.tree(conversation)
    finally:
        store.close()


texts = st.text(max_size=30)


@given(st.lists(st.tuples(texts, st.booleans(), st.integers(0, 20)), min_size=1, max_size=12), texts, texts)
def test_out_and_in_again_is_the_same(rows: list[tuple[str, bool, int]], title: str, system: str) -> None:
    turns = [
        Turn(i + 1, None if i == 0 else 1 + at % i, "user" if user else "assistant", text)
        for i, (text, user, at) in enumerate(rows)
    ]
    store = ConversationStore(None)
    first = store.keep(Conversation(0, title, system, {"seed": 1}), turns)
    text = to_json(first, store.tree(first))
    store.close()
    facts = json.loads(text)
    assert [turn["content"] for turn in facts["turns"]] == [turn.text for turn in turns]
    again = ConversationStore(None)
    second = again.keep(Conversation(0, title, system, {"seed": 1}), turns)
    assert [t.text for t in again.tree(second).path] == [t.text for t in Tree(turns).path]
    again.close()


def _with(**changes: object) -> object:
    turn = {"id": 1, "parent": None, "role": "user", "content": "x"}
    return {"format": FORMAT, "turns": [{**turn, **changes}]}


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        [[]],
        [[[[]]]],
        3,
        None,
        "text",
        {"messages": 3},
        {"messages": [3]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "stranger", "content": "x"}]},
        {"format": "hetrun conversation 2", "turns": []},
        {"format": FORMAT, "turns": 3},
        {"format": FORMAT, "turns": [3]},
        _with(parent=1),
        _with(parent=7),
        _with(parent="x"),
        _with(role="system"),
        _with(content=None),
        _with(id="1"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_is_no_conversation_is_said(tmp_path: Path, value: object) -> None:
    (tmp_path / "in.json").write_text(json.dumps(value))
    with pytest.raises(UserError, match="is not a conversation"):
        read(tmp_path / "in.json")


@pytest.mark.parametrize("raw", [b"", b"\xff\xfe", b"[" * 100_000, b'{"messages": [', b'{"a": NaN}'])
def test_what_is_no_json_is_said(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "in.json").write_bytes(raw)
    with pytest.raises(UserError, match="is not a conversation"):
        read(tmp_path / "in.json")


def test_odd_fields_of_a_strange_file_are_left_out(tmp_path: Path) -> None:
    value = _with(note=3, figures=[1], opened={})
    assert isinstance(value, dict)
    (tmp_path / "in.json").write_text(json.dumps({**value, "title": 3, "sampling": "hot", "leaf": 99}))
    ((conversation, turns, _),) = read(tmp_path / "in.json")
    assert (conversation.title, dict(conversation.sampling), conversation.leaf) == ("x", {}, None)
    assert (turns[0].note, dict(turns[0].figures), turns[0].opened) == ("", {}, "")
