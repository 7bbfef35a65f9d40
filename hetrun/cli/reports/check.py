"""`hetrun check`: a line for each good file, a sentence for each bad one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetrun.cli.exit_codes import WRONG_INPUT
from hetrun.cli.output import in_json, say
from hetrun.cli.progress import loading
from hetrun.errors import UserError, printable
from hetrun.system.units import counted
from hetrun.tools.check_model import Checked, check_model, digests

Record = dict[str, Any]


def check(paths: Sequence[Path], weights: bool, as_json: bool) -> int:
    """Look at all of them; the exit code."""
    records: list[Record] = []
    for path in paths:
        try:
            with loading(f"checking {printable(path.name)}") as progress:
                found = check_model(path, weights, progress)
            records.append(to_json(path, found, weights) if as_json else {"ok": True})
            if not as_json:
                print(printable(f"{path}: {to_text(found, weights)}"), flush=True)
        except UserError as e:
            say(str(e))
            records.append({"path": str(path), "ok": False, "reason": str(e)})
    if as_json:
        print(in_json(records, indent=1))
    return 0 if all(record["ok"] for record in records) else WRONG_INPUT


def to_text(found: Checked, weights: bool) -> str:
    """One line."""
    facts = [
        found.architecture,
        f"{count(found.parameters)} parameters",
        found.type,
        counted(found.tensors, "tensor"),
        f"vocabulary of {found.vocabulary}" if found.vocabulary else "no vocabulary",
        "chat template" if found.template else "no chat template",
        *(["all weights finite"] if weights else []),
    ]
    notes = "".join(f"; not checked: {what}" for what in found.unchecked)
    return f"ok: {', '.join(facts)}{notes}"


def to_json(path: Path, found: Checked, weights: bool) -> Record:
    """Everything, for programs."""
    files: list[Record] = [{"path": name, "bytes": stamp.size} for name, stamp in found.files.items()]
    if weights:
        with loading("hashing") as progress:
            hashes = digests(found.files, progress)
        files = [file | {"sha256": hashes[file["path"]]} for file in files]
    return {
        "path": str(path),
        "ok": True,
        "reason": None,
        "architecture": found.architecture,
        "parameters": found.parameters,
        "type": found.type,
        "tensors": found.tensors,
        "bytes": sum(file["bytes"] for file in files),
        "vocabulary": found.vocabulary,
        "chat_template": found.template,
        "weights": weights,
        "unchecked": list(found.unchecked),
        "files": files,
    }


def count(n: int) -> str:
    """A large number as people say it."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return str(n)
