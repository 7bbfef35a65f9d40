"""A copy of the checkout whose C libraries are sanitized, and processes in it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.sanitizers.builds import ADDRESS, runtime
from tests.support.paths import ROOT

FOLDERS = ("hetrun", "backends", "models", "tui", "tests", "plugins", "docs", "scripts", "examples")
FILES = ("pyproject.toml", "setup.py", "README.md", "CHANGELOG.md", "constraints.txt")
# Python keeps much until its end, so leaks are looked for in programs of C. A SIGBUS is for our own guard.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:handle_sigbus=0:exitcode=99:"
    "detect_stack_use_after_return=1:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=99",
    "TSAN_OPTIONS": "halt_on_error=0:exitcode=99:second_deadlock_stack=1",
}


def copy_checkout(folder: Path, libraries: Mapping[Path, Path]) -> Path:
    """The copy, in a new folder: `libraries` by their C files; the others are left out."""
    where = folder / "checkout"
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.pyc")
    for name in FOLDERS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, where / name, symlinks=True, ignore=ignore)
    for name in FILES:
        if (ROOT / name).is_file():
            shutil.copy2(ROOT / name, where / name)
    for source, library in libraries.items():
        shutil.copy2(library, (where / source.relative_to(ROOT)).with_suffix(".so"))
    return where


def environment(where: Path, sanitizer: str = ADDRESS) -> dict[str, str]:
    """For a Python process in a copy: the sanitizer's library first, and all of Python's memory by it."""
    return {
        **os.environ,
        **OPTIONS,
        "LD_PRELOAD": runtime(sanitizer),
        "PYTHONPATH": str(where),
        "PYTHONMALLOC": "malloc",  # also small objects, as ctypes' structures are, lie between red zones
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def python(*arguments: str) -> list[str]:
    """A command of this Python."""
    return [sys.executable, *arguments]
