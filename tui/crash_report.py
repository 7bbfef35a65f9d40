"""A fault of the chat as a file to report: where it happened, and nothing of what was said."""

from __future__ import annotations

import os
import platform
import tempfile
import traceback
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import textual

import hetrun

OWN = Path(__file__).parents[1]


def words_of(error: BaseException) -> str:
    """Which fault, and where in hetrun: the innermost of its own lines."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if OWN in Path(frame.filename).parents] or list(frames)
    where = f" at {_short(own[-1].filename)}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}{where}"


def explained(error: BaseException, folder: Path | None) -> str:
    """A fault in one sentence, and the file that reports it."""
    path = write_report(error, folder)
    return f"something went wrong in the chat ({words_of(error)})" + (
        f"; please report {path}" if path else ""
    )


def crash_report(error: BaseException) -> str:
    """The stack of an error and of those that it came of. Values are left out, and so is what the error
    says: both may quote the conversation."""
    head = [
        f"hetrun {hetrun.__version__}, Python {platform.python_version()}, textual {textual.__version__}",
        f"{platform.platform()}, terminal {os.environ.get('TERM', 'unknown')}",
        "",
    ]
    return "\n".join([*head, *_stacks(error)]) + "\n"


def write_report(error: BaseException, folder: Path | None) -> Path | None:
    """The report in a new file that only the user can read; None: it could not be written anywhere."""
    name = f"chat-{datetime.now():%Y%m%d-%H%M%S}-"
    for place in (folder, Path(tempfile.gettempdir())):
        if place is None:
            continue
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, path = tempfile.mkstemp(".txt", name, place)  # for this user alone: 0600
            with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
                file.write(crash_report(error))
        except OSError:
            continue
        return Path(path)
    return None


def _stacks(error: BaseException) -> Iterator[str]:
    known: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in known:
        known.add(id(at))
        if at is not error:
            yield "which came of:"
        for frame in traceback.extract_tb(at.__traceback__):
            yield f"  {_short(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line or ''}"
        yield f"{type(at).__module__}.{type(at).__name__}"
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


def _short(file: str) -> str:
    """Without the folders of this machine's user."""
    parts = Path(file).parts
    for name in ("site-packages", "hetrun", "tui"):
        if name in parts:
            return "/".join(parts[parts.index(name) + (name == "site-packages") :])
    return Path(file).name
