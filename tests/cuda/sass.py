"""What NVIDIA's compiler made of a kernel: its instructions, and the loops among them.

They are read with nvdisasm, which is a package of its own and needs no GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FUNCTION = re.compile(r"^\.text\.(\w+):$", re.MULTILINE)
LABEL = re.compile(r"^(\.L_\w+):$")
LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")
TARGET = re.compile(r"`\((\.L_\w+)\)")
WIDTH = re.compile(r"\.(?:[US]?(8|16)|(32|64|128))(?=\.|$)")
TENSOR = ("HMMA", "IMMA", "HGMMA", "IGMMA", "QGMMA")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One of them: `LDG.E.128`, and what stands behind it."""

    name: str
    operands: str

    @property
    def kind(self) -> str:
        """Its name without what it is made more exact by."""
        return self.name.split(".")[0]

    @property
    def nbytes(self) -> int:
        """Of a load or a store: what a lane moves."""
        found = WIDTH.search(self.name)
        return int(found[1] or found[2]) // 8 if found else 4


Code = Sequence[Instruction]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel: all of its code, and its loops that have no other loop inside, the longest first."""

    code: Code
    loops: Sequence[Code]

    @property
    def hot(self) -> Code:
        """The longest of its innermost loops."""
        return self.loops[0]


def disassembler() -> str | None:
    """nvdisasm, wherever its package put it."""
    for entry in sys.path:
        for path in Path(entry or ".").glob("nvidia/*/bin/nvdisasm"):
            if os.access(path, os.X_OK):
                return str(path)
    return shutil.which("nvdisasm")


def kernels(tool: str, program: bytes) -> Mapping[str, Compiled]:
    """The kernels of a program by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.cubin")
        path.write_bytes(program)
        said = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True).stdout
    starts = list(FUNCTION.finditer(said))
    ends = [m.start() for m in starts[1:]] + [len(said)]
    return {m[1]: _compiled(said[m.end() : end]) for m, end in zip(starts, ends, strict=True)}


def _compiled(text: str) -> Compiled:
    code, labels, jumps = list[Instruction](), dict[str, int](), list[tuple[int, str]]()
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := LINE.match(line):
            if found[1].startswith("BRA") and (target := TARGET.search(found[2])):
                jumps.append((len(code), target[1]))
            code.append(Instruction(found[1], found[2].strip()))
    spans = [(labels[to], at + 1) for at, to in jumps if labels.get(to, at) < at]
    inner = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return Compiled(code, sorted((code[a:b] for a, b in inner), key=len, reverse=True))


def of_kind(code: Code, *kinds: str) -> list[Instruction]:
    """Those of some kinds."""
    return [i for i in code if i.kind in kinds]


def generic(code: Code) -> Iterator[Instruction]:
    """Loads and stores of which the compiler does not know what memory they mean."""
    return (i for i in code if i.kind in ("LD", "ST"))
