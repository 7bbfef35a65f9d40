"""Programs from `kernels/`: compiled when they are first wanted, and kept for the next process."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from hetrun.backends.cuda.nvrtc import compiler
from hetrun.config import dirs
from hetrun.system.files import replace_file

FOLDER = Path(__file__).parent / "kernels"


@dataclass(frozen=True, slots=True)
class Source:
    """A file of kernels, and the words in it that stand for something else each time it is compiled."""

    name: str
    defines: tuple[tuple[str, str], ...] = ()

    @property
    def path(self) -> Path:
        """The file."""
        return FOLDER / f"{self.name}.cu"

    @property
    def options(self) -> list[str]:
        """The defines as compilers want them."""
        return [f"-D{name}={value}" for name, value in self.defines]

    def __str__(self) -> str:
        return " ".join([self.name, *[value for _, value in self.defines]])


Tell = Callable[[str], None]


@dataclass(slots=True)
class Programs:
    """Programs for one kind of GPU."""

    capability: tuple[int, int]
    folder: Path = field(default_factory=lambda: dirs().cache / "cuda")
    tell: Tell = field(default_factory=lambda: told_on_terminal)

    def program(self, source: Source) -> bytes:
        """Compiled, from the cache where it is there."""
        options = [compiler().architecture(self.capability), *source.options]
        path = self.folder / f"{source.name}-{digest(source, options)}.cubin"
        with suppress(OSError):
            return path.read_bytes()
        self.tell(f"compiling CUDA kernels, once for this GPU: {source}")
        made, _ = compiler().compile(source.path.name, source.path.read_text(), FOLDER, options)
        with suppress(OSError):  # a cache that cannot be written costs time, nothing else
            replace_file(path, made, durable=True)  # nothing in it tells whether it is whole
        return made


def digest(source: Source, options: list[str]) -> str:
    """A name for what comes of a source: it holds everything that decides about it."""
    facts = [*source_texts().values(), source.name, *options, str(compiler().version)]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


@cache
def source_texts() -> Mapping[str, str]:
    """All sources: one may include any other."""
    return {p.name: p.read_text() for p in sorted(FOLDER.iterdir()) if p.suffix in (".cu", ".cuh")}


def told_on_terminal(line: str) -> None:
    """Only for people who wait at a terminal."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr)
