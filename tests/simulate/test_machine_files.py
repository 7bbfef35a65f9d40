"""Machines' files: those that ship, and those that say what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hetrun.errors import OptionError, UserError
from hetrun.tools.simulate.machine_files import BEDS, known, open_machine, read_machine

GOOD = """
about = "a machine"
[device.cpu]
name = "cores"
memory_gb = 64
bandwidth_gb_s = 50
bf16_tflops = 1
half_tokens = 4
vector_tflops = 0.3
launch_us = 5
"""
GPU = """
[device.gpu]
name = "card"
memory_gb = 24
bandwidth_gb_s = 600
bf16_tflops = 70
int8_tops = 140
half_tokens = 64
vector_tflops = 30
launch_us = 5
"""
LINK = "[link]\nbandwidth_gb_s = 12\nlatency_us = 10\n"


def read(folder: Path, text: str | bytes) -> str:
    """The sentence that a file is refused with."""
    path = folder / "mine.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(OptionError) as refused:
        read_machine(path)
    said = str(refused.value)
    assert str(path) in said
    assert "\n" not in said
    return said


def test_the_units_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(GOOD + GPU + LINK + "[disk]\nsize_gb = 500\nread_gb_s = 2.5\n")
    found = open_machine(str(tmp_path / "mine.toml"))
    assert found.name == "mine"
    assert found.gpu is not None
    assert found.link is not None
    assert found.disk is not None
    assert (found.cpu.memory, found.cpu.bandwidth, found.cpu.bf16) == (64 * 10**9, 50e9, 1e12)
    assert found.cpu.int8 == 0
    assert (found.gpu.int8, found.gpu.launch) == pytest.approx((140e12, 5e-6))
    assert (found.link.bandwidth, found.link.latency) == pytest.approx((12e9, 1e-5))
    assert (found.disk.size, found.disk.read) == (500 * 10**9, 2.5e9)


@pytest.mark.parametrize("name", known())
def test_what_ships_is_read_and_every_number_has_a_source(name: str) -> None:
    assert open_machine(name).about
    for line in (BEDS / f"{name}.toml").read_text().splitlines():
        if "=" in line and line.split("=")[1].strip()[0].isdigit():
            value, _, source = line.partition("#")
            assert source.strip(), f"{name}: {value}"


def test_the_papers_are_there() -> None:
    beds = {"twinpilots-a10g", "lia-spr-a100", "lia-spr-h100", "lia-gnr-a100", "flexgen-t4", "hetegen-a10"}
    assert beds | {"server-h200", "laptop"} == set(known())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no table [device]"),
        ("about = 3\n" + GOOD.replace('about = "a machine"', ""), "about"),
        (GOOD.replace("memory_gb = 64", ""), "device.cpu has no memory_gb"),
        (GOOD.replace("memory_gb = 64", "memory_gb = -1"), "device.cpu.memory_gb must be a number from 0.1"),
        (GOOD.replace("memory_gb = 64", "memory_gb = nan"), "device.cpu.memory_gb must be a number"),
        (GOOD.replace("memory_gb = 64", "memory_gb = inf"), "device.cpu.memory_gb must be a number"),
        (GOOD.replace("memory_gb = 64", 'memory_gb = "64"'), "device.cpu.memory_gb must be a number"),
        (GOOD.replace("memory_gb = 64", "memory_gb = true"), "device.cpu.memory_gb must be a number"),
        (GOOD.replace("memory_gb", "memory_gib"), "did you mean memory_gb"),
        (GOOD.replace("bandwidth_gb_s = 50", "bandwidth_gb_s = 0"), "bandwidth_gb_s"),
        (GOOD.replace("launch_us = 5", "launch_us = 1e9"), "launch_us"),
        (GOOD.replace('"cores"', '"\\u001b[31m"'), "device.cpu has no name"),
        (GOOD + GPU, "a gpu and a link come together"),
        (GOOD + LINK, "a gpu and a link come together"),
        (GOOD + "[device.npu]\n", "unknown key npu"),
        (GOOD + "[network]\n", "unknown key network"),
        (GOOD + "[disk]\nsize_gb = 5\n", "disk has no read_gb_s"),
        ("device = 3\n", "there is no table [device]"),
        ('about = "x"\n[device]\ncpu = 3\n', "there is no table [device.cpu]"),
        ("about = ", "Invalid value"),
        (b"\xff\xfe", "not UTF-8"),
        ("#" * (1 << 17), "it may have"),
        ("x=" + "[" * 5000, "nested too deeply"),
        (".".join("a" * 30_000) + " = 1", "it may have"),  # tomllib would take many seconds
        (GOOD.replace("memory_gb = 64", "memory_gb = " + "9" * 5000), "too many digits"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(tmp_path: Path, text: str | bytes, said: str) -> None:
    assert said in read(tmp_path, text)


def test_places_without_a_machine(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="did you mean laptop"):
        open_machine("laptob")
    with pytest.raises(OptionError, match=r"no.toml: No such file"):
        open_machine(str(tmp_path / "no.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(OptionError, match="is a directory"):
        open_machine(str(tmp_path / "folder.toml"))


@given(st.text("ab.toml/~\0\n\u00e9\ud800", max_size=12))
def test_any_name_is_a_machine_or_refused(name: str) -> None:
    if name not in known():
        with pytest.raises(UserError):
            open_machine(name)
