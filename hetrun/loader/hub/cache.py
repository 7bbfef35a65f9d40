"""Hugging Face's cache on this machine: which files of a repository are there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from hetrun.loader.hub.names import RepositoryModel
from hetrun.loader.hub.select import RepositoryFile

MOST_FILES = 10_000
COMMIT, MOST_LETTERS = re.compile("[0-9a-f]{40}"), 64


def cache_folder() -> Path:
    """Where it lies, as huggingface-hub finds it."""
    for name, inside in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser() / inside
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "huggingface" / "hub"


def repository(repo: str) -> Path:
    """The folder of a repository, whether it is there or not."""
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def snapshot(wanted: RepositoryModel) -> Path | None:
    """The files of a revision as they were when the hub was last asked."""
    folder = repository(wanted.repo)
    commit = read_ref(wanted)
    if commit is None:
        commit = wanted.revision
    elif not COMMIT.fullmatch(commit):  # of a power cut: the library does not wait for the disk
        return None
    found = folder / "snapshots" / commit
    return found if "/" not in commit and ".." not in commit and found.is_dir() else None


def read_ref(wanted: RepositoryModel) -> str | None:
    """What a revision was when the hub was last asked; None: it never was, "": that is unreadable."""
    path = repository(wanted.repo) / "refs" / wanted.revision
    try:
        with path.open("rb") as file:
            return file.read(MOST_LETTERS).decode("ascii").strip()
    except OSError:
        return None
    except UnicodeDecodeError:
        return ""


def files_of(folder: Path) -> list[RepositoryFile]:
    """What lies in a snapshot and can be read; links to nothing are none."""
    return sorted((RepositoryFile(name, size) for name, size in _sizes(folder)), key=lambda file: file.name)


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    left = MOST_FILES
    for at, folders, names in os.walk(folder):
        folders.sort()
        for name in names:
            path = os.path.join(at, name)
            left -= 1
            try:
                if left >= 0 and os.path.isfile(path):
                    yield os.path.relpath(path, folder), os.stat(path).st_size
            except OSError:
                continue
