"""What is installed and what works here; what does not, with the line that mends it.

People ask when something is broken. So no check may end another, nothing heavy is imported, and backends are
asked in a process of their own: a library that does not fit may end it, or never answer.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

from hetrun import __version__
from hetrun.config import Settings, config_file, default_model, dirs
from hetrun.errors import HetrunError, PluginError
from hetrun.executor.autotune.cpu_contention import others_running
from hetrun.loader.hub.cache import cache_folder
from hetrun.loader.hub.stores import available
from hetrun.system.cgroups import memory_limit
from hetrun.system.cpu_topology import this_machine
from hetrun.system.sandbox import landlock, seccomp
from hetrun.system.subprocesses import ending, python, run
from hetrun.system.sysfs import lines_of
from hetrun.system.units import counted, format_bytes
from hetrun.tools.missing_packages import MissingPackage, not_to_be_had

State = Literal["ok", "note", "warning", "error"]

OLDEST = (3, 11)
BUSY = 0.5  # threads of other programs that run, of which it is worth knowing
PROBING_S = 30.0  # of all backends that do not hang; a slow disk counted
SPARE = 5 << 30  # bytes of a disk with less than which no model fits
SECRETS = ("api_key",)
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve", "i8mm")
NAME = re.compile(r"[A-Za-z0-9._-]+")
WORD = re.compile(r"[A-Za-z0-9._-]+(?:\[[\w-]+\])?")
ROW = {"name", "ok", "text", "whole"}
# What a shell takes; a package without quotes has a dash in its name, which no word of a sentence has.
INSTALL = re.compile(r"(?:[A-Z]+='[^']*' )?pip install(?: (?:--?[a-z-]+|'[^']+'|[a-z]+(?:-[a-z0-9]+)+))+")
ELSEWHERE = "in an environment of its own"
REINSTALL = "pip install --force-reinstall hetrun"
PASSWORD = re.compile(r"//[^/@]*@")
# What a child says of each backend; its own imports are the first thing that may fail there.
CHILD = "from hetrun.tools.doctor import tell_of_backends; tell_of_backends({skipped!r})"


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One thing that was looked at."""

    group: str
    name: str
    state: State
    text: str
    mend: str = ""  # what to do about it, if anything


def examine() -> Iterator[DoctorFinding]:
    """Everything, as it is found."""
    absent = not_to_be_had()
    for group, check in CHECKS:
        try:
            for finding in check():
                yield possible(finding, absent)
        except Exception as error:  # whatever is broken here, the rest is still worth knowing
            said = str(error) if isinstance(error, HetrunError) else f"{type(error).__name__}: {error}"
            yield DoctorFinding(group, check.__name__.strip("_"), "error", said)


# --- hetrun


def _itself() -> Iterator[DoctorFinding]:
    here = Path(__file__).parent
    yield DoctorFinding("hetrun", "hetrun", "ok", f"{__version__} in {here}")
    version = platform.python_version()
    if sys.version_info[:2] < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        yield DoctorFinding(
            "hetrun", "Python", "error", f"{version} is older than {oldest}", f"use {oldest} or newer"
        )
    else:
        yield DoctorFinding("hetrun", "Python", "ok", f"{version}, {sys.executable}")
    system, machine = platform.system(), platform.machine()
    if system == "Linux" and machine in ("x86_64", "aarch64"):
        yield DoctorFinding("hetrun", "system", "ok", f"{system} {platform.release()} on {machine}")
    else:
        yield DoctorFinding(
            "hetrun", "system", "warning", f"{system} on {machine}: hetrun is not tested on it"
        )


def _packages() -> Iterator[DoctorFinding]:
    """Those that hetrun requires, by its own metadata."""
    found, missing = [], []
    for requirement in metadata.requires("hetrun") or ():
        match = NAME.match(requirement)
        if "extra ==" in requirement or not match:
            continue
        try:
            found.append(f"{match[0]} {metadata.version(match[0])}")
        except metadata.PackageNotFoundError:
            missing.append(requirement.replace(" ", ""))
    yield DoctorFinding("hetrun", "packages", "ok", ", ".join(found))
    for requirement in missing:
        yield DoctorFinding(
            "hetrun", "packages", "error", f"{requirement} is missing", f"pip install '{requirement}'"
        )
    for package in not_to_be_had():
        yield DoctorFinding("hetrun", "packages", "note", package.to_text())


def possible(finding: DoctorFinding, absent: Iterable[MissingPackage]) -> DoctorFinding:
    """The same, without the advice to install what this Python cannot have."""
    words = set(WORD.findall(finding.mend))
    for package in absent:
        if package.name in words or words & {f"hetrun[{extra}]" for extra in package.extras}:
            text = finding.text.partition(f": {finding.mend}")[0]
            return replace(finding, text=f"{text}: {package.to_text()}", mend="")
    return finding


# --- the machine


def _cores() -> Iterator[DoctorFinding]:
    lines = lines_of(Path("/proc/cpuinfo"))
    fields = dict(_pair(line) for line in reversed(lines) if ":" in line)
    model = fields.get("model name") or platform.processor() or "a CPU without a name"
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    known = [feature for feature in FEATURES if feature in flags]
    yield DoctorFinding(
        "machine", "CPU", "ok", f"{model}: {', '.join(known) or 'without vector instructions'}"
    )
    yield DoctorFinding("machine", "cores", "ok", this_machine().to_text())


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _memory() -> Iterator[DoctorFinding]:
    lines = dict(_pair(line) for line in lines_of(Path("/proc/meminfo")))
    whole, free = (1024 * int(lines.get(name, "0 kB").split()[0]) for name in ("MemTotal", "MemAvailable"))
    yield DoctorFinding("machine", "memory", "ok", f"{format_bytes(whole)}, {format_bytes(free)} of it free")
    if (limit := memory_limit()) and limit.limit < whole:
        left, most = format_bytes(limit.left), format_bytes(limit.limit)
        yield DoctorFinding("machine", "container", "note", f"may use {most} of it; {left} of that is free")


def _load() -> Iterator[DoctorFinding]:
    busy, all_cores = others_running(), len(os.sched_getaffinity(0))
    if busy < BUSY:
        return
    cores = "all cores" if busy >= all_cores else "a core" if busy < 1.5 else f"{busy:.0f} cores"
    yield DoctorFinding(
        "machine",
        "load",
        "warning",
        f"other programs keep {cores} busy: answers are slower, and speeds measured now are too low",
    )


def _restrictions() -> Iterator[DoctorFinding]:
    """What keeps processes that read third-party files from the rest of the machine: docs/security.md."""
    version, has_filters = landlock.version(), seccomp.is_there()
    if Settings.resolve(environ=None).sandbox == "off":
        yield DoctorFinding("machine", "sandbox", "note", "turned off by the setting sandbox")
        return
    missing = [
        text
        for text, is_missing in (
            ("Landlock (Linux 5.13 or newer): files are not restricted", not version),
            ("Landlock of TCP (Linux 6.7 or newer): only seccomp stops it", 0 < version < 4 and has_filters),
            ("seccomp: calls of the kernel are not restricted", not has_filters),
        )
        if is_missing
    ]
    there = [f"Landlock (version {version})"] * bool(version) + ["seccomp"] * has_filters
    text = f"the processes of models and templates are restricted by {' and '.join(there) or 'nothing'}"
    if missing:
        yield DoctorFinding("machine", "sandbox", "note", f"{text}; not here: {'; '.join(missing)}")
    else:
        yield DoctorFinding("machine", "sandbox", "ok", text)


# --- backends


def _backends() -> Iterator[DoctorFinding]:
    works, skipped = False, list[str]()
    while True:
        ended, said = _asked(skipped)
        asked = [str(row["asked"]) for row in said if "asked" in row]
        for row in said:
            if "package" in row:
                yield _of_plugin(row)
            elif "name" in row:
                ok, text = row["ok"] is True, str(row["text"])
                works |= ok and not row["whole"]
                yield DoctorFinding(
                    "backends", str(row["name"]), "ok" if ok else "note", text, "" if ok else _mend(text)
                )
        if not ended:
            break
        if not asked:
            yield DoctorFinding(
                "backends",
                "all",
                "error",
                f"asking them {ended}; see what this prints: "
                f"{sys.executable} -c 'import hetrun.backend.registry'",
                REINSTALL,
            )
            return
        yield DoctorFinding(
            "backends", asked[-1], "error", f"asking it {ended}", "reinstall what it needs, or remove it"
        )
        skipped += asked
    if not works:
        yield DoctorFinding("backends", "all", "error", "none of them works", REINSTALL)


def _of_plugin(row: dict[str, object]) -> DoctorFinding:
    """What a package registered besides backends."""
    name, package = str(row["name"]), str(row["package"])
    if row["ok"] is True:
        return DoctorFinding("plugins", name, "ok", str(row["text"]))
    mend = f"pip install --upgrade {package}, or: pip uninstall {package}"
    return DoctorFinding(
        "plugins", name, "warning", str(row["text"]), mend if NAME.fullmatch(package) else ""
    )


def _mend(text: str) -> str:
    """The command in a backend's reason that installs what it needs, without the words that follow it; none
    that would spoil the environment in which it is pasted."""
    if text.endswith(ELSEWHERE):
        return ""
    if found := INSTALL.search(text):
        return found[0]
    _, comma, driver = text.rpartition(": ")
    return driver if comma and "install its driver" in driver else ""


def _asked(skipped: list[str]) -> tuple[str, list[dict[str, object]]]:
    """How the child ended, if not well, and what it said before."""
    with tempfile.TemporaryFile() as out:
        try:
            command = python(CHILD.format(skipped=skipped))
            code, _ = run(command, PROBING_S, out=out, err=subprocess.DEVNULL)
            ended = "" if code == 0 else f"{ending(code)}"
        except TimeoutError:
            ended = f"took more than {PROBING_S:.0f} s"
        out.seek(0)
        return ended, [row for line in out if (row := _row(line))]


def _row(line: bytes) -> dict[str, object] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None  # a library that prints
    return row if isinstance(row, dict) and ("asked" in row or ROW <= row.keys()) else None


def tell_of_backends(skipped: Iterable[str]) -> None:
    """The child's part: whom it asks, and then a line for each of its backends. One after the other: one that
    ends this process has said nothing, and the others are asked in the next process."""
    from hetrun.backend import Available, registry
    from hetrun.system import entry_points

    _tell_of_plugins(skipped)
    for point in sorted(entry_points.points("backends")):
        if point in skipped:
            continue
        print(json.dumps({"asked": point}), flush=True)
        for descriptor in registry.backends_of(point):
            try:
                probe = (descriptor.examine or descriptor.probe)()
                ok = isinstance(probe, Available)
                text = probe.detail if isinstance(probe, Available) else probe.reason
            except Exception as error:  # a plugin's
                ok, text = False, f"{type(error).__name__}: {error}"
            row = {"name": descriptor.name, "ok": ok, "text": text, "whole": descriptor.whole is not None}
            print(json.dumps(row), flush=True)


def _tell_of_plugins(skipped: Iterable[str]) -> None:
    """The same of what other packages registered besides backends."""
    from hetrun.system import entry_points

    others = [p for p in entry_points.everything() if not p.is_ours and p.group != "backends"]
    for point in sorted(others, key=lambda p: (p.package, p.group, p.name)):
        asked = f"{point.group}:{point.name}"
        if asked in skipped:
            continue
        print(json.dumps({"asked": asked}), flush=True)
        try:
            entry_points.load(point)
            ok, text = True, f"{entry_points.KINDS.get(point.group, point.group)} of {point.whose}"
        except PluginError as error:
            ok, text = False, str(error)
        row = {"name": point.name, "ok": ok, "text": text, "whole": False, "package": point.package}
        print(json.dumps(row), flush=True)


# --- models and settings


def _models() -> Iterator[DoctorFinding]:
    try:
        yield DoctorFinding("models", "default", "ok", str(default_model()))
    except HetrunError as error:
        text, _, mend = str(error).partition(", or run: ")
        yield DoctorFinding("models", "default", "note", text, mend)
    troubles: list[str] = []
    found = available(troubles.append)
    yield DoctorFinding(
        "models", "here", "ok", f"{counted(len(found), 'model')} by name; hetrun list shows them"
    )
    for trouble in troubles:
        yield DoctorFinding("models", "here", "warning", trouble)
    folder = cache_folder()
    free = shutil.disk_usage(_existing(folder)).free
    text = f"{folder} (Hugging Face's): {format_bytes(free)} free on its disk"
    if free > SPARE:
        yield DoctorFinding("models", "cache", "ok", text)
    else:
        yield DoctorFinding("models", "cache", "warning", f"{text}, which is too little for most models")


def _settings() -> Iterator[DoctorFinding]:
    path = config_file()
    there = "is used" if path.is_file() else "does not exist, and need not"
    yield DoctorFinding("settings", "file", "ok", f"{path} {there}")
    settings = Settings.resolve(environ=None)
    for name, origin in sorted(settings.origins.items()):
        value = PASSWORD.sub("//(not shown)@", repr(getattr(settings, name)))
        value = "(not shown)" if name in SECRETS else value
        yield DoctorFinding("settings", name, "ok", f"{value}, from {origin}")


def _folders() -> Iterator[DoctorFinding]:
    found = dirs()
    for name, folder, use in (
        ("config", found.config, "config.toml"),
        ("cache", found.cache, "measurements of this machine"),
        ("data", found.data, "your own models, in models/"),
    ):
        size = format_bytes(_bytes(folder)) if folder.is_dir() else "does not exist yet"
        above, text = _existing(folder), f"{folder}, for {use}"
        if not above.is_dir():
            yield DoctorFinding("folders", name, "warning", f"{text}: {above} is a file", "move it away")
        elif not os.access(above, os.W_OK):
            yield DoctorFinding(
                "folders", name, "warning", f"{text}: it cannot be written to", f"chmod u+w '{above}'"
            )
        else:
            yield DoctorFinding("folders", name, "ok", f"{text}: {size}")


def _existing(path: Path) -> Path:
    """A folder, or the nearest above it that is there."""
    return next(above for above in (path, *path.parents) if above.exists())


def _bytes(folder: Path) -> int:
    paths = (os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)
    return sum(map(_size, paths))


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:  # gone meanwhile
        return 0


CHECKS: tuple[tuple[str, Callable[[], Iterator[DoctorFinding]]], ...] = (
    ("hetrun", _itself),
    ("hetrun", _packages),
    ("machine", _cores),
    ("machine", _memory),
    ("machine", _load),
    ("machine", _restrictions),
    ("backends", _backends),
    ("models", _models),
    ("settings", _settings),
    ("folders", _folders),
)
