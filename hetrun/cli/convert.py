"""`hetrun convert`: a bar while it works, and a line when it is done."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hetrun.cli import say
from hetrun.cli.inspection import size
from hetrun.cli.progress import loading
from hetrun.convert import Report, Wish, convert_model
from hetrun.convert.recipe import by_option
from hetrun.errors import printable


def convert(
    source: Path, quant: str, output: Path | None, threads: int | None, force: bool, as_json: bool
) -> None:
    """Convert and say what came of it."""
    # Ended politely, the command takes its unfinished file with it.
    signal.signal(signal.SIGTERM, _stop)
    wish = Wish(source, by_option(quant), output, threads, force)
    with loading("converting") as tell:
        report = convert_model(wish, tell)
    for note in report.notes:
        say(note)
    print(json.dumps(to_json(report), indent=1) if as_json else printable(to_text(report)))


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def to_text(report: Report) -> str:
    """One line."""
    return (
        f"{report.path}: {size(report.bytes_before)} -> {size(report.bytes_after)}, "
        f"{report.bits_per_weight:.2f} bits per weight, {report.seconds:.1f} s"
    )


def to_json(report: Report) -> dict[str, object]:
    """Everything, for programs."""
    return {**asdict(report), "path": str(report.path), "notes": list(report.notes)}
