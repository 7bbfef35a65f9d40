"""The vision tower of a model: beside it, where Ollama keeps it, or where --mmproj says.

Files that other programs put beside models are called mmproj-something.gguf. Several may lie there, of
several models: their headers say which one fits, and of those that fit the name and the type decide.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from hetrun.errors import ModelFileError, OptionError, printable
from hetrun.loader.architectures import builds
from hetrun.loader.gguf_source import GGUFModel
from hetrun.loader.hf_mapping import SEES
from hetrun.loader.hub.select import RepositoryFile, alike, projectors
from hetrun.loader.hub.stores import ollama_projector
from hetrun.loader.source import ModelSource
from hetrun.loader.vision import FAMILIES, NoVision, Vision, read_vision, why_not

NONE = "none"  # for --mmproj
TEXTS = "the model reads texts, and no pictures"
MOST_ENTRIES, MOST_READ = 10_000, 16  # of a folder that are looked at, and headers that are read
LEAST_ALIKE = 6  # letters in common where a file's kind says little about what it belongs to
COMMON = "llama"  # an architecture of models of all kinds
SNAPSHOTS = "snapshots"  # the folder of Hugging Face's cache in which a repository's files lie


def find_vision(source: ModelSource, asked: str | None = None) -> Vision | NoVision:
    """What a model reads pictures with. `asked`: a file, "none", or None for what lies there.

    A file that is asked for must fit; what is only found must not keep the model from running.
    """
    if asked and asked != NONE:
        return _asked_for(source, asked)
    if not may_see(source):
        return NoVision(TEXTS, usual=True)
    if asked == NONE:
        return NoVision("--mmproj none: pictures are left out")
    reasons: list[str] = []
    for path in _beside(source):
        try:
            vision = read_vision(path)
        except (ModelFileError, OSError) as error:
            reasons.append(str(error))
            continue
        if not (reason := _misfit(source, vision)):
            return vision
        reasons.append(f"{printable(str(path))}: {reason}")
    if source.architecture == COMMON and not reasons:
        return NoVision(TEXTS, usual=True)
    return NoVision(_without(source, reasons))


def may_see(source: ModelSource) -> bool:
    """Whether models of this kind may have a vision tower, and hetrun runs their text itself."""
    return any(source.architecture in kind.texts for kind in FAMILIES.values()) and builds(source)


def _asked_for(source: ModelSource, asked: str) -> Vision:
    path = Path(asked).expanduser()
    if not os.path.isfile(path):
        raise OptionError(f"--mmproj {printable(asked)}: there is no such file")
    vision = read_vision(path)
    if not builds(source):
        raise OptionError(
            f"--mmproj: llama.cpp runs models of {printable(source.architecture)} as a whole here, and they "
            "read texts only"
        )
    if reason := _misfit(source, vision):
        raise OptionError(
            f"--mmproj {printable(asked)} does not belong to {printable(source.name)}: {reason}"
        )
    return vision


def _misfit(source: ModelSource, vision: Vision) -> str:
    width = source.require_int("embedding_length", 1, 1 << 24)
    return why_not(vision, source.architecture, width, source.get_int("n_deepstack_layers", 0, 0, 1 << 10))


def _without(source: ModelSource, reasons: Sequence[str]) -> str:
    """Why nothing was found, and what to do."""
    if reasons:
        more = f" (and {len(reasons) - 1} more files)" if len(reasons) > 1 else ""
        return f"no vision tower fits: {reasons[0]}{more}"
    if isinstance(source, GGUFModel) and any(name.startswith("v.blk.") for name in source.file.tensors):
        return (
            "its vision tower is inside the model's own file, as Ollama writes some models, where hetrun "
            "cannot use it: get the model with an mmproj file, or name one with --mmproj FILE"
        )
    if source.get_bool(SEES, False):
        return (
            "its vision tower is in the safetensors files, where hetrun cannot use it: put the mmproj file "
            "(GGUF) of this model into the folder, or name it with --mmproj FILE"
        )
    return (
        "there is no mmproj file beside the model: put the one of this model into its folder, or name it "
        "with --mmproj FILE; hetrun pull brings it for models of the hub"
    )


# --- where they lie


def _beside(source: ModelSource) -> Iterator[Path]:
    """The files that may belong to a model, the best first."""
    model = Path(source.path)
    if (kept := ollama_projector(model)) is not None:
        yield kept
    common = source.architecture == COMMON
    seen: set[Path] = set()
    for folder in _folders(model):
        found = projectors(_files(folder), model.stem)
        for file in islice(found, MOST_READ):
            path = folder / file.name
            if path not in seen and not (common and alike(file.name, model.stem) < LEAST_ALIKE):
                seen.add(path)
                yield path


def _folders(model: Path) -> Iterator[Path]:
    """The model's own; of a repository in the cache also those above, up to where it begins."""
    folder = model if os.path.isdir(model) else model.parent
    yield folder
    parts = folder.parts
    if SNAPSHOTS in parts[:-1]:
        begin = len(parts) - parts[::-1].index(SNAPSHOTS)  # after which the revision stands
        while len(folder.parts) > begin + 1:
            folder = folder.parent
            yield folder


def _files(folder: Path) -> Iterable[RepositoryFile]:
    try:
        with os.scandir(folder) as entries:
            return [RepositoryFile(e.name) for e in islice(entries, MOST_ENTRIES) if e.is_file()]
    except OSError:
        return []
