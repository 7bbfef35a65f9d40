"""How the command ends."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn

WRONG_INPUT, OUR_FAULT, STOPPED = 2, 1, 130


def heed_sigterm() -> None:
    """From now on a polite end is like Ctrl-C: the command takes its unfinished file with it."""
    signal.signal(signal.SIGTERM, _stop)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
