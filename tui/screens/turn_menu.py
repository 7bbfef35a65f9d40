"""What can be done with a turn."""

from __future__ import annotations

from typing import Literal

from hetrun.tui.conversation import Talk
from hetrun.tui.screens.dialogs import DialogChoice
from hetrun.tui.transcript.turn import TurnLines

TurnAction = Literal["edit", "regenerate", "fork", "copy", "code", "tokens", "before", "after", "fold"]


def turn_choices(entry: TurnLines, talk: Talk) -> list[DialogChoice]:
    """What can be done with a turn."""
    found: list[DialogChoice] = []
    turn = entry.turn
    if turn is not None and entry.kind == "user":
        found.append(DialogChoice("edit", "Edit and send again", "e"))
    if turn is not None and (entry.kind == "assistant" or not entry.waiting):
        found.append(DialogChoice("regenerate", "Answer again", "r"))
        found.append(DialogChoice("fork", "Fork: a new conversation from here", "f"))
    found.append(DialogChoice("copy", "Copy", "y"))
    if entry.codes:
        found.append(DialogChoice("code", "Copy code", "c"))
    if entry.has_fold:
        found.append(DialogChoice("fold", "Show or hide the thought", "t"))
    if turn is not None and entry.kind == "assistant":
        found.append(DialogChoice("tokens", "Probabilities and alternatives", "i"))
    if turn is not None and talk.tree.beside(turn, -1):
        found.append(DialogChoice("before", "Earlier version", "left"))
    if turn is not None and talk.tree.beside(turn, 1):
        found.append(DialogChoice("after", "Later version", "right"))
    return found
