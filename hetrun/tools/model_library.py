"""The models on this machine, for clients of the server that ask about, download and delete them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetrun.client.model_catalog import LATEST, CatalogModel
from hetrun.errors import UserError, printable
from hetrun.server.library import ModelFacts, NotHere, NotOurs, Progress, RemovableModel

if TYPE_CHECKING:  # numpy comes with it
    from hetrun.loader.formats.gguf_file import GGUFFile

MOST_TEXT = 1 << 14  # characters of a text in a model's metadata
MOST_LIST = 5  # items of a list in it; longer ones are shown empty, as in Ollama
NUMBERS = (
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
)  # of a folder, in GGUF's words


@dataclass(frozen=True)
class LocalLibrary:
    """The stores that `hetrun list` shows."""

    ctx: int | None = None  # the longest context that the server gives a model
    offline: bool = False

    def facts(self, model: Path) -> ModelFacts:
        """Read a model's header."""
        from hetrun.loader.gguf_source import GGUFModel  # numpy comes with it
        from hetrun.loader.hub.select import type_of
        from hetrun.loader.open_model import open_model
        from hetrun.loader.tensor_list import entries
        from hetrun.text.chat.template import ChatTemplate
        from hetrun.text.tool_parsers.formats import takes_tools

        source = open_model(model)
        found = list(entries(source))
        trained = source.get_int("context_length", 0, 0, 1 << 31)
        template = ChatTemplate.of_model(source)
        if isinstance(source, GGUFModel):
            fills = _fills(source.file)
            metadata = {
                key: shown
                for key, value in source.file.metadata.items()
                if (shown := _plain(value)) is not None
            }
            embeds = source.get_int("pooling_type", 0, 0, 1 << 31) != 0
        else:
            fills = False  # a folder's vocabulary is searched when it is loaded
            metadata = _of_folder(source.architecture, {n: source.get_int(n, 0, 0, 1 << 62) for n in NUMBERS})
            embeds = (Path(source.path) / "1_Pooling" / "config.json").is_file()
        sizes: dict[str, int] = {}
        for entry in found:
            sizes[entry.type] = sizes.get(entry.type, 0) + entry.nbytes
        return ModelFacts(
            architecture=source.architecture,
            format="gguf" if isinstance(source, GGUFModel) else "safetensors",
            parameters=sum(entry.weights for entry in found),
            quantization=type_of(model.stem) or max(sizes, key=lambda kind: sizes[kind], default=""),
            context=min(filter(None, (trained, self.ctx)), default=0),
            metadata=metadata,
            template=_valid(template.source),
            takes_tools=takes_tools((template.for_tools or template).source),
            fills=fills,
            embeds=embeds,
        )

    def known(self, name: str) -> str:
        """A name on the hub as hetrun spells it."""
        from hetrun.loader.hub.names import is_on_the_hub, wanted

        bare = name.removesuffix(LATEST)
        try:
            return wanted(bare).name if is_on_the_hub(bare) else name
        except UserError:
            return name

    def check_pull(self, name: str) -> None:
        """Only names on Hugging Face's hub can be downloaded, and those of models that are here."""
        from hetrun.loader.hub.download import not_here, offline
        from hetrun.loader.hub.names import wanted
        from hetrun.loader.hub.resolve import by_name
        from hetrun.loader.hub.stores import available

        if by_name(name, available()):
            return
        try:
            which = wanted(name.removesuffix(LATEST))
        except UserError:
            raise UserError(
                f"{printable(name)} is not here, and hetrun downloads from Hugging Face's hub only: name a "
                "model such as hf.co/user/repo:Q4_K_M"
            ) from None
        if self.offline or offline():
            raise not_here(which)

    def pull(self, name: str, progress: Progress) -> CatalogModel:
        """Download a model from the hub into Hugging Face's cache."""
        from hetrun.loader.hub.download import fetch
        from hetrun.loader.hub.names import wanted
        from hetrun.loader.hub.resolve import by_name
        from hetrun.loader.hub.stores import available

        self.check_pull(name)
        if here := by_name(name, available()):
            return CatalogModel(here[0].name, here[0].path, here[0].size)
        path, chosen = fetch(wanted(name.removesuffix(LATEST)), progress)
        return CatalogModel(self.known(name), path, chosen.size)

    def removal(self, name: str) -> RemovableModel:
        """What `hetrun rm` would remove."""
        from hetrun.loader.hub.names import is_on_the_hub
        from hetrun.loader.hub.remove import removal
        from hetrun.loader.hub.resolve import by_name
        from hetrun.loader.hub.stores import available

        here = by_name(name, available())
        try:
            what = removal(here[0].name if len(here) == 1 else name)
        except UserError as error:
            raise (NotOurs if here else NotHere)(str(error)) from None
        if not here and is_on_the_hub(name) and not any(path.exists() for path in what.paths):
            raise NotHere(f"no model is called {printable(name)} here")
        return RemovableModel(what.name, what.paths)

    def remove(self, what: RemovableModel) -> None:
        """Delete the files."""
        from hetrun.loader.hub import remove

        remove.remove(remove.Removal(what.name, what.paths, 0))


def _fills(file: GGUFFile) -> bool:
    """Whether a file has the tokens to fill in the middle of a text, by its keys or by their texts."""
    from hetrun.loader.formats.fim_tokens import by_text

    if all(f"tokenizer.ggml.fim_{part}_token_id" in file.metadata for part in ("pre", "suf", "mid")):
        return True
    tokens = file.get_strings("tokenizer.ggml.tokens")
    blob = tokens.blob if tokens else b""

    def find(text: str) -> int | None:
        stored = text.encode()
        at = blob.find(len(stored).to_bytes(8, "little") + stored)
        return None if at < 0 else at

    return by_text(find).complete


def _of_folder(architecture: str, numbers: Mapping[str, int]) -> dict[str, object]:
    return {f"{architecture}.{name}": number for name, number in numbers.items() if number}


def _plain(value: object) -> object:
    """A value of a file's metadata as JSON has it, a long list as an empty one; None for a text that is too
    long and a number that is not finite."""
    if isinstance(value, str):
        return _valid(value) if len(value) <= MOST_TEXT else None
    if isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, Sequence):
        return None
    return [] if len(items) > MOST_LIST else [_plain(item) for item in items]


def _valid(text: str) -> str:
    """A text of a file, which need not be UTF-8."""
    return text.encode(errors="surrogateescape").decode(errors="replace")
