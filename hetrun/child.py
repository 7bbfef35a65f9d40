"""How a child process of ours begins."""

from __future__ import annotations

import sys


def python(code: str, *arguments: str) -> list[str]:
    """The command for a fresh interpreter with our module path; native libraries do not survive a fork.

    -P keeps the working directory out of the path: nobody wants to import a json.py that lies there.
    """
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}", *arguments]
