"""Whether a type checker sees every folder: a mistake is planted in each of a copy, it must name these only.

    python -m tests.tools.types_reach [mypy | basedpyright]

hetrun/backends and its siblings are links: a checker that does not walk through them, or reads a file under
two names, would be content with half of the code.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.paths import ROOT

FOLDERS = ("hetrun", "backends", "models", "tui", "tests", "hetrun/server", "backends/amx", "tests/unit")
PLANTED = "planted_mistake.py"
MISTAKE = "import hetrun.errors\n\nwrong: int = 'text'\n"
SKIPPED = ("build", "dist", "*.egg-info", "__pycache__", ".git", ".venv*", ".hypothesis", "*.gguf", "*.so")
# What a `make types` has left makes this a matter of seconds.
COMMANDS = {"mypy": (), "basedpyright": ("--level", "error", *FOLDERS)}
FOUND = re.compile(r"^\s*(?P<path>[^\s:]+\.py):\d+.* error\b", re.MULTILINE)


def objections(checker: str, project: Path) -> list[str]:
    """What is wrong with what a checker says of a copy."""
    shutil.copytree(ROOT, project, symlinks=True, ignore=shutil.ignore_patterns(*SKIPPED))
    for folder in FOLDERS:
        (project / folder / PLANTED).write_text(MISTAKE, encoding="utf-8")
    command = (sys.executable, "-m", checker, *COMMANDS[checker])
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    found = sorted(
        str((project / match["path"]).resolve().relative_to(project.resolve()))
        for match in FOUND.finditer(done.stdout)
    )
    wanted = sorted(f"{folder}/{PLANTED}" for folder in FOLDERS)
    missing = [f"it does not see {path}" for path in wanted if path not in found]
    more = [f"it objects to {path}" for path in found if path not in wanted]
    twice = [f"it reads {path} twice" for path in set(found) if found.count(path) > 1]
    said = [done.stdout + done.stderr] if missing or more or twice or done.returncode != 1 else []
    return [*missing, *more, *twice, *said]


def main() -> int:
    """The exit code: 1 if a folder is not seen."""
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.types_reach",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checker", nargs="?", choices=tuple(COMMANDS), default="mypy")
    checker = parser.parse_args().checker
    with tempfile.TemporaryDirectory(prefix="hetrun-types-") as room:
        found = objections(checker, Path(room) / "hetrun")
    for line in found:
        print(line)
    if not found:
        print(f"{checker} sees {len(FOLDERS)} planted mistakes and nothing else")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
