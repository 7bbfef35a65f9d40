"""What can be done with a turn."""

from __future__ import annotations

from typing import Literal

from hetrun.tui.conversation import Talk
from hetrun.tui.screens.dialogs import Choice
from hetrun.tui.transcript.turn import Entry

TurnAction = Literal["edit", "regenerate", "fork", "copy", "code", "tokens", "before", "after", "fold"]


def turn_choices(entry: Entry, talk: Talk) -> list[Choice]:
    """What can be done with a turn."""
    found: list[Choice] = []
    turn = entry.turn
    if turn is not None and entry.kind == "user":
        found.append(Choice("edit", "Edit and send again", "e"))
    if turn is not None and (entry.kind == "assistant" or not entry.waiting):
        found.append(Choice("regenerate", "Answer again", "r"))
        found.append(Choice("fork", "Fork: a new conversation from here", "f"))
    found.append(Choice("copy", "Copy", "y"))
    if entry.codes:
        found.append(Choice("code", "Copy code", "c"))
    if entry.has_fold:
        found.append(Choice("fold", "Show or hide the thought", "t"))
    if turn is not None and entry.kind == "assistant":
        found.append(Choice("tokens", "Probabilities and alternatives", "i"))
    if turn is not None and talk.tree.beside(turn, -1):
        found.append(Choice("before", "Earlier version", "left"))
    if turn is not None and talk.tree.beside(turn, 1):
        found.append(Choice("after", "Later version", "right"))
    return found
