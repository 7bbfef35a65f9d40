"""GGUF's two ways to hold the matrices of a layer's experts: all in one tensor, or each in one of its own."""

from __future__ import annotations

import re

PARTS = ("gate", "up", "down")  # in the order in which a pass needs them
_WHOLE = re.compile(r"(blk\.\d+)\.ffn_(gate|up|down)_exps\.weight")
_SINGLE = re.compile(r"(blk\.\d+)\.ffn_(gate|up|down)\.(0|[1-9]\d{0,5})\.weight", re.ASCII)


def of_all(name: str) -> tuple[str, str] | None:
    """The layer and the part, where a tensor holds a matrix of each expert."""
    found = _WHOLE.fullmatch(name)
    return (found[1], found[2]) if found else None


def of_one(name: str) -> tuple[str, str, int] | None:
    """The layer, the part and the expert's number, where a tensor is the matrix of one expert."""
    found = _SINGLE.fullmatch(name)
    return (found[1], found[2], int(found[3])) if found else None


def whole(layer: str, part: str) -> str:
    """What a tensor with the matrices of all experts is called."""
    return f"{layer}.ffn_{part}_exps.weight"


def single(layer: str, part: str, number: int) -> str:
    """What a tensor with the matrix of one expert is called."""
    return f"{layer}.ffn_{part}.{number}.weight"
