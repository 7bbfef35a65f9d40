"""Machines as TOML files: those that come with hetrun, by name, and anybody's, by path.

    about = "one sentence"

    [device.cpu]             # "cpu" and, where there is one, "gpu"
    name = "Xeon 8460H"
    memory_gb = 512          # 10^9 bytes
    bandwidth_gb_s = 246     # of its memory
    bf16_tflops = 20         # products of many tokens; float16 counts as well
    int8_tops = 40           # optional: for weights in blocks (Q4_0, ...)
    half_tokens = 16         # with this many tokens, products reach half of that
    vector_tflops = 4        # what products of one token reach, were memory no limit
    launch_us = 3            # for each op

    [link]                   # between cpu and gpu
    bandwidth_gb_s = 25
    latency_us = 10          # until a copy has begun

    [disk]                   # optional: where weights lie that no memory holds
    size_gb = 1500
    read_gb_s = 2

Every number is given in the unit that its name says. Nothing else may stand in a file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import cast

from hetrun import option_types
from hetrun.errors import OptionError
from hetrun.system.files import read_text
from hetrun.tools.simulate.machine import (
    Kind,
    SimulatedDevice,
    SimulatedDisk,
    SimulatedLink,
    SimulatedMachine,
)

BEDS = Path(__file__).with_name("beds")
MOST_FILE = 1 << 13  # bytes; tomllib needs time by the square of a key's dots: more would take seconds
GB, TERA, MICRO = 1e9, 1e12, 1e-6

# name -> unit, least and most that is believed, in the file's own unit
Numbers = Mapping[str, tuple[float, float, float]]
DEVICE: Numbers = {
    "memory_gb": (GB, 0.1, 1e5),
    "bandwidth_gb_s": (GB, 0.1, 1e5),
    "bf16_tflops": (TERA, 1e-3, 1e5),
    "int8_tops": (TERA, 1e-3, 1e5),
    "half_tokens": (1, 0, 1e4),
    "vector_tflops": (TERA, 1e-3, 1e4),
    "launch_us": (MICRO, 0, 1e5),
}
LINK: Numbers = {"bandwidth_gb_s": (GB, 1e-3, 1e4), "latency_us": (MICRO, 0, 1e6)}
DISK: Numbers = {"size_gb": (GB, 0.1, 1e7), "read_gb_s": (GB, 1e-4, 1e3)}
OPTIONAL = {"int8_tops"}


@cache
def known() -> tuple[str, ...]:
    """The machines that come with hetrun."""
    return tuple(sorted(path.stem for path in BEDS.glob("*.toml")))


def open_machine(named: str) -> SimulatedMachine:
    """A machine by the name it has here, or by the path of its file."""
    if named in known():
        return read_machine(BEDS / f"{named}.toml")
    try:
        path = Path(named).expanduser()
    except (RuntimeError, ValueError):  # the home of an unknown user
        path = Path(named)
    if path.suffix != ".toml":
        problem = option_types.unknown("machine", named, known())
        raise OptionError(f"{problem}; the path of a file ends with .toml")
    return read_machine(path)


def read_machine(path: Path) -> SimulatedMachine:
    """A machine's file, refused with one sentence where it says what cannot be."""
    try:
        table = tomllib.loads(read_text(path, MOST_FILE))
    except RecursionError:
        raise OptionError(f"{path}: its values are nested too deeply") from None
    except ValueError as error:
        reason = "a number has too many digits" if "set_int_max_str_digits" in str(error) else error
        raise OptionError(f"{path}: {reason}") from None
    return MachineReader(str(path)).machine(path.stem, table)


class MachineReader:
    """Reads the tables of one file; it is named in each refusal."""

    def __init__(self, path: str) -> None:
        self.path = path

    def machine(self, name: str, table: Mapping[str, object]) -> SimulatedMachine:
        """The whole file."""
        self._only(table, ("about", "device", "link", "disk"), "the file")
        devices = self._table(table, "device")
        self._only(devices, ("cpu", "gpu"), "device")
        link = self._numbers(self._table(table, "link"), LINK, "link") if "link" in table else None
        disk = self._numbers(self._table(table, "disk"), DISK, "disk") if "disk" in table else None
        if ("gpu" in devices) != (link is not None):
            raise self._refuse("a gpu and a link come together: give both or neither")
        return SimulatedMachine(
            name=name,
            about=self._text(table, "about", "the file"),
            cpu=self._device(devices, "cpu"),
            gpu=self._device(devices, "gpu") if "gpu" in devices else None,
            link=SimulatedLink(link["bandwidth_gb_s"], link["latency_us"]) if link else None,
            disk=SimulatedDisk(int(disk["size_gb"]), disk["read_gb_s"]) if disk else None,
        )

    def _device(self, devices: Mapping[str, object], kind: str) -> SimulatedDevice:
        where = f"device.{kind}"
        table = dict(self._table(devices, kind, where))
        name = self._text(table, "name", where)
        del table["name"]
        n = self._numbers(table, DEVICE, where)
        return SimulatedDevice(
            name=name,
            kind=cast(Kind, kind),
            memory=int(n["memory_gb"]),
            bandwidth=n["bandwidth_gb_s"],
            bf16=n["bf16_tflops"],
            int8=n.get("int8_tops", 0.0),
            half_tokens=n["half_tokens"],
            vector=n["vector_tflops"],
            launch=n["launch_us"],
        )

    def _numbers(self, table: Mapping[str, object], rows: Numbers, where: str) -> dict[str, float]:
        """Every number of a table, in bytes, seconds and operations."""
        self._only(table, rows, where)
        found = {}
        for key, (unit, least, most) in rows.items():
            if key not in table:
                if key in OPTIONAL:
                    continue
                raise self._refuse(f"{where} has no {key}")
            value = table[key]
            good = isinstance(value, int | float) and not isinstance(value, bool)
            if not good or not least <= cast(float, value) <= most:
                raise self._refuse(f"{where}.{key} must be a number from {least:g} to {most:g}")
            found[key] = cast(float, value) * unit
        return found

    def _table(self, table: Mapping[str, object], key: str, where: str = "") -> Mapping[str, object]:
        found = table.get(key)
        if not isinstance(found, dict):
            raise self._refuse(f"there is no table [{where or key}]")
        return found

    def _text(self, table: Mapping[str, object], key: str, where: str) -> str:
        found = table.get(key)
        if not isinstance(found, str) or not found.isprintable() or not 0 < len(found) <= 200:
            raise self._refuse(f"{where} has no {key}, a line of up to 200 characters")
        return found

    def _only(
        self, table: Mapping[str, object], keys: Mapping[str, object] | tuple[str, ...], where: str
    ) -> None:
        for key in table:
            if key not in keys:
                raise self._refuse(f"in {where}, {option_types.unknown('key', key, keys)}")

    def _refuse(self, reason: str) -> OptionError:
        return OptionError(f"{self.path}: {reason}")
