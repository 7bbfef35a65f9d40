"""scripts/build_wheels.py without compiling ggml: what wheels may need, how they are packed and listed."""

from __future__ import annotations

import base64
import csv
import ctypes
import hashlib
import importlib
import json
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.paths import ROOT

GLIBC = Path("/lib/x86_64-linux-gnu")
CALLS = """
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
static void *answer(void *given) {
    double *x = given;
    *x = exp(*x) + (dlsym(RTLD_DEFAULT, "qsort") != 0);
    return 0;
}
double in_a_thread(double x) {
    pthread_t thread;
    if (pthread_create(&thread, 0, answer, &x) || pthread_join(thread, 0)) return -1;
    return x;
}
"""
FLAGS = ("-shared", "-fPIC", "-O1", "-D_GNU_SOURCE")
NEW = "#include <stdlib.h>\nunsigned dice(void) { return arc4random() % 6; }\n"  # glibc 2.36
needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="there is no gcc")
needs_glibc = pytest.mark.skipif(not (GLIBC / "libc.so.6").exists(), reason="glibc is not in Debian's place")


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module(name)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("build_wheels", monkeypatch)


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("glibc_versions", monkeypatch)


def compiled(source: str, path: Path) -> Path:
    path.with_suffix(".c").write_text(source)
    command = ("gcc", *FLAGS, "-o", path, path.with_suffix(".c"), "-lm", "-Wl,--build-id=none")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine's glibc or compiler is older: {done.stderr.splitlines()[-1]}")
    return path


@needs_gcc
@needs_glibc
def test_a_library_needs_old_versions_and_computes_the_same(tmp_path: Path, versions: ModuleType) -> None:
    path = compiled(CALLS, tmp_path / "calls.so")
    if versions.newest_need(path) <= (2, 28):
        pytest.skip("this machine's glibc is not newer than 2.28")
    size = path.stat().st_size
    changed = versions.lower(path, (2, 28), GLIBC)
    assert {"pthread_create", "dlsym", "exp"} & set(changed)
    assert versions.newest_need(path) <= (2, 28)
    assert path.stat().st_size == size
    assert versions.lower(path, (2, 28), GLIBC) == []
    code = (
        "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).in_a_thread; f.restype = ctypes.c_double;"
        "f.argtypes = [ctypes.c_double]; print(f(1.0))"
    )
    # A process of its own: symbols that do not match end it.
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(2.718281828459045 + 1, rel=1e-15)


@needs_gcc
@needs_glibc
def test_a_function_that_came_later_is_named(tmp_path: Path, versions: ModuleType) -> None:
    path = compiled(NEW, tmp_path / "dice.so")
    before = path.read_bytes()
    with pytest.raises(versions.TooNew, match=r"^arc4random: not in glibc 2\.28$"):
        versions.lower(path, (2, 28), GLIBC)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["GLIBC_2.2.5", "GLIBC_2.34", "GLIBCXX_3.4", "GLIBC_PRIVATE", "GCC_3.0"])
def test_versions_are_compared_as_numbers(name: str, versions: ModuleType) -> None:
    wanted = {"GLIBC_2.2.5": (2, 2, 5), "GLIBC_2.34": (2, 34)}
    assert versions.glibc_version(name) == wanted.get(name)


def test_the_hash_is_the_one_that_loaders_compute(versions: ModuleType) -> None:
    # As the ELF specification's function gives it; glibc's own libraries have the first.
    assert (versions.elf_hash("GLIBC_2.2.5"), versions.elf_hash("")) == (0x09691A75, 0)


@needs_gcc
@needs_glibc
def test_what_a_wheel_may_not_need_is_named(tmp_path: Path, build: ModuleType) -> None:
    path = compiled(CALLS, tmp_path / "pkg.so")
    names = {"pkg.so": 1}
    wrong = list(build.faults(tmp_path, names))
    assert wrong[-1] == "there are no notices in it"
    assert any(text.startswith("pkg.so needs GLIBC_2.") for text in wrong[:-1])
    build.lower_libraries(tmp_path)
    assert list(build.faults(tmp_path, names | {"p.dist-info/licenses/MIT": 1})) == []
    linked = tmp_path / "other.so"
    command = ("gcc", *FLAGS, "-Wl,--no-as-needed", "-o", linked, path.with_suffix(".c"), path)
    subprocess.run(command, check=True)
    build.lower_libraries(tmp_path)
    (tmp_path / "pkg.so").unlink()
    (text,) = build.faults(tmp_path, {"p.dist-info/licenses/MIT": 1})
    assert text == f"other.so needs {path}, which is not in the wheel"


def unpacked(folder: Path) -> Path:
    info = folder / "pkg-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("X = 1\n")
    (folder / "pkg" / "one.so").write_bytes(b"\x7fELF")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: cp311-cp311-linux_x86_64\n")
    (info / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: pkg\nVersion: 1.0\nLicense-Expression: MIT\n"
        "Requires-Dist: numpy>=1.26\nRequires-Dist: torch>=2; extra == 'amx'\n"
    )
    (info / "RECORD").write_text("stale\n")
    return folder


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    repack = script("wheel_archive", monkeypatch).repack
    made: Path = repack(unpacked(tmp_path / "u"), tmp_path, "py3-none-manylinux_2_28_x86_64")
    return made


def test_a_wheel_says_what_is_in_it(wheel: Path) -> None:
    assert wheel.name == "pkg-1.0-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        about = archive.read("pkg-1.0.dist-info/WHEEL").decode().splitlines()
        rows = list(csv.reader(archive.read("pkg-1.0.dist-info/RECORD").decode().splitlines()))
        assert [row[0] for row in rows] == archive.namelist()
        for name, digest, size in rows[:-1]:
            data = archive.read(name)
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert (digest, size) == (f"sha256={found}", str(len(data)))
        modes = {info.filename: info.external_attr >> 16 & 0o777 for info in archive.infolist()}
    assert rows[-1] == ["pkg-1.0.dist-info/RECORD", "", ""]
    assert about[1:] == ["Root-Is-Purelib: false", "Tag: py3-none-manylinux_2_28_x86_64"]
    assert (modes["pkg/one.so"], modes["pkg/__init__.py"]) == (0o755, 0o644)


def test_the_same_files_are_the_same_wheel(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = wheel.read_bytes()
    again = script("wheel_archive", monkeypatch).repack(unpacked(tmp_path / "v"), tmp_path, wheel.stem[8:])
    assert again == wheel
    assert again.read_bytes() == first


def test_the_list_of_what_is_inside(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("# pins\nnumpy==2.4.6\n")
    write = script("wheel_sbom", monkeypatch).write
    text = write(tmp_path / "a.json", [wheel], constraints).read_text()
    found = json.loads(text)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    about = found["metadata"]["component"]
    assert about["purl"] == "pkg:pypi/pkg@1.0"
    assert about["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert [(c["name"], c["hashes"][0]["content"]) for c in about["components"]] == [
        ("pkg/one.so", hashlib.sha256(b"\x7fELF").hexdigest())
    ]
    parts = {part["name"]: part for part in found["components"]}
    assert parts["numpy"]["purl"] == "pkg:pypi/numpy@2.4.6"
    assert "torch" not in parts  # of an extra
    assert all(part.get("licenses") for name, part in parts.items() if name != "numpy")
    references = {about["bom-ref"], *(part["bom-ref"] for part in found["components"])}
    assert {ref for row in found["dependencies"] for ref in (row["ref"], *row["dependsOn"])} <= references
    assert write(tmp_path / "b.json", [wheel], constraints).read_text() == text


def test_levels_are_those_of_the_package(build: ModuleType) -> None:
    package = runpy.run_path(str(build.PACKAGE / "hetrun_ggml" / "__init__.py"))
    assert tuple(package["LEVELS"]) == build.LEVELS


def test_levels_that_are_left_out_are_not_compiled(tmp_path: Path, build: ModuleType) -> None:
    path = tmp_path / "CMakeLists.txt"
    rows = [f"    ggml_add_cpu_backend_variant({name} SSE42 AVX)\n" for name in build.LEFT_OUT]
    kept = "    ggml_add_cpu_backend_variant(haswell SSE42 AVX AVX2)\n"
    path.write_text("".join([*rows[:2], kept, *rows[2:]]))
    build.leave_out_levels(path)
    assert path.read_text() == kept
    with pytest.raises(build.BuildError, match="names its levels in another way"):
        build.leave_out_levels(path)


def test_flags_for_this_machine_are_refused(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CFLAGS", "-O2 -march=native")
    with pytest.raises(build.BuildError, match=r"^-march=native would make wheels for some machines only"):
        build.check_flags()
    monkeypatch.setenv("CFLAGS", "-O2")
    build.check_flags()


def test_the_archive_is_the_pinned_one(build: ModuleType) -> None:
    (pin,) = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if "llama-cpp" in line)
    assert f"\n{pin} \\\n    --hash=sha256:" in (build.PACKAGE / "source.txt").read_text()


def test_hetruns_own_c_is_compiled_for_every_machine() -> None:
    """Levels are functions with attributes, chosen when they run: no option may ask for one."""
    assert "-march" not in (ROOT / "setup.py").read_text()
    assert "-mavx" not in (ROOT / "setup.py").read_text()


def test_the_stand_ins_answer_as_glibc(tmp_path: Path) -> None:
    """What older_glibc.c has in the place of newer functions."""
    if not shutil.which("gcc") or sys.platform != "linux":
        pytest.skip("there is no gcc")
    source = (ROOT / "packaging" / "hetrun-ggml" / "older_glibc.c").read_text()
    calls = "long size(const char *p) { struct stat s; return stat(p, &s) ? -1 : s.st_size; }\n"
    calls += "int kind(const char *p) { struct stat s; return lstat(p, &s) ? -1 : (s.st_mode >> 12); }\n"
    calls += "unsigned number(void) { return arc4random(); }\n"
    calls += "int cpu(void) { unsigned c; return getcpu(&c, 0) ? -1 : c; }\n"
    lib = ctypes.CDLL(str(compiled(source + calls, tmp_path / "stand_ins.so")))
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert lib.size(str(tmp_path / "file").encode()) == 5
    assert lib.size(str(tmp_path / "link").encode()) == 5
    assert lib.size(str(tmp_path / "none").encode()) == -1
    assert lib.kind(str(tmp_path / "link").encode()) == 0o12
    assert len({lib.number() for _ in range(8)}) > 1
    assert lib.cpu() >= 0
