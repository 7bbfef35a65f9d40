"""The Textual chat: it talks to a `ChatClient` and to nothing below it."""

from __future__ import annotations

import os

# Milliseconds until Escape is a key of its own and not the beginning of another one's. Textual reads this
# when it is imported, and waits for 100 where nothing is said: Escape shall stop an answer sooner.
os.environ.setdefault("ESCDELAY", "25")
