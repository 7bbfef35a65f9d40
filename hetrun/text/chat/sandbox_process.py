"""The child process from outside: asked, given up."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from hetrun.system import subprocesses
from hetrun.system.sandbox.child import START_S, Child, ChildGone, computed_too_long
from hetrun.system.sandbox.framing import framed
from hetrun.text.chat import limits

CHILD = "from hetrun.text.chat.sandbox_main import main; main({pipe})"


class SandboxProcess(Child):
    """One life of the child. After anything but an answer it must be ended."""

    def __init__(self, sources: Sequence[str]) -> None:
        """Begin to start it; it reads its templates when it has come so far."""
        super().__init__(CHILD, "chat templates", "jinja2.sandbox")
        with suppress(OSError):  # who waits for it to be ready hears what happened
            self.send(framed(sources), self.limit(START_S))

    def ask(self, request: bytes, most: int) -> object:
        """The answer to a request, of at most this many bytes. It may be anything: a stranger speaks."""
        self.wait_until_ready()
        limit = self.limit(limits.WALL_PER_CPU * limits.seconds(len(request)))
        try:
            self.send(request, limit)
            return self.receive(most, limit)
        except TimeoutError:
            raise ChildGone(limits.TOO_LONG) from None
        except (EOFError, OSError):
            raise ChildGone(_obituary(self.exit_code())) from None
        except (ValueError, RecursionError):
            raise ChildGone("its process sent an unreadable answer") from None


def _obituary(code: int) -> str:
    if code == limits.NO_TIME or computed_too_long(code):
        return limits.TOO_LONG
    if code == limits.NO_MEMORY:
        return limits.TOO_LARGE
    return f"its process {subprocesses.ending(code)}"
