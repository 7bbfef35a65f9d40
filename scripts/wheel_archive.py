"""An unpacked wheel becomes a wheel again: for other platforms, and the same bytes from the same files."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from pathlib import Path

WHEN = (1980, 1, 1, 0, 0, 0)  # of every file: a wheel says what it holds, not when it was made


def repack(folder: Path, out: Path, tag: str) -> Path:
    """Write the wheel of these files with another tag (py3-none-any); returns its path."""
    (info,) = folder.glob("*.dist-info")
    about = info / "WHEEL"
    text = re.sub(r"(?m)^Tag: .*\n", "", about.read_text(encoding="utf-8")).rstrip()
    text = re.sub(r"(?m)^Root-Is-Purelib: .*$", "Root-Is-Purelib: false", text)
    about.write_text(f"{text}\nTag: {tag}\n", encoding="utf-8")
    record = info / "RECORD"
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != record)
    record.write_text(_record(folder, [*files, record]), encoding="utf-8")
    made = out / f"{info.name.removesuffix('.dist-info')}-{tag}.whl"
    beside = made.with_suffix(".part")
    with zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in (*files, record):
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), WHEN)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if ".so" in path.name else 0o100644) << 16
            archive.writestr(entry, path.read_bytes())
    beside.replace(made)
    return made


def _record(folder: Path, files: list[Path]) -> str:
    """Digests and sizes; the last file is the record itself, which has none."""
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    for path in files[:-1]:
        data = path.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        writer.writerow((path.relative_to(folder).as_posix(), f"sha256={digest}", len(data)))
    writer.writerow((files[-1].relative_to(folder).as_posix(), "", ""))
    return rows.getvalue()
