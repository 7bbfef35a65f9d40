"""What the server may do with the models on this machine besides running them; the command provides it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hetrun.client.model_catalog import CatalogModel
from hetrun.errors import UserError

Progress = Callable[[int, int, str], object]  # bytes done, bytes in all, and what is being done


class NotHere(UserError):
    """There is no model of this name on this machine."""


class NotOurs(UserError):
    """The model belongs to another program."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's files say of it; it need not be loaded for that."""

    architecture: str
    format: str  # gguf or safetensors
    parameters: int
    quantization: str
    context: int  # that this server would give it at most
    metadata: Mapping[str, object]  # in GGUF's words, without long lists
    template: str  # of a chat
    takes_tools: bool  # by a template
    fills: bool  # whether it has the tokens to fill in the middle of a text
    embeds: bool  # whether it was made for embeddings


@dataclass(frozen=True, slots=True)
class RemovableModel:
    """The files of a model that may be removed."""

    name: str
    paths: tuple[Path, ...]


class ModelLibrary(Protocol):
    """The models on this machine. All but `known` may take long and are called in a thread."""

    def facts(self, model: Path) -> ModelFacts:
        """Read a model's header; raises UserError if that is impossible."""

    def known(self, name: str) -> str:
        """The name that hetrun has for a model that others spell otherwise (`hf.co/user/repo`)."""

    def check_pull(self, name: str) -> None:
        """Raises UserError if nothing of this name can be downloaded; doesn't use the network."""

    def pull(self, name: str, progress: Progress) -> CatalogModel:
        """Download a model, unless it is here. An exception of `progress` stops the download, which can be
        continued later."""

    def removal(self, name: str) -> RemovableModel:
        """What `remove` would remove; raises NotHere or NotOurs."""

    def remove(self, what: RemovableModel) -> None:
        """Delete a model's files."""
