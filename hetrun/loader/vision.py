"""What a model reads pictures with: the file of its vision tower (mmproj), known before anything is loaded.

The header comes from strangers: it is read by our own reader, and what is computed with is checked here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from hetrun.errors import ModelFileError
from hetrun.graph.quant import QUANTS
from hetrun.loader.formats.gguf import GGUFFile, read_gguf
from hetrun.loader.formats.gguf_file import shown
from hetrun.system.file_identity import Stamp

ARCHITECTURE = "clip"  # as GGUF names what sees
MOST_LAYERS, MOST_WIDTH, MOST_HEADS = 1024, 1 << 16, 1 << 10
MOST_PATCH, MOST_SIDE, MOST_MERGE = 64, 1 << 13, 8
_V = "clip.vision."
_PLACES, _LINE_END = "v.position_embd.weight", "v.token_embd.img_break"


class Tower(NamedTuple):
    """The numbers of a vision tower that its memory and its rows follow from."""

    layers: int
    width: int
    ffn: int
    patch: int  # pixels of a patch's side
    merge: int  # patches of a row's side
    side: int  # of pictures, in pixels, where all get the same size; 0: they keep theirs, about
    least_rows: int  # of a picture
    most_rows: int
    gated: bool  # three products in the second half of a layer, and not two

    @property
    def grain(self) -> int:
        """Pixels of the side of what becomes a row."""
        return self.patch * self.merge


@dataclass(frozen=True, slots=True)
class Vision:
    """A vision tower in a file of its own (mmproj), as its checked header describes it."""

    path: str
    stamp: Stamp
    family: str  # the projector, by the format's name: "qwen3vl_merger"
    nbytes: int  # of its weights
    width: int  # of a row that it makes: the text model's, times (1 + deepstack)
    deepstack: int  # further blocks of a row, one for each of the text's first layers
    spatial: bool  # rows have places in height and width (M-RoPE)
    whole: bool  # the rows of a picture see each other (not causal)
    tower: Tower
    line_end: int = 0  # where the file has the row, float32, that ends each line but the last; 0: none does


class NoVision(NamedTuple):
    """Why a model reads no pictures."""

    reason: str
    usual: bool = False  # models of its kind read none


class _Family(NamedTuple):
    """What is known of one kind of projector."""

    texts: tuple[str, ...]  # architectures of text models that it belongs to
    last: str  # the tensor that makes rows of the text model's width
    rows: tuple[int, int]  # the fewest and the most of a picture; (0, 0): all pictures get one size
    merge: tuple[str, int]  # the key, and what holds without it
    spatial: bool = False
    whole: Callable[[int], bool] = lambda width: False
    last_has: int = 0  # which of its dimensions that width is, as numpy counts
    merged: bool = False  # there are no layers: a patch of the graph is what becomes a row
    lines: bool = False  # each line of rows but the last ends with one that is always the same
    looked_up: bool = False  # the places of patches are rows of a table: it must have one for each


_SMALL_GEMMA4 = (1536, 2560)  # widths of E2B and E4B, which were trained with causal pictures
_MERGE, _SCALE = _V + "spatial_merge_size", _V + "projector.scale_factor"
FAMILIES = {
    "qwen3vl_merger": _Family(
        ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"), "mm.2.bias", (8, 4096), (_MERGE, 2), spatial=True
    ),
    "gemma3": _Family(
        ("gemma3",), "mm.input_projection.weight", (0, 0), (_SCALE, 4), whole=lambda width: True, last_has=1
    ),
    "gemma4v": _Family(
        ("gemma4",),
        "mm.input_projection.weight",
        (70, 1120),
        (_SCALE, 3),
        whole=lambda width: width not in _SMALL_GEMMA4,
        looked_up=True,
    ),
    "gemma4uv": _Family(
        ("gemma4",),
        "mm.input_projection.weight",
        (70, 1120),
        (_SCALE, 3),
        whole=lambda width: True,
        merged=True,
        looked_up=True,
    ),
    "pixtral": _Family(("mistral3", "llama"), "mm.2.weight", (8, 1024), (_MERGE, 1), lines=True),
}


def read_vision(path: str | os.PathLike[str]) -> Vision:
    """What an mmproj file says of itself; ModelFileError says why it is of no use."""
    file = read_gguf(path)
    if len(file.stamps) != 1:
        raise ModelFileError(file.path, "it is split into parts; a vision tower must be one file")
    if (found := file.get_str("general.architecture", "")) != ARCHITECTURE:
        raise ModelFileError(file.path, f"it is no vision tower (mmproj), but a model of {shown(found)}")
    return _described(file, _projector(file))


def _projector(file: GGUFFile) -> str:
    """The kind of projector from pictures to the text model's rows."""
    if not file.get_bool("clip.has_vision_encoder", False):
        heard = file.get_bool("clip.has_audio_encoder", False)
        what = "it encodes sound, and no pictures" if heard else "it has no vision encoder"
        raise ModelFileError(file.path, f"{what}: get the mmproj file of a model that reads pictures")
    name = file.get_str("clip.projector_type", "") or file.get_str(_V + "projector_type", "")
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ModelFileError(
            file.path, f"its projector is {shown(name)}, which hetrun does not know; it knows {known}"
        )
    return name


def _described(file: GGUFFile, name: str) -> Vision:
    kind = FAMILIES[name]
    tower = _tower(file, kind)
    if kind.looked_up:
        _check_table(file, tower)
    tensor = file.tensors.get(kind.last)
    if tensor is None:
        raise ModelFileError(file.path, f"tensor {kind.last!r} is missing: convert the model again")
    width = tensor.shape[kind.last_has] if len(tensor.shape) > kind.last_has else 0
    if not 1 <= width <= MOST_WIDTH:
        raise ModelFileError(file.path, f"tensor {kind.last!r} has the shape {tensor.shape}")
    deepstack = sum(f"v.deepstack.{i}.fc1.weight" in file.tensors for i in range(tower.layers))
    ((path, stamp),) = file.stamps.items()
    nbytes = sum(t.nbytes for t in file.tensors.values())
    row = width * (1 + deepstack)
    line_end = _line_end(file, width) if kind.lines else 0
    whole = kind.whole(width)
    return Vision(path, stamp, name, nbytes, row, deepstack, kind.spatial, whole, tower, line_end)


def _line_end(file: GGUFFile, width: int) -> int:
    tensor = file.tensors.get(_LINE_END)
    if tensor is None or tensor.shape != (width,) or tensor.quant != QUANTS["F32"]:
        raise ModelFileError(file.path, f"tensor {_LINE_END!r} is not there as {width} float32 numbers")
    return tensor.offset


def _check_table(file: GGUFFile, tower: Tower) -> None:
    """llama.cpp ends the process where a picture's side has more patches than the table has rows."""
    table, most = file.tensors.get(_PLACES), tower.most_rows * tower.merge
    if table is None or len(table.shape) != 3 or table.shape[0] != 2 or table.shape[1] < most:
        shape = "missing" if table is None else f"of the shape {table.shape}"
        raise ModelFileError(
            file.path, f"tensor {_PLACES!r} is {shape}; it must have 2 tables of {most} rows or more"
        )


def _tower(file: GGUFFile, kind: _Family) -> Tower:
    least = 0 if kind.merged else 1  # without layers there are no heads
    heads = file.require_int(_V + "attention.head_count", least, MOST_HEADS)
    width = file.require_int(_V + "embedding_length", 1, MOST_WIDTH)
    if width % max(1, heads):
        raise ModelFileError(file.path, f"its {width} columns are not {heads} heads of equal size")
    patch = file.require_int(_V + "patch_size", 1, MOST_PATCH)
    merge = file.get_int(kind.merge[0], kind.merge[1], 1, MOST_MERGE)
    side = file.require_int(_V + "image_size", 0, MOST_SIDE)
    layers = file.require_int(_V + "block_count", least, MOST_LAYERS)
    ffn = file.require_int(_V + "feed_forward_length", 0, 1 << 20)
    if kind.merged:
        patch, merge = patch * merge, 1
    least, most = kind.rows
    gated = "v.blk.0.ffn_gate.weight" in file.tensors
    if most:
        return Tower(layers, width, ffn, patch, merge, 0, least, most, gated)
    if side % (patch * merge) or not side:
        raise ModelFileError(
            file.path, f"pictures of {side} pixels are not whole rows of {patch * merge} pixels"
        )
    table, patches = file.tensors.get(_PLACES), (side // patch) ** 2
    if table is None or table.shape[0] != patches:  # the file's size bounds what a picture takes
        found = "missing" if table is None else f"of the shape {table.shape}"
        raise ModelFileError(file.path, f"tensor {_PLACES!r} is {found}; it must have {patches} rows")
    rows = (side // (patch * merge)) ** 2
    return Tower(layers, width, ffn, patch, merge, side, rows, rows, gated)


def why_not(vision: Vision, architecture: str, width: int, deepstack: int) -> str:
    """Why a tower does not belong to a text model of this kind, width and number of deepstack layers; empty
    where it does."""
    kind = FAMILIES[vision.family]
    if architecture not in kind.texts:
        return (
            f"its projector {vision.family} belongs to {' or '.join(kind.texts)}, and not to {architecture}"
        )
    if (own := vision.width // (1 + vision.deepstack)) != width:
        return f"its rows have {own} columns, and the model's {width}"
    if vision.deepstack != deepstack:
        return f"it has {vision.deepstack} deepstack layers, and the model {deepstack}"
    return ""
