"""The package map: the real code of `hetrun.backends` lies in backends/, and so on for the other folders."""

from setuptools import find_packages, setup

# The links hetrun/backends -> ../backends serve a checkout. Archives lose them: nothing here follows them.
FOLDERS = ("backends", "models", "plugins", "tui")
core = find_packages(
    include=["hetrun", "hetrun.*"], exclude=[f"hetrun.{f}{e}" for f in FOLDERS for e in ("", ".*")]
)
mapped = [f"hetrun.{name}" for f in FOLDERS for name in find_packages(include=[f, f"{f}.*"])]
setup(packages=core + mapped, package_dir={"hetrun": "hetrun"} | {f"hetrun.{f}": f for f in FOLDERS})
