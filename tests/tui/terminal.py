"""`hetrun chat` in a terminal of its own, as tmux gives one; what stands on its screen, and its keys."""

from __future__ import annotations

import builtins
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType

TMUX = shutil.which("tmux")
_numbers = count()
PATIENCE_S = 45.0  # less than a test may take, so that a failure shows the screen


class Terminal:
    """A session with one window."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        size: tuple[int, int] = (120, 36),
        program: Sequence[str] = ("hetrun", "chat"),
    ) -> None:
        # Of its own: the server of one that has just ended may still be ending.
        self._socket = str(folder / f"tmux-{next(_numbers)}.sock")
        command = [sys.executable, "-m", *program, *arguments]
        environ = _environment(folder)
        width, height = map(str, size)
        self._tmux("new-session", "-d", "-x", width, "-y", height, *command, env=environ)
        self._tmux("set-option", "-g", "remain-on-exit", "on")

    def _tmux(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        assert TMUX is not None, "callers look whether there is one"
        done = subprocess.run(
            [TMUX, "-S", self._socket, "-f", "/dev/null", *words],
            check=True,
            capture_output=True,
            text=True,
            env=env,
        )
        return done.stdout

    @property
    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    @property
    def pid(self) -> int:
        return int(self._tmux("display-message", "-p", "#{pane_pid}"))

    def keys(self, *names: str) -> None:
        """Keys by tmux's names."""
        self._tmux("send-keys", *names)

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)

    def until(self, text: str) -> str:
        """Wait until a text is on the screen."""
        end = time.monotonic() + PATIENCE_S
        while text not in (screen := self.screen):
            assert time.monotonic() < end, f"{text!r} did not come:\n{screen}"
            time.sleep(0.05)
        return screen

    def until_gone(self, text: str) -> None:
        """Wait until a text is not on the screen any more."""
        end = time.monotonic() + PATIENCE_S
        while text in (screen := self.screen):
            assert time.monotonic() < end, f"{text!r} did not go:\n{screen}"
            time.sleep(0.05)

    def ended(self) -> bool:
        return self._tmux("display-message", "-p", "#{pane_dead}").strip() == "1"

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: builtins.type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        subprocess.run([TMUX or "tmux", "-S", self._socket, "kill-server"], check=False, capture_output=True)


def _environment(folder: Path) -> dict[str, str]:
    """This one, with places of its own for what is kept."""
    own = {"XDG_DATA_HOME": str(folder / "data"), "XDG_CONFIG_HOME": str(folder / "config")}
    return {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8", **own}
