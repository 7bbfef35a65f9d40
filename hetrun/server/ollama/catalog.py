"""The models of this server as Ollama's clients see them: names, details, capabilities."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

from hetrun.client.events import ModelInfo
from hetrun.client.interface import ChatClient
from hetrun.client.model_catalog import LATEST, identity
from hetrun.client.model_pool import ModelPool, OnDemand
from hetrun.client.queries import StateQuery, TokenizerInfo
from hetrun.errors import HetrunError, OptionError, UserError
from hetrun.server.errors import MOST_LISTED, MOST_NAME, ApiError
from hetrun.server.fields import Body
from hetrun.server.library import ModelFacts, ModelLibrary
from hetrun.server.ollama.options import Json, can_think
from hetrun.server.query import asked
from hetrun.server.routes.models import answers_to, engines, meant
from hetrun.server.service import Service
from hetrun.text.chat.reasoning import mark_of
from hetrun.text.tool_parsers.formats import takes_tools

READ_S = 2.0  # how long a list of models may wait for headers that have not been read yet
SCALES = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))
NO_PARTS = ("limit", "left", "KV of one full sequence")  # of a device's bill: not memory of its own
HIDDEN = ("general.name", "tokenizer.chat_template")  # as in Ollama's answers


@dataclass(frozen=True)
class OllamaModel:
    """A model that may be used."""

    name: str  # with a tag
    path: Path
    nbytes: int
    client: ChatClient
    info: ModelInfo | None  # None: it was not loaded yet
    facts: ModelFacts | None = None

    @property
    def digest(self) -> str:
        """It changes when the model's files do."""
        return identity(self.path) or hashlib.sha256(str(self.path).encode()).hexdigest()

    @property
    def modified_at(self) -> str:
        """When its files were written."""
        try:
            return time_text(self.path.stat().st_mtime)
        except (OSError, ValueError):
            return time_text(0)

    @property
    def architecture(self) -> str:
        """In GGUF's words; empty if it is not known yet."""
        known = self.info or self.facts
        return known.architecture if known else ""

    @property
    def parameters(self) -> int:
        """Numbers in all weights; 0 if that is not known yet."""
        known = self.info or self.facts
        return known.parameters if known else 0

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer on this server."""
        known = self.info or self.facts
        return known.context if known else 0

    def details(self) -> Json:
        """What lists show; texts are empty where nothing is known yet."""
        family = self.architecture
        sees = self.info is not None and self.info.pictures  # clients look for this name in lists
        return {
            "parent_model": "",
            "format": self.facts.format if self.facts else "gguf",
            "family": family,
            "families": [*([family] if family else []), *(["clip"] if sees else [])],
            "parameter_size": in_words(self.parameters),
            "quantization_level": self.facts.quantization if self.facts else "",
        }

    def listed(self) -> Json:
        """An entry of a list of models."""
        return {
            "name": self.name,
            "model": self.name,
            "modified_at": self.modified_at,
            "size": self.nbytes,
            "digest": self.digest,
            "details": self.details(),
        }


def tagged(name: str) -> str:
    """A name with a tag: clients add one to a name without, and then look for it in the list."""
    return name if ":" in name else f"{name}{LATEST}"


def time_text(seconds: float) -> str:
    """A time in RFC 3339's format."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def in_words(number: int) -> str:
    """134.52M, 3.2B; empty for 0."""
    for scale, letter in SCALES:
        if number >= scale:
            digits = 2 if letter == "M" else 1
            return f"{number / scale:.{digits}f}".rstrip("0").rstrip(".") + letter
    return str(number) if number else ""


@dataclass
class Catalog:
    """The models, with what was read of their files."""

    service: Service
    library: ModelLibrary | None
    _read: dict[Path, tuple[str, ModelFacts | None]] = field(default_factory=dict)  # and the files' state

    async def all(self) -> list[OllamaModel]:
        """All models; details that would take too long to read come with a later call."""
        end, found = monotonic() + READ_S, []
        for model in await self._plain():
            found.append(await self.with_facts(model, read=monotonic() < end))
        return found

    async def find(self, body: Body) -> tuple[str, Service]:
        """The name that a request uses, and the service with that model."""
        name = model_name(body)
        if name and self.library and isinstance(self.service.client, ModelPool):
            name = self.library.known(name)
        try:
            here = await meant({"model": name or None}, self.service)
        except ApiError as error:
            if error.status != 404:
                raise
            raise await self.not_found(name) from None
        return model_name(body) or await self._name_of(here), here

    async def offers(self, name: str) -> bool:
        """Whether this is the name of a model here, even if a single model answers to any name."""
        shelf = self.service.client
        if isinstance(shelf, ModelPool):
            return shelf.find(self.library.known(name) if self.library else name) is not None
        return answers_to(await self.service.info(), name)

    async def one(self, here: Service) -> OllamaModel:
        """The only model of a service, as `find` returns it."""
        if isinstance(here.client, OnDemand) and isinstance(self.service.client, ModelPool):
            model = _on_demand(here.client)
        else:
            model = await _single(here)
        return await self.with_facts(model)

    async def not_found(self, name: str) -> ApiError:
        """404, with the models that exist; clients look for its first words."""
        names = [model.name for model in await self._plain()]
        there = ", ".join(names[:MOST_LISTED]) or "no model"
        more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
        message = f"model '{name[:MOST_NAME]}' not found: this server has {there}{more}"
        return ApiError(message, "model", "model_not_found", status=404)

    async def with_facts(self, model: OllamaModel, *, read: bool = True) -> OllamaModel:
        """The model with what its files say, if they can be read."""
        if self.library is None:
            return model
        state = identity(model.path)
        before, facts = self._read.get(model.path, ("", None))
        if state and state != before and read:
            try:
                facts = await asyncio.to_thread(self.library.facts, model.path)
            except (UserError, OSError):
                facts = None  # it may be asked for by requests, which say what is wrong with it
            self._read[model.path] = state, facts
        return OllamaModel(model.name, model.path, model.nbytes, model.client, model.info, facts)

    async def _plain(self) -> list[OllamaModel]:
        shelf = self.service.client
        if isinstance(shelf, ModelPool):
            return [_on_demand(model) for model in shelf.models.values()]
        return [await _single(self.service)]

    async def _name_of(self, here: Service) -> str:
        if isinstance(here.client, OnDemand) and isinstance(self.service.client, ModelPool):
            return tagged(here.client.found.name)
        return tagged((await here.info()).id)


def _on_demand(model: OnDemand) -> OllamaModel:
    found = model.found
    return OllamaModel(tagged(found.name), found.path, found.nbytes, model, model.known)


async def _single(service: Service) -> OllamaModel:
    info = await service.info()
    return OllamaModel(tagged(info.id), Path(info.path), info.file_bytes, service.client, info)


def model_name(body: Body) -> str:
    """The model that a request names, by the newer field or the older one; empty if by none."""
    for name in ("model", "name"):
        value = body.get(name)
        if value is not None and not isinstance(value, str):
            raise ApiError(f"{name} must be a string, not {type(value).__name__}", name, "invalid_type")
        if value:
            return value
    return ""


async def template_of(model: OllamaModel, service: Service) -> str:
    """The chat template in use; doesn't load a model for this."""
    if model.info and engines(model.client):
        try:
            return (await asked(service, TokenizerInfo())).template
        except OptionError:
            pass  # it takes token ids only
    return model.facts.template if model.facts else ""


def capabilities(model: OllamaModel, template: str, service: Service) -> list[str]:
    """What the model was made for, in Ollama's words."""
    if model.facts and model.facts.embeds:
        return ["embedding"]
    takes = takes_tools(template) or (model.facts is not None and model.facts.takes_tools)
    thinks = can_think(model.info, service) if model.info else bool(mark_of(template))
    can = {
        "insert": model.info.fills if model.info else bool(model.facts and model.facts.fills),
        "tools": takes and service.tool_parser != "none",
        "thinking": thinks and service.reasoning_format != "none",
    }
    can["vision"] = bool(model.info and model.info.pictures)
    return ["completion", *(name for name, true in can.items() if true)]


def model_info(model: OllamaModel) -> Json:
    """The file's metadata; the context's length is the one that clients can use here."""
    metadata: Mapping[str, object] = model.facts.metadata if model.facts else {}
    found = {name: value for name, value in metadata.items() if name not in HIDDEN}
    family = model.architecture
    found |= {"general.architecture": family, "general.parameter_count": model.parameters}
    found[f"{family}.context_length"] = model.context
    if model.info and model.info.width:
        found[f"{family}.embedding_length"] = model.info.width
    return found


def parameters(model: OllamaModel, defaults: Mapping[str, object], names: Iterable[str]) -> str:
    """The options of requests that name none, a line for each."""
    known: Json = {"num_ctx": model.context} if model.context else {}
    if model.info and model.info.temperature is not None:
        known["temperature"] = model.info.temperature
    known |= {name: value for name, value in defaults.items() if name in names}
    lines = (
        f"{name:<30} {_quoted(each)}"
        for name, value in known.items()
        for each in (value if isinstance(value, list | tuple) else [value])
    )
    return "\n".join(lines)


def _quoted(value: object) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    return str(value)


async def state_bytes(model: OllamaModel, seconds: float) -> tuple[int, int]:
    """The memory of a loaded model, and its part on devices; the size of its files if that is unknown."""
    try:
        async with asyncio.timeout(seconds):
            state = await model.client.ask(StateQuery())
    except (TimeoutError, HetrunError):
        return model.nbytes, 0
    bills = state.devices.values()
    on_devices = sum(n for bill in bills for part, n in bill.items() if part not in NO_PARTS)
    return (state.used or model.nbytes) + on_devices, on_devices
