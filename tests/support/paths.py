"""Where the project and its user are."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def user_home() -> Path:
    """Where the user's own things are: in tests HOME is another folder."""
    return Path(pwd.getpwuid(os.getuid()).pw_dir)
