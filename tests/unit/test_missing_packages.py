"""Packages that this Python cannot have: where it is known from, and what is said of them."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from hetrun.tools import doctor, missing_packages
from hetrun.tools.doctor import DoctorFinding
from hetrun.tools.missing_packages import MissingPackage

ROOT = Path(__file__).resolve().parents[2]

REQUIRES = [
    "numpy>=1.26",
    'torch>=2.6; extra == "amx"',
    'torch<2.9,>=2.8; python_version < "3.14" and extra == "ipex"',
    "intel-extension-for-pytorch<2.9,>=2.8; python_version < '3.14' and extra == 'ipex'",
    'numba>=0.61; extra == "test"',
    'torch>=2.6; extra == "test"',
]
IPEX = MissingPackage("intel-extension-for-pytorch", ("ipex",))


@pytest.mark.parametrize(
    ("python", "without", "found"),
    [
        ((3, 13), [], []),
        # torch is to be had, though not the one that IPEX wants.
        ((3, 14), [], [IPEX]),
        ((3, 14), ["numba"], [IPEX, MissingPackage("numba", ("test",))]),
        ((3, 13), ["torch"], [MissingPackage("torch", ("amx", "ipex", "test"))]),
        ((3, 13), ["numpy", "pandas"], []),  # no extra asks for these
    ],
)
def test_what_this_python_cannot_have(
    python: tuple[int, int], without: list[str], found: list[MissingPackage]
) -> None:
    assert missing_packages.unavailable(REQUIRES, without, python) == found


@pytest.mark.parametrize(
    ("marker", "holds"),
    [("< '3.12'", False), ("<= '3.12'", True), ('>= "3.12"', True), ("> '3.12'", False), ("> '3.9'", True)],
)
def test_versions_are_compared_as_numbers(marker: str, holds: bool) -> None:
    found = missing_packages.unavailable([f"x; python_version {marker} and extra == 'test'"], [], (3, 12))
    assert (found == []) == holds


def test_each_marker_of_our_own_is_understood() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra, requirements in project["optional-dependencies"].items():
        assert extra in missing_packages.LOST
        for requirement in requirements:
            marker = requirement.partition(";")[2]
            assert missing_packages.MARKER.sub("", marker).strip() == "", requirement


def test_what_the_installation_left_out_holds_for_the_python_that_it_was_for(tmp_path: Path) -> None:
    assert missing_packages.noted(tmp_path) == []
    notes = tmp_path / missing_packages.NOTES
    notes.write_text(json.dumps({"python": list(missing_packages.HERE), "without": ["numba"]}))
    assert missing_packages.noted(tmp_path) == ["numba"]
    notes.write_text(json.dumps({"python": [3, 9], "without": ["numba"]}))
    assert missing_packages.noted(tmp_path) == []
    for text in ("", "[]", '{"without": 7}', "{"):
        notes.write_text(text)
        assert missing_packages.noted(tmp_path) == []


def test_one_line_says_which_and_what_is_lost() -> None:
    version = re.escape(".".join(map(str, missing_packages.HERE)))
    said = MissingPackage("torch", ("amx", "test")).to_text()
    assert re.fullmatch(f"torch has no wheel for Python {version}: no backend amx; tests .* skipped", said)
    assert MissingPackage("cupy-cuda13x", ()).module == "cupy_cuda13x"


def test_doctor_names_each_and_does_not_advise_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "not_to_be_had", lambda: [IPEX])
    monkeypatch.setattr("importlib.metadata.requires", lambda name: [])
    text, mend = "IPEX is not installed: pip install 'hetrun[ipex]'", "pip install 'hetrun[ipex]'"
    other = DoctorFinding("backends", "amx", "note", "torch is not installed", "pip install 'hetrun[amx]'")
    given = [
        DoctorFinding("backends", "amx-ipex", "note", f"{text} in an environment of its own", mend),
        other,
    ]
    monkeypatch.setattr(doctor, "CHECKS", (("hetrun", doctor._packages), ("backends", lambda: iter(given))))
    named, *rest = [finding for finding in doctor.examine() if finding.state == "note"]
    assert named == DoctorFinding("hetrun", "packages", "note", IPEX.to_text())
    assert rest == [
        DoctorFinding("backends", "amx-ipex", "note", f"IPEX is not installed: {IPEX.to_text()}"),
        other,
    ]


def test_a_package_that_is_to_be_installed_by_its_own_name_is_known_too() -> None:
    finding = DoctorFinding(
        "backends", "cuda", "note", "no crt", "pip install nvidia-cuda-crt nvidia-cuda-runtime"
    )
    found = doctor.possible(finding, [IPEX, MissingPackage("nvidia-cuda-crt", ("cuda",))])
    assert (found.mend, "nvidia-cuda-crt has no wheel" in found.text) == ("", True)
