"""Forecasts in files: what was measured outlives the process, as long as the machine stays what it is."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from hetrun.config import dirs
from hetrun.planner.costmodel.key import OpWork
from hetrun.planner.costmodel.timing_bin import Size, TimingBin, size_of
from hetrun.system.files import read_text, replace_file

FORMAT = 2
MOST_BYTES = 8 << 20  # of a file
MOST_WORKS = 4096  # in it; a model has a few dozen
MOST_CELLS = 400  # of a work
MOST_FACTS = 1024
MOST_LETTERS = 200  # of a name
MOST_SECONDS = 1e6
CPU = ("vendor_id", "model name", "stepping", "flags", "CPU implementer", "CPU part", "Features")

Cells = dict[Size, TimingBin]
Facts = dict[tuple[str, str], float]

log = logging.getLogger(__name__)


def path_of_machine(cores: int, versions: Mapping[str, str]) -> Path:
    """Where this machine's times are kept. The name holds all that makes times incomparable.

    `cores` are those that may be used; `versions` those of the libraries that backends compute with, by name.
    """
    cpu = cpu_facts()
    facts = json.dumps([FORMAT, cores, cpu, sorted(versions.items())])
    word = re.sub(r"[^a-z0-9]+", "-", cpu.get("model name", platform.machine()).lower()).strip("-")[:40]
    digest = hashlib.sha256(facts.encode()).hexdigest()[:12]
    return dirs().cache / "times" / f"{word}-{cores}-{digest}.json"


def cpu_facts(info: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """What the CPU is and can do: a virtual machine may hide instructions of the same model."""
    facts = {"machine": platform.machine()}
    with suppress(OSError, UnicodeDecodeError):
        first = info.read_text().split("\n\n")[0]
        found = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
        facts.update({k.strip(): v.strip() for k, v in found.items() if k.strip() in CPU})
    return facts


def read(path: Path, level: int = logging.WARNING) -> tuple[dict[OpWork, Cells], Facts]:
    """What was saved there; nothing where there is no file, or none that we wrote, which the log says."""
    try:
        if not path.exists():
            return {}, {}
        data = json.loads(read_text(path, MOST_BYTES))
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        works = [_work(w) for w in _short_list(data, "works", MOST_WORKS)]
        return dict(works), dict(_fact(f) for f in _short_list(data, "facts", MOST_FACTS))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        log.log(level, "%s is ignored, and its measurements are made again: %s", path, error)
        return {}, {}


def write(path: Path, works: Iterable[tuple[OpWork, Cells]], facts: Facts) -> str:
    """Save; readers see the old file or the new one. Why it could not be done, or nothing.

    Of works the first ones have room, of facts the last ones.
    """
    # What could not be read back is left out: the whole file would be ignored for it.
    saved = [_work_json(work, cells) for work, cells in works if _short(work.form, work.backend)]
    saved = saved[:MOST_WORKS]
    good = [[*key, value] for key, value in facts.items() if _short(*key) and 0 <= value < math.inf]
    some_facts = good[-MOST_FACTS:]
    text = _text(saved, some_facts)
    while len(text) > MOST_BYTES:
        saved = saved[: len(saved) // 2]
        text = _text(saved, some_facts)
    try:
        replace_file(path, text.encode())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _text(works: list[object], facts: list[list[object]]) -> str:
    return json.dumps({"format": FORMAT, "works": works, "facts": facts}, separators=(",", ":"))


def _work_json(work: OpWork, cells: Cells) -> object:
    rows = [
        [c.runs, c.tokens, c.depth, c.smoothed, c.spread, c.best, c.rough]
        for c in cells.values()
        if c.runs and max(c.smoothed, c.spread, c.best) <= MOST_SECONDS
    ]
    return [work.form, work.backend, work.threads, work.several, rows]


def _work(saved: object) -> tuple[OpWork, Cells]:
    if not isinstance(saved, list):
        raise ValueError("a work is no list")
    form, backend, threads, several, rows = saved
    if not isinstance(several, bool) or not isinstance(rows, list) or len(rows) > MOST_CELLS:
        raise ValueError("a work is not as it is saved")
    work = OpWork(_name(form), _name(backend), int(_number(threads, 1e6)), several)
    return work, dict(_cell(row) for row in rows)


def _cell(row: object) -> tuple[Size, TimingBin]:
    if not isinstance(row, list):
        raise ValueError("a cell is no list")
    runs, tokens, depth, *seconds = row
    smoothed, spread, best, rough = (_number(s, MOST_SECONDS) for s in seconds)
    tokens = _number(tokens, 1e9)
    if _number(runs, 1e15) < 1 or tokens < 1:
        raise ValueError("a cell without runs")
    cell = TimingBin()
    cell.restore(int(runs), tokens, _number(depth, 1e9), smoothed, spread, best, rough)
    return size_of(math.ceil(tokens), cell.depth), cell


def _fact(saved: object) -> tuple[tuple[str, str], float]:
    if not isinstance(saved, list):
        raise ValueError("a fact is no list")
    name, backend, value = saved
    return (_name(name), _name(backend)), _number(value, sys.float_info.max)


def _short_list(data: Mapping[str, object], key: str, most: int) -> list[object]:
    found = data[key]
    if not isinstance(found, list) or len(found) > most:
        raise ValueError(f"{key} is no list of at most {most}")
    return found


def _short(*names: str) -> bool:
    return max(map(len, names)) <= MOST_LETTERS


def _name(value: object) -> str:
    if not isinstance(value, str) or not _short(value):
        raise ValueError("a name is no short text")
    return value


def _number(value: object, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"{value!r} is no number from 0 to {most:g}")
    if not math.isfinite(value):
        raise ValueError("a number is infinite")
    return value
