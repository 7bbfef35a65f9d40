"""The package map (the real code of `hetrun.backends` lies in backends/, and so on for the other folders) and
the C libraries, which may be left out."""

import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# The links hetrun/backends -> ../backends serve a checkout. Archives lose them: nothing here follows them.
FOLDERS = ("backends", "models", "tui")
core = find_packages(
    include=["hetrun", "hetrun.*"], exclude=[f"hetrun.{f}{e}" for f in FOLDERS for e in ("", ".*")]
)
mapped = [f"hetrun.{name}" for f in FOLDERS for name in find_packages(include=[f, f"{f}.*"])]

# One C file is one library, called as the file. Each has headers in its folder, and what they share is here.
SOURCES = sorted(path for folder in (*FOLDERS, "hetrun") for path in Path(folder).rglob("*.c"))
SHARED = (Path("hetrun/prefetch/supply.h"), Path("hetrun/prefetch/expert_supply.h"))

# What a library needs beside optimisation. Products have the same bits for every set of instructions, so a
# compiler must not join multiplications and additions by itself.
FLAGS = {"products.c": ["-ffp-contract=off"]}

KEPT = Path("build", "libraries")  # `make clean` removes it


class BuildLibraries(build_ext):
    """Plain libraries for ctypes: their names do not depend on the version of Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()  # one compiler for each core, not one at a time

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        """Compile, unless this checkout has compiled the same before: one file takes half a minute."""
        kept = KEPT / f"{ext.name}-{self.identity(ext)}.so"
        made = Path(self.get_ext_fullpath(ext.name))
        if kept.is_file():
            made.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(kept, made)
            return
        super().build_extension(ext)
        KEPT.mkdir(parents=True, exist_ok=True)
        beside = kept.with_suffix(f".{os.getpid()}")
        shutil.copy2(made, beside)
        beside.replace(kept)

    def identity(self, ext: Extension) -> str:
        """A digest of what the library is made of: texts, options, compiler and machine."""
        compiler = self.compiler.compiler_so
        try:
            version = subprocess.run([compiler[0], "--version"], capture_output=True, check=False).stdout
        except OSError:
            version = b""  # compiling will say it better
        options = repr((compiler, ext.extra_compile_args, ext.libraries, platform.machine())).encode()
        parts = [version, options, *(Path(name).read_bytes() for name in (*ext.sources, *ext.depends))]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


class AnyPython(bdist_wheel):
    """One wheel for all versions of Python: ctypes loads the libraries, and they know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    packages=core + mapped,
    package_dir={"hetrun": "hetrun"} | {f"hetrun.{f}": f for f in FOLDERS},
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": AnyPython},
    ext_modules=[
        Extension(
            "hetrun." + ".".join(path.with_suffix("").parts).removeprefix("hetrun."),
            [path.as_posix()],
            include_dirs=[SHARED[0].parent.as_posix()],
            depends=sorted(header.as_posix() for header in (*SHARED, *path.parent.glob("*.h"))),
            # Python's own options ask for what debuggers need, which takes longer than all the rest.
            extra_compile_args=["-O3", "-g0", *FLAGS.get(path.name, [])],
            libraries=[] if os.name == "nt" else ["m"],
            optional=True,  # without a C compiler everything works, more slowly
        )
        for path in SOURCES
    ],
)
