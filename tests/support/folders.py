"""Folders for files that many tests read."""

from __future__ import annotations

import shutil
from atexit import register
from functools import cache
from pathlib import Path
from tempfile import mkdtemp


@cache
def files_folder() -> Path:
    """The one of this process."""
    return lasting_folder()


def lasting_folder() -> Path:
    """A new folder, which is removed when this process ends."""
    folder = Path(mkdtemp(prefix="hetrun-tests-"))
    register(shutil.rmtree, folder, ignore_errors=True)
    return folder
