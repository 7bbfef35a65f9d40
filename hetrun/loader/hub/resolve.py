"""A path for any name that a model may be asked for by."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from hetrun.config import INSTALL_DEMO
from hetrun.errors import UserError, printable
from hetrun.loader.hub.cache import files_of, snapshot
from hetrun.loader.hub.download import Progress, fetch, not_here, offline
from hetrun.loader.hub.names import REPOSITORY, RepositoryModel, is_on_the_hub, wanted
from hetrun.loader.hub.nearby import models_beside
from hetrun.loader.hub.select import choose
from hetrun.loader.hub.stores import DEMO, LATEST, OLLAMA, StoredModel, available, is_whole
from hetrun.system import entry_points

MOST_NAMED = 5
SAME, BEGUN, ALIKE = 3, 2, 1  # how close two names are
LEAST_BEGUN = 4  # letters of a name of which a word is the beginning
CLOSE, SLIP = 0.65, 0.8  # how alike they are if one may be meant by the other, or hardly another can be
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*:/{1,2}", re.IGNORECASE)


def find(
    name: str,
    allowed: bool = True,
    progress: Progress = lambda done, whole, what: None,
    pictures: bool = True,
) -> Path:
    """The file or folder. A path that exists goes before any name; what is only on the hub is brought, if
    that is `allowed`, with its vision tower if `pictures` are wanted."""
    path = Path(name).expanduser()
    if os.path.exists(path):  # which says no to what cannot be a path, too
        return path
    if is_on_the_hub(name):
        return on_the_hub(wanted(name), allowed and not offline(), progress, pictures)
    scheme, colon, rest = name.partition(":")
    if colon and (point := entry_points.find("stores", scheme)):
        return _in_store(point, rest, allowed and not offline(), progress)
    if ADDRESS.match(name):
        raise UserError(
            f"{printable(name)} is an address, and hetrun downloads from Hugging Face's hub only "
            "(hf:user/repo): download the file, and give its path"
        )
    models = available()
    found = by_name(name, models)
    if len(found) == 1:
        return found[0].path
    if found:
        raise UserError(f"{printable(name)} could be {_listed(found)}: choose one of them")
    raise UserError(f"{printable(str(path))} does not exist; {_hint(name, models)}")


def by_name(name: str, models: Sequence[StoredModel]) -> list[StoredModel]:
    """The models that are meant by a name: the one that has it, else those that may be called so."""
    found = [model for model in models if name == model.name]
    return found or [model for model in models if name in _names(model)]


class NameResolver(Protocol):
    """A package's way from a name to a file or folder: what stands behind `scheme:`."""

    def __call__(self, name: str, allowed: bool, progress: Progress) -> Path:
        """The path, brought here first if that is `allowed`; UserError says why there is none."""
        ...


def _in_store(point: entry_points.PluginPoint, name: str, allowed: bool, progress: Progress) -> Path:
    store, whose = cast(NameResolver, entry_points.load(point)), f"the store {point.name} of {point.whose}"
    with entry_points.blamed(lambda e: UserError(f"{whose} fails: {entry_points.in_words(e)}")):
        found = Path(store(name, allowed, progress))
    if not os.path.exists(found):
        raise UserError(f"{whose} says {found}, which does not exist")
    return found


def on_the_hub(which: RepositoryModel, allowed: bool, progress: Progress, pictures: bool = True) -> Path:
    """From the cache, where it is complete; else from the hub."""
    if path := cached(which):
        return path
    if not allowed:
        raise not_here(which)
    return fetch(which, progress, pictures)[0]


def cached(which: RepositoryModel) -> Path | None:
    """The file or folder in the cache, if all of it is there."""
    if (folder := snapshot(which)) is None:
        return None
    files = files_of(folder)
    try:
        chosen = choose(files, which)
    except UserError:
        return None
    if not chosen.is_folder:
        return folder / chosen.files[0].name
    return folder if is_whole(folder, files) else None


def _names(model: StoredModel) -> Sequence[str]:
    """What a model may be called: by its name, without its store, without :latest, and as its file is."""
    _, colon, bare = model.name.partition(":")
    names = [model.name, bare if colon else model.name, model.path.stem, model.path.name]
    if model.name.startswith(OLLAMA):
        names += [name.removesuffix(LATEST) for name in names[:2]]
    if model.name == DEMO:
        names += ["demo", "SmolLM2-135M-Instruct"]
    return names


def _listed(models: Sequence[StoredModel]) -> str:
    names = [printable(model.name) for model in models[:MOST_NAMED]]
    more = f", or {len(models) - MOST_NAMED} others" if len(models) > MOST_NAMED else ""
    return ", ".join(names) + more


def _hint(name: str, models: Sequence[StoredModel]) -> str:
    if near := _near(name, models):
        return f"did you mean {' or '.join(printable(model) for model in near)}?"
    if name in (DEMO, "demo"):
        return f"it is the demonstration model: {INSTALL_DEMO}"
    if REPOSITORY.fullmatch(name):
        return f"from Hugging Face's hub: hf:{name}"
    if name.startswith(OLLAMA):
        return f"ollama pull {printable(name.removeprefix(OLLAMA))} brings it; hetrun list shows what is here"
    return (
        "give a .gguf file, a folder with safetensors, hf:user/repo (which is downloaded), or a name that "
        "hetrun list shows"
    )


def _near(name: str, models: Sequence[StoredModel]) -> list[str]:
    """The names of models of which this one may be the beginning, or a slip in it; files and folders that lie
    where this one was looked for are among them."""
    bare = name.removeprefix(OLLAMA)  # which all of its names have in common
    known = {model.name: model.name for model in models}  # these go before what else a model is called
    for model in models:
        for called in _names(model):
            known.setdefault(called, model.name)
    found = _closest(
        bare, {called: model for called, model in known.items() if not called.startswith(OLLAMA)}
    )
    if bare == name:
        found += _closest(os.path.basename(name.rstrip("/")), models_beside(name))
    best = max((how for how, _ in found), default=0)
    return sorted({model for how, model in found if how == best})[:2]


def is_slip(word: str, models: Sequence[StoredModel], begun: bool) -> bool:
    """Whether a word can hardly be anything but a slip in a model's name, or (`begun`) the beginning of one;
    files and folders here are among them."""
    from difflib import get_close_matches  # on use: 4 ms

    names = {_bare(name) for model in models for name in _names(model)}
    names |= {_bare(name) for name in models_beside(word)}
    if (word := _bare(word)) in names:
        return False
    if begun and len(word) >= LEAST_BEGUN and any(name.startswith(word) for name in names):
        return True
    return bool(get_close_matches(word, names, n=1, cutoff=SLIP))


def _closest(word: str, known: Mapping[str, str]) -> list[tuple[int, str]]:
    """What a word may mean of what is called so, and how close it is. Endings and capitals do not count: with
    them, all names of files would look alike."""
    from difflib import get_close_matches  # on use: 4 ms

    bare: dict[str, str] = {}
    for called, model in known.items():
        bare.setdefault(_bare(called), model)
    if (word := _bare(word)) in bare:
        return [(SAME, bare[word])]
    begun = {model for called, model in bare.items() if called.startswith((f"{word}:", f"{word}-"))}
    if word and begun:
        return [(BEGUN, model) for model in begun]
    return [(ALIKE, bare[called]) for called in get_close_matches(word, bare, n=1, cutoff=CLOSE)]


def _bare(name: str) -> str:
    return name.lower().removesuffix(".gguf").removesuffix(".safetensors")
