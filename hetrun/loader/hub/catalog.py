"""The models on this machine as a server offers them: by the names that `hetrun list` shows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from hetrun.client.model_catalog import CatalogModel, name_of
from hetrun.errors import UserError
from hetrun.loader.hub.names import is_on_the_hub, wanted
from hetrun.loader.hub.resolve import by_name, cached
from hetrun.loader.hub.select import RepositoryFile, ggufs
from hetrun.loader.hub.stores import StoredModel, available


class StoredModels:
    """All models of all stores, and the demonstration model (`ModelCatalog`)."""

    def __init__(self, warn: Callable[[str], object] = lambda text: None) -> None:
        self._models: list[StoredModel] = available(warn)

    def scan(self) -> Mapping[str, CatalogModel]:
        """The models by name. Of two with the same name, the first one counts, as in `hetrun list`."""
        self._models = available()
        return self.found()

    def found(self) -> Mapping[str, CatalogModel]:
        """The models of the last scan."""
        found: dict[str, CatalogModel] = {}
        for model in self._models:
            found.setdefault(model.name, CatalogModel(model.name, model.path, model.size))
        return found

    def named(self, name: str) -> str | None:
        """The only model that `run -m` takes by this name, without downloading anything."""
        if is_on_the_hub(name):
            return self._of_hub(name)
        found = {model.name for model in by_name(name, self._models)}
        return found.pop() if len(found) == 1 else None

    def _of_hub(self, name: str) -> str | None:
        try:
            path = cached(wanted(name))
        except UserError:
            return None
        return next((model.name for model in self._models if model.path == path), None)


def name_in_list(path: Path) -> str:
    """The name that `hetrun list` has for a model; that of the file or folder if it is not listed."""
    real = os.path.realpath(path)
    listed = (model.name for model in available() if os.path.realpath(model.path) == real)
    return next(listed, "") or name_of(_file_in(path) or path)


def _file_in(folder: Path) -> Path | None:
    """The only GGUF model of a folder, which may stand for it."""
    try:
        files = [RepositoryFile(path.name) for path in folder.iterdir() if path.is_file()]
    except OSError:
        return None
    if any(file.name == "config.json" for file in files):
        return None
    found = list(ggufs(files).values())
    return folder / found[0].files[0].name if len(found) == 1 else None
