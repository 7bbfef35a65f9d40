"""`hetrun check`: a line for each good file, a sentence for each bad one, and what cannot be known."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetrun.cli.exit_codes import WRONG_INPUT
from hetrun.cli.output import in_json, say
from hetrun.cli.progress import loading
from hetrun.errors import ModelFileError, UserError, printable
from hetrun.loader.hub.checksums import expected
from hetrun.loader.weight_check import HoleError
from hetrun.system.units import counted
from hetrun.tools.check_model import CheckedModel, check_model, digests

Record = dict[str, Any]


def check(models: Sequence[tuple[str, Path]], weights: bool, as_json: bool) -> int:
    """Look at all of them, each under the name that it was given; the exit code."""
    records: list[Record] = []
    for name, path in models:
        try:
            with loading(f"checking {printable(path.name)}") as progress:
                found = check_model(path, weights, progress)
            with loading("hashing") as progress:
                hashes = digests(found.files, progress) if weights else {}
            records.append(to_json(path, found, weights, hashes))
            if not as_json:
                print("\n".join(map(printable, to_text(name, found, weights, hashes))), flush=True)
        except UserError as e:
            if len(models) > 1 and not as_json:  # the list of results is complete on stdout
                print(f"{printable(short_path(name))}: not ok: {reason_of(e, path)}", flush=True)
            else:
                say(in_short(e))
            records.append({"path": str(path), "ok": False, "reason": str(e)} | holes_of(e))
    bad = sum(not record["ok"] for record in records)
    if as_json:
        print(in_json(records, indent=1))
    elif bad < len(records):
        print(limits([record for record in records if record["ok"]], weights, bad > 0), flush=True)
    if bad and len(records) > 1 and not as_json:
        say(f"{bad} of {counted(len(records), 'model')} {'is' if bad == 1 else 'are'} not ok")
    return WRONG_INPUT if bad else 0


def reason_of(error: UserError, path: Path) -> str:
    """What is wrong with a model, after its name; with a file's name if that is one of several."""
    if not isinstance(error, ModelFileError):
        return str(error).removeprefix(f"{path}: ")
    return error.reason if error.path == str(path) else in_short(error)


def holes_of(error: UserError) -> Record:
    """The tensors that have holes, for programs."""
    return {"holes": [asdict(hole) for hole in error.holes]} if isinstance(error, HoleError) else {}


def to_text(name: str, found: CheckedModel, weights: bool, hashes: Mapping[str, str]) -> Iterator[str]:
    """One line, and one for each remark and each sha256."""
    facts = [
        found.architecture,
        f"{count(found.parameters)} parameters",
        found.type,
        counted(found.tensors, "tensor"),
        f"vocabulary of {found.vocabulary}" if found.vocabulary else "no vocabulary",
        "chat template" if found.template else "no chat template",
        *(["all weights finite, no long runs of zeros"] if weights else []),
    ]
    notes = "".join(f"; not checked: {what}" for what in found.unchecked)
    verdict = "ok" if weights else "structure ok, weights not read"
    yield f"{short_path(name)}: {verdict}: {', '.join(facts)}{notes}"
    for remark in found.remarks:
        yield f"  remark: {remark}"
    for path, sha256 in hashes.items():
        known = expected(path)
        yield f"  sha256 {sha256}  {f'as {known.store} downloaded it' if known else os.path.basename(path)}"


def limits(records: Sequence[Record], weights: bool, of_some: bool) -> str:
    """What was looked at, and what cannot be known; `of_some`: other files are not ok."""
    if not weights:
        return (
            "Damage in the weights is found without --structure only: then check reads them, looks for NaN "
            "and long runs of zeros, and compares checksums."
        )
    whose = "of the others " if of_some else ""
    if all(file["expected_by"] for record in records for file in record["files"]):
        return (
            f"The structure {whose}is sound, and the weights' files are those that were downloaded, "
            "byte by byte."
        )
    return (
        f"Structure and numbers {whose}are sound. Only a checksum shows whether other bytes of the weights "
        "have changed: compare sha256 with the publisher's."
    )


def in_short(error: UserError) -> str:
    """An error with a short path."""
    if isinstance(error, ModelFileError):
        return f"{printable(short_path(error.path))}: {error.reason}"
    return str(error)


def short_path(path: str) -> str:
    """From here or from home, if it lies there."""
    with suppress(OSError):  # a folder that was removed
        here = os.path.join(os.getcwd(), "")
        if here != "/" and path.startswith(here):
            return path[len(here) :]
    home = os.path.join(os.path.expanduser("~"), "")
    return f"~/{path[len(home) :]}" if home != "/" and path.startswith(home) else path


def to_json(path: Path, found: CheckedModel, weights: bool, hashes: Mapping[str, str]) -> Record:
    """Everything, for programs."""
    files: list[Record] = [{"path": name, "bytes": stamp.size} for name, stamp in found.files.items()]
    for file in files if weights else ():
        known = expected(file["path"])
        file |= {"sha256": hashes[file["path"]], "expected_by": known.store if known else None}
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
        "remarks": list(found.remarks),
        "files": files,
    }


def count(n: int) -> str:
    """A large number as people say it."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return str(n)
