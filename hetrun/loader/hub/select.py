"""Which files of a repository make the model that is wanted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from hetrun.errors import UserError, printable
from hetrun.loader.hub.names import RepositoryModel

# Where nothing is said: what llama.cpp and Ollama take, then what is about as large, then what is larger.
USUAL = (
    *("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS", "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0"),
    *("Q3_K_M", "BF16", "F16", "F32"),
)
TYPE = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d(?:_[0-9A-Z]+)*|TQ\d_\d|BF16|F16|F32|FP16|MXFP4(?:_MOE)?))(?=$|[-._/])",
    re.I,
)
PART = re.compile(r"-(\d{5})-of-(\d{5})$")
NO_MODEL = re.compile(r"(^|[-._/])(mmproj|imatrix)", re.I)
PROJECTOR = re.compile(r"(^|[-._/])mmproj(?=$|[-._/])(-model(?=[-._]))?", re.I)
TOWERS = ("F16", "FP16", "BF16", "Q8_0", "F32")  # types of vision towers, the best first
# Of a folder with safetensors: what our reader, or another program later, looks at.
BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
ALSO = re.compile(
    r"(special_tokens_map|added_tokens|vocab)\.json|merges\.txt|tokenizer\.model|chat_template\.(jinja|json)"
    r"|model\.safetensors\.index\.json|1_Pooling/config\.json|modules\.json"
)
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    """A file of a repository."""

    name: str
    size: int = 0
    sha256: str = ""  # of large ones the hub says it
    git_sha1: str = ""  # of all others

    @property
    def checksum(self) -> str:
        """What the hub says of its bytes, which is its name among the cache's blobs; "": nothing."""
        return self.sha256 or self.git_sha1


@dataclass(frozen=True, slots=True)
class SelectedFiles:
    """The files of one model; the first one, or the folder that it lies in, is what is opened."""

    files: tuple[RepositoryFile, ...]
    is_folder: bool = False
    tower: RepositoryFile | None = None  # its vision tower, in a file of its own

    @property
    def all_files(self) -> tuple[RepositoryFile, ...]:
        """The model's, and its vision tower's."""
        return self.files if self.tower is None else (*self.files, self.tower)

    @property
    def size(self) -> int:
        """Bytes of all."""
        return sum(file.size for file in self.all_files)


def ggufs(files: Iterable[RepositoryFile]) -> Mapping[str, SelectedFiles]:
    """The GGUF models by their names without an ending; those with missing parts are none."""
    found: dict[str, list[RepositoryFile]] = {}
    for file in sorted(files, key=lambda file: file.name):
        if file.name.lower().endswith(".gguf") and not NO_MODEL.search(file.name):
            found.setdefault(PART.sub("", file.name[: -len(".gguf")]), []).append(file)
    return {name: SelectedFiles(tuple(parts)) for name, parts in found.items() if _complete(parts)}


def projectors(files: Iterable[RepositoryFile], model: str) -> list[RepositoryFile]:
    """The vision towers (mmproj) among files, the best for a model of this name first: those whose names have
    the most in common with its, then by their types."""

    def rank(file: RepositoryFile) -> tuple[int, int, str]:
        kind = type_of(file.name[: -len(".gguf")])
        place = TOWERS.index(kind) if kind in TOWERS else len(TOWERS)
        return (-alike(file.name, model), place, file.name)

    named = (f for f in files if f.name.lower().endswith(".gguf") and PROJECTOR.search(f.name))
    return sorted(named, key=rank)


def alike(projector: str, model: str) -> int:
    """Letters that the names of a vision tower and of a model begin with in common; what says a file's type
    does not count."""
    one, other = (_plain(PROJECTOR.sub("-", name.rpartition("/")[2])) for name in (projector, model))
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def with_tower(chosen: SelectedFiles, files: Iterable[RepositoryFile]) -> SelectedFiles:
    """The same with the repository's vision tower that belongs to it: in its folder, or in one above."""
    name = chosen.files[0].name
    if chosen.is_folder:
        return chosen
    folder = name.rpartition("/")[0]
    above = (
        [""]
        if not folder
        else ["", *("/".join(folder.split("/")[:i]) for i in range(1, folder.count("/") + 2))]
    )
    for place in reversed(above):
        near = [file for file in files if file.name.rpartition("/")[0] == place]
        if found := projectors(near, name):
            return replace(chosen, tower=found[0])
    return chosen


def _plain(name: str) -> str:
    """A name without its ending, its type and marks between words."""
    bare = PART.sub("", name.lower().removesuffix(".gguf"))
    return re.sub(r"[-._ ]", "", TYPE.sub("", bare))


def _complete(parts: Sequence[RepositoryFile]) -> bool:
    numbers = [PART.search(file.name[: -len(".gguf")]) for file in parts]
    first = numbers[0]
    if first is None:
        return len(parts) == 1
    return [match and int(match[1]) for match in numbers] == list(range(1, int(first[2]) + 1))


def folder(files: Iterable[RepositoryFile]) -> SelectedFiles | None:
    """A model in safetensors."""
    named = {file.name: file for file in files}
    weights = [file for name, file in sorted(named.items()) if WEIGHTS.fullmatch(name)]
    if not weights or "config.json" not in named:
        return None
    beside = [named[name] for name in BESIDE if name in named]
    return SelectedFiles(
        (*beside, *(f for name, f in sorted(named.items()) if ALSO.fullmatch(name)), *weights), True
    )


def type_of(name: str) -> str:
    """What a file's name says of its weights' type; the last word of that kind counts."""
    found = TYPE.findall(PART.sub("", name))
    return str(found[-1]).upper() if found else ""


def choose(files: Sequence[RepositoryFile], wanted: RepositoryModel) -> SelectedFiles:
    """The model that is wanted. UserError says which there are."""
    models = ggufs(files)
    if not wanted.which:
        found = usual(models) or folder(files)
        if found is None:
            raise UserError(f"{wanted.name} has no model that hetrun reads: no .gguf file, no safetensors")
        return found
    which = wanted.which.lower()
    for name, chosen in models.items():
        if which in (name.lower(), f"{name}.gguf".lower(), *(file.name.lower() for file in chosen.files)):
            return chosen
    fitting = [name for name in models if type_of(name).lower() == which or _has_word(name, which)]
    if not fitting:
        there = ", ".join(dict.fromkeys(type_of(name) or name for name in models)) or "no GGUF file at all"
        raise UserError(
            f"{printable(wanted.name)}: there is no {printable(wanted.which)}; it has {printable(there)}"
        )
    return models[min(fitting, key=lambda name: (len(name), name))]


def _has_word(name: str, which: str) -> bool:
    return re.search(rf"(^|[-._/]){re.escape(which)}($|[-._/])", name, re.I) is not None


def usual(models: Mapping[str, SelectedFiles]) -> SelectedFiles | None:
    """Of several the one that most would take."""

    def rank(name: str) -> tuple[int, int, str]:
        kind = type_of(name)
        return (USUAL.index(kind) if kind in USUAL else len(USUAL), len(name), name)

    return models[min(models, key=rank)] if models else None
