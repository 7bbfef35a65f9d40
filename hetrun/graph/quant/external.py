"""Types that hetrun knows by size only: a service that packages register turns their blocks into floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from hetrun.errors import BackendUnavailable
from hetrun.graph.quant.blocks import Bytes, Floats
from hetrun.system import entry_points

Dequantiser = Callable[[int, Bytes, Floats], None]  # ggml's number of the type, blocks, where the floats go


def provided() -> Dequantiser | None:
    """The service; for other types, too, it is faster than numpy. It may refuse."""
    return cast("Dequantiser | None", entry_points.named("services", "dequantise"))


def unpacker(name: str, ggml_id: int) -> Callable[[Bytes, Floats], None]:
    """The function that unpacks a type through the service."""

    def unpack(blocks: Bytes, out: Floats) -> None:
        try:
            if (dequantise := provided()) is None:
                raise BackendUnavailable("nothing provides hetrun.services:dequantise; reinstall hetrun")
            dequantise(ggml_id, blocks, out)
        except BackendUnavailable as e:
            raise BackendUnavailable(f"weights of type {name} are read by ggml's own routine: {e}") from e

    return unpack
