"""What is inside wheels, as a CycloneDX 1.6 document: packages, compiled-in components, and what pip adds."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

Part = dict[str, Any]

# What hetrun-ggml's libraries are made of. Versions are those of the archive that they come in.
COMPILED = (
    ("llama.cpp", "MIT", "https://github.com/ggml-org/llama.cpp"),
    ("ggml", "MIT", "https://github.com/ggml-org/ggml"),
    ("stb_image", "MIT OR Unlicense", "https://github.com/nothings/stb"),
    ("miniaudio", "Unlicense OR MIT-0", "https://github.com/mackron/miniaudio"),
    ("xxhash", "BSD-2-Clause", "https://github.com/Cyan4973/xxHash"),
    ("sha256", "Unlicense", "https://github.com/jb55/sha256.c"),
    ("rotate-bits", "MIT", "https://github.com/jb55/rotate-bits.h"),
    ("libgomp", "GPL-3.0-or-later WITH GCC-exception-3.1", "https://gcc.gnu.org"),
    ("libstdc++", "GPL-3.0-or-later WITH GCC-exception-3.1", "https://gcc.gnu.org"),
)
LIBRARY = re.compile(r"\.so(\.\d+)*$")
REQUIREMENT = re.compile(r"([\w.-]+)")


def write(path: Path, wheels: list[Path], constraints: Path) -> Path:
    """Write the document beside the wheels, the first of which is what it is about."""
    versions = dict(line.split("==") for line in constraints.read_text().split() if "==" in line)
    packages = [_package(wheel) for wheel in wheels]
    inside = [_compiled(*row) for row in COMPILED]
    own = {package["name"] for package in packages}
    needed = [name for name in _needed(wheels[0]) if name not in own]
    others = [_from_index(name, versions.get(name.lower(), "")) for name in needed]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        # The same wheels give the same document.
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, repr(packages))}",
        "version": 1,
        "metadata": {"component": packages[0]},
        "components": [*packages[1:], *inside, *others],
        "dependencies": [
            {
                "ref": packages[0]["bom-ref"],
                "dependsOn": [p["bom-ref"] for p in (*packages[1:], *others)],
            },
            *({"ref": p["bom-ref"], "dependsOn": [c["bom-ref"] for c in inside]} for p in packages[1:]),
        ],
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return path


def _package(wheel: Path) -> Part:
    """A wheel, its digest and those of its libraries."""
    with zipfile.ZipFile(wheel) as archive:
        about = _metadata(archive)
        libraries = [
            {
                "type": "file",
                "name": name,
                "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(archive.read(name)).hexdigest()}],
            }
            for name in archive.namelist()
            if LIBRARY.search(name)
        ]
    name, version = about["Name"], about["Version"]
    return {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "licenses": [{"expression": about["License-Expression"]}],
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}],
        "components": libraries,
    }


def _compiled(name: str, licence: str, url: str) -> Part:
    return {
        "type": "library",
        "bom-ref": f"compiled-in:{name}",
        "name": name,
        "licenses": [{"expression": licence}],
        "externalReferences": [{"type": "website", "url": url}],
    }


def _from_index(name: str, version: str) -> Part:
    """A package that pip installs beside them, in the version that hetrun is tested with."""
    purl = f"pkg:pypi/{name.lower()}" + (f"@{version}" if version else "")
    part = {"type": "library", "bom-ref": purl, "name": name, "purl": purl, "scope": "required"}
    return part | ({"version": version} if version else {})


def _metadata(archive: zipfile.ZipFile) -> Any:  # noqa: ANN401 - headers, by name
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return HeaderParser().parsestr(archive.read(name).decode())


def _needed(wheel: Path) -> Iterator[str]:
    """What it cannot do without."""
    with zipfile.ZipFile(wheel) as archive:
        for line in _metadata(archive).get_all("Requires-Dist") or ():
            match = REQUIREMENT.match(line)
            if match and "extra ==" not in line:
                yield match[1]
