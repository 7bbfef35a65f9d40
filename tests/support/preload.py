"""Libraries in C that a process loads before all others."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def build_preload(source: Path, folder: Path, *options: str) -> tuple[Path | None, str]:
    """The library of a C file, made in a folder; or why there is none here."""
    if not sys.platform.startswith("linux"):
        return None, f"{source.name} is for Linux only"
    if (compiler := shutil.which("cc")) is None:
        return None, "there is no C compiler"
    out = folder / f"{source.stem}.so"
    command = [compiler, "-O2", "-g", "-fPIC", *options, "-shared", "-o", str(out), str(source)]
    command += ["-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return None, f"{source.name} needs glibc: {done.stderr.strip()[-200:]}"
    return out, ""
