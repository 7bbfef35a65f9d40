"""`hetrun pull`, `list`, `rm`; and a model that a command names, brought here if it is not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from hetrun.cli.output import in_json, say
from hetrun.config import Settings
from hetrun.errors import UserError, printable
from hetrun.loader.hub.download import Progress, fetch, not_here, offline
from hetrun.loader.hub.names import wanted
from hetrun.loader.hub.nearby import gguf_files
from hetrun.loader.hub.remove import removal, remove
from hetrun.loader.hub.resolve import find
from hetrun.loader.hub.stores import DEMO, StoredModel, available
from hetrun.system.terminal_text import align_columns, visible
from hetrun.system.units import format_bytes

MOST_NAMED = 3  # files of a folder


def pull(name: str, forbidden: bool, as_json: bool, pictures: bool = True) -> None:
    """Bring a model here and say where it is."""
    which = wanted(name)
    if forbidden or offline():
        raise not_here(which)
    with fetching() as progress:
        path, chosen = fetch(which, progress, pictures)
    if as_json:
        files = [file.name for file in chosen.all_files]
        print(in_json({"name": which.name, "path": str(path), "size": chosen.size, "files": files}, indent=1))
        return
    print(visible(str(path)))
    if sys.stderr.isatty():
        say(f'{format_bytes(chosen.size)}; hetrun run {which.name} "a prompt" uses it')


def print_list(as_json: bool) -> None:
    """The models on this machine."""
    models = available(warn=say)
    if as_json:
        print(in_json([asdict(model) | {"path": str(model.path)} for model in models], indent=1))
        return
    rows = [
        (visible(model.name), format_bytes(model.size), visible(model.kind), model.store) for model in models
    ]
    for line in align_columns(rows, left={0, 2, 3}, least=(0, 8, 8)):
        print(line)
    if not models:
        say("there are no models here yet; hetrun pull user/repo downloads one from Hugging Face's hub")
    elif sys.stderr.isatty():
        say(
            f'hetrun run {visible(models[0].name)} "a prompt" uses one; without a name it is {default_name()}'
        )
    if sys.stderr.isatty() and (others := files_besides(models)):
        say(others)


def files_besides(models: Sequence[StoredModel]) -> str:
    """How to run the files of the current folder that are not among the models; empty if there are none."""
    listed = {os.path.realpath(model.path) for model in models}
    found = [visible(name) for name in gguf_files() if os.path.realpath(name) not in listed]
    if not found:
        return ""
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return (
        f"other .gguf files are run by their path; in this folder: {', '.join(found[:MOST_NAMED])}{more} "
        f'(hetrun run {found[0]} "a prompt")'
    )


def default_name() -> str:
    """What runs where no model is named."""
    named = Settings.resolve(environ=None).model
    return DEMO if named is None else printable(named)


def take_away(name: str, yes: bool, as_json: bool) -> None:
    """Remove a model, after a yes."""
    what = removal(name)
    if not yes:
        if not sys.stdin.isatty():
            raise UserError(f"{visible(what.name)} takes {format_bytes(what.size)}; add --yes to remove it")
        say(f"{visible(what.name)} takes {format_bytes(what.size)}. Remove it? [y/N]")
        if input().strip().lower() not in ("y", "yes"):
            return
    remove(what)
    if as_json:
        print(in_json({"name": what.name, "freed": what.size}))
    else:
        say(f"{visible(what.name)} was removed: {format_bytes(what.size)} freed")


def place_of(model: str, forbidden: bool = False, pictures: bool = True) -> Path:
    """The path of a model as a command names it."""
    with fetching() as progress:
        return find(model, not forbidden, progress, pictures)


@contextmanager
def fetching() -> Iterator[Progress]:
    """A bar on stderr that shows bytes; it comes with the first of them."""
    if not sys.stderr.isatty():
        yield lambda done, whole, what: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress as Bar,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, visible=False)

        def tell(done: int, whole: int, what: str) -> None:
            bar.update(task, completed=done, total=whole, description=what, visible=True)

        yield tell
