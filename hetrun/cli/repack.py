"""`hetrun repack`: a bar while it works, and a line when it is done."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from hetrun.cli.exit_codes import heed_sigterm
from hetrun.cli.output import in_json, say
from hetrun.cli.progress import loading
from hetrun.errors import printable
from hetrun.system.units import counted, format_bytes
from hetrun.tools.convert.in_place import is_begun
from hetrun.tools.convert.reorder import RepackOptions, RepackReport, repack_model


def repack(
    model: Path, output: Path | None, force: bool, as_json: bool, *, merged: bool, in_place: bool
) -> None:
    """Repack and say what came of it."""
    wish = RepackOptions(model, output, force, merged, in_place)
    heed_sigterm()
    try:
        with loading("repacking") as tell:
            report = repack_model(wish, tell)
    except KeyboardInterrupt:
        if wish.in_place and is_begun(wish.source):
            say(f"{wish.source} is half repacked: run the same command again to finish it")
        raise
    for note in report.notes:
        say(note)
    print(in_json(to_json(report), indent=1) if as_json else printable(to_text(report)))


def to_text(report: RepackReport) -> str:
    """One line."""
    tensors = counted(report.tensors, "tensor")
    how = f"{tensors} in the order of use, each at a multiple of {report.alignment} bytes"
    if report.records:
        how += f", {counted(report.records, 'expert')} as records"
    if not report.written:
        return f"{report.path}: {how}, already; nothing was written"
    sizes = f"{format_bytes(report.bytes_before)} -> {format_bytes(report.bytes_after)}"
    return f"{report.path}: {how}, {sizes}, {report.seconds:.1f} s"


def to_json(report: RepackReport) -> dict[str, object]:
    """Everything, for programs."""
    return {**asdict(report), "path": str(report.path), "notes": list(report.notes)}
