"""What leaves the device."""

from __future__ import annotations

from dataclasses import dataclass

from hetrun.backend import Floats
from hetrun.backends.cuda.driver import Address
from hetrun.graph import Value


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """A value that leaves the device: where it is made, and where it lands."""

    value: Value
    address: Address
    array: Floats
