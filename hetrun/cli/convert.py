"""`hetrun convert`: a bar while it works, and a line when it is done."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from hetrun.cli.exit_codes import heed_sigterm
from hetrun.cli.output import say
from hetrun.cli.progress import loading
from hetrun.errors import OptionError, printable
from hetrun.system.units import format_bytes
from hetrun.tools.convert import ConversionOptions, ConversionReport, convert_model
from hetrun.tools.convert.quant_mixtures import RECIPES, by_option


def convert(
    source: Path,
    quant: str | None,
    output: Path | None,
    threads: int | None,
    force: bool,
    requantize: bool,
    as_json: bool,
) -> None:
    """Convert and say what came of it."""
    if quant is None:
        raise OptionError(f"name a type, as -q q4_k_m; there are {', '.join(RECIPES).lower()}")
    heed_sigterm()
    wish = ConversionOptions(source, by_option(quant), output, threads, force, requantize)
    with loading("converting") as tell:
        report = convert_model(wish, tell)
    for note in report.notes:
        say(note)
    print(json.dumps(to_json(report), indent=1) if as_json else printable(to_text(report)))


def to_text(report: ConversionReport) -> str:
    """One line."""
    return (
        f"{report.path}: {format_bytes(report.bytes_before)} -> {format_bytes(report.bytes_after)}, "
        f"{report.bits_per_weight:.2f} bits per weight, {report.seconds:.1f} s"
    )


def to_json(report: ConversionReport) -> dict[str, object]:
    """Everything, for programs."""
    return {**asdict(report), "path": str(report.path), "notes": list(report.notes)}
