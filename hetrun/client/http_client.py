"""The client contract over a running server that has OpenAI's API (as ours, llama.cpp's, vLLM's), Ollama's or
Anthropic's.

Each request has its own connection: closing it tells the server to cancel the request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from time import monotonic
from typing import Any, TypeVar, cast
from urllib.parse import urlencode

import h11

from hetrun.client.address import address
from hetrun.client.events import Event, GenerateRequest, ModelInfo
from hetrun.client.interface import Health
from hetrun.client.queries import (
    EngineState,
    LayerPlace,
    Layers,
    PlanForecast,
    PlanNow,
    Question,
    Render,
    SetRam,
    StateQuery,
    Tokenize,
    TokenizerFacts,
    TokenizerInfo,
    WhatIf,
)
from hetrun.client.remote.http_connection import HttpConnection
from hetrun.client.remote.interface import RemoteApi
from hetrun.client.remote.openai_format import (
    OpenAIApi,
    echoed,
    failure,
    info_of,
    last_of,
    number,
    read,
    status_of,
)
from hetrun.client.remote.probe import APIS, api_of
from hetrun.errors import HetrunError, UserError
from hetrun.system.strict_json import join_bounded, parsed
from hetrun.system.units import format_bytes

A = TypeVar("A")
Json = Mapping[str, Any]
Answer = tuple[int, AsyncIterator[bytes]]

MOST_BODY = 64 << 20  # bytes of an answer that is not streamed
MOST_LINE = 4 << 20  # characters of a line of a stream
LOOK_S = 30.0  # for an answer that needs no model
COLD = ("unloaded", "loading")  # states of a model that will be ready later
AGAIN_S = 0.3  # between two polls of a server that loads
PATIENCE_S = 0.5  # without a first event, before asking whether the model is being loaded


class ServerUnreachable(UserError):
    """The server cannot be reached, or its answer cannot be understood."""


class RemoteClient:
    """A model on a running server; closing the client leaves the server running."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        tell: Callable[[str], None] | None = None,
        api: str = "auto",
    ) -> None:
        """`model`: which one, if there are several; by default one that is loaded. `tell` is called when the
        server has to load it for an answer. `api`: openai, ollama, anthropic, or auto to find out."""
        self._where = address(url, "--url")
        self._key = api_key
        self._api: RemoteApi = APIS[api]() if api in APIS else OpenAIApi()
        self._is_probed = api in APIS
        self._model = model
        self._chosen: Json = {}  # what the server says of the model
        self._tell = tell
        self._several = False
        self.is_guess = False  # the server has several models, none was named, and none is loaded
        self._health = Health("loading", 0.0)
        self._info: ModelInfo | None = None
        self._is_old = False  # an answer was asked for since `_info` was read, and may have had it loaded

    @property
    def progress(self) -> float:
        return self._health.progress

    @property
    def health(self) -> Health:
        return self._health

    async def info(self) -> ModelInfo:
        """Waits while the server loads its model. After an answer it is the model that gave it."""
        info = await self._known()
        if self._is_old:
            with suppress(HetrunError):  # what was known before is better than an error
                return await self._seen_again(info)
        return info

    async def _known(self) -> ModelInfo:
        while self._info is None:
            status, said = await self._json("GET", "/health")
            if status == 503 and said.get("status") == "loading":
                self._health = Health("loading", number(said.get("progress")))
                await asyncio.sleep(AGAIN_S)
                continue
            self._info = await self._first_model()
            self._health = Health("ok")
        return self._info

    @property
    def model(self) -> str:
        """The server's name of the model; empty before `info`."""
        return self._model or ""

    async def models(self) -> list[ModelInfo]:
        """All models of the server; the default model comes first."""
        return [info_of(model, self._where.url) for model in await self._listed()]

    async def _listed(self) -> list[Json]:
        """The server's models, loaded ones first."""
        if not self._is_probed:
            self._api = await api_of(self._json)
            self._is_probed = True
        known = await self._api.listed(self._json, self._where.url)
        return sorted(known, key=lambda model: status_of(model) != "loaded")

    async def _first_model(self) -> ModelInfo:
        known = await self._listed()
        if not known and not self._api.needs_list:
            if self._model is None:
                raise UserError(f"{self._where.url} does not list its models: name the model with -m")
            known = [{"id": self._model}]
        names = (self._model, f"{self._model}:latest")  # Ollama's tag, which people leave out
        named = [model for model in known if self._model is None or model["id"] in names]
        if not named:
            some = ", ".join([model["id"] for model in known[:5]]) or "none"
            raise UserError(f"{self._where.url} has no model {self._model or 'at all'}; it has: {some}")
        chosen, self._several = named[0], len(known) > 1
        is_cold = status_of(chosen) in COLD
        self.is_guess = self._model is None and self._several and is_cold
        self._model = chosen["id"]
        if is_cold and not self.is_guess and self._api.load_path:
            await self._load()
            chosen = next((model for model in await self._listed() if model["id"] == self._model), chosen)
        return await self._info_of(chosen)

    async def _info_of(self, model: Json) -> ModelInfo:
        self._chosen = await self._api.described(model, self._json)
        return info_of(self._chosen, self._where.url)

    async def _seen_again(self, before: ModelInfo) -> ModelInfo:
        """The model as the server has it now, which is not asked to load it for that."""
        known = await self._listed()
        # A server of one model answers whatever it is called, also if it was started again with another one.
        found = next((model for model in known if model["id"] == self._model or len(known) == 1), None)
        if found is None or status_of(found) in COLD:
            return before
        self._model, self._several = found["id"], len(known) > 1
        self._info = await self._info_of(found)
        self._is_old = self.is_guess = False
        return self._info

    async def _load(self) -> None:
        """Make the server load the model; before, it knows little about it."""
        self._say_loading()
        path = f"{self._api.load_path}?{urlencode({'model': self.model})}"
        status, said = await self._json("GET", path, limit_s=None)
        if status >= 500:
            raise failure(self._where.url, status, said)

    def _say_loading(self) -> None:
        reason = f"loading {self.model} ..."
        if self._tell and self._health.reason != reason:
            self._tell(reason)
        self._health = Health("loading", 0.0, reason)

    async def _tell_of_loading(self) -> None:
        """Report that the server loads the model, if an answer takes long to begin."""
        await asyncio.sleep(PATIENCE_S)
        with suppress(HetrunError):  # the answer will contain the error
            while True:
                models = {model["id"]: status_of(model) for model in await self._listed()}
                if models.get(self.model) not in COLD:
                    break
                self._say_loading()
                await asyncio.sleep(AGAIN_S)
        self._health = Health("ok")

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """The events of an answer; an error is the last event."""
        try:
            async with aclosing(self._stream(request)) as events:
                async for event in events:
                    yield event
        except HetrunError as error:
            yield Event("error", error=error)

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        await self._known()
        self._is_old = True
        path, body = self._api.order(request, {**self._chosen, "id": self.model})
        if request.echo:
            status, said = await self._json("POST", path, body, limit_s=None)
            if status != 200:
                raise failure(self._where.url, status, said)
            for event in echoed(said):
                yield event
            return
        begun, first, count, thinking = monotonic(), 0.0, 0, False
        end: dict[str, Any] = {}
        async with self._loading_told() as told, aclosing(self._lines(path, body)) as lines:
            async for line in lines:
                told()
                if not (data := _data_of(line)):
                    continue
                said = self._parsed(data)
                if "error" in said:
                    raise failure(self._where.url, 200, said)
                piece = self._api.piece_of(said, thinking)
                for name, figures in piece.figures.items():
                    end[name] = {**end.get(name, {}), **figures}
                thinking = piece.thinking
                end |= {"finish_reason": piece.finish_reason} if piece.finish_reason else {}
                if piece.text:
                    count += 1
                    first = first or monotonic()
                    yield Event("token", piece.text, logprob=piece.logprob)
        if "finish_reason" not in end:
            raise ServerUnreachable(
                f"{self._where.url} closed the connection in the middle of its answer; try again"
            )
        yield last_of(end, count, begun, first, monotonic(), thinking)

    @asynccontextmanager
    async def _loading_told(self) -> AsyncIterator[Callable[[], None]]:
        """Within this context, health reports that the model is loading, until the function is called."""
        telling = asyncio.create_task(self._tell_of_loading())

        def told() -> None:
            if not telling.done():
                telling.cancel()
                self._health = Health("ok")

        try:
            yield told
        finally:
            told()

    async def ask(self, question: Question[A]) -> A:
        """Answer those queries that the server has endpoints for."""
        return cast(A, await self._answer(question))

    async def _answer(self, question: Question[Any]) -> object:
        info = await self._known()
        if not isinstance(self._api, OpenAIApi):
            raise UserError(f"{self._where.url} does not offer that in {self._api.title} API")
        match question:
            case Tokenize(text, add_special, parse_special):
                body = {"content": text, "add_special": add_special, "parse_special": parse_special}
                body |= self._which
                return (await self._asked("POST", "/tokenize", body)).get("tokens", [])
            case Render(messages, options):
                body = {"messages": list(messages), **self._which}
                body |= {"chat_template_kwargs": dict(options)} if options else {}
                return str((await self._asked("POST", "/apply-template", body)).get("prompt", ""))
            case TokenizerInfo():
                said = await self._asked("GET", self._of_model("/props"))
                template = str(said.get("chat_template", ""))
                return TokenizerFacts(info.n_vocab, None, None, False, "", "", template, info.template_origin)
            case PlanNow():
                return await self._asked("GET", self._of_model("/plan"))
            case StateQuery():
                return await self._machine("state", EngineState)
            case Layers():
                return await self._machine("layers", tuple[LayerPlace, ...])
            case WhatIf(changes):
                return self._read(
                    PlanForecast, await self._asked("POST", "/what-if", {**changes, **self._which})
                )
            case SetRam(nbytes):
                return (await self._asked("POST", "/v1/ram", {"ram": nbytes})).get("memory", {})
        raise UserError(f"{self._where.url} does not offer that")

    @property
    def _which(self) -> dict[str, str]:
        """The body's field for the model, if there are several."""
        return {"model": self.model} if self._several else {}

    def _of_model(self, path: str) -> str:
        """The path with the model in its query, if there are several."""
        return f"{path}?{urlencode(self._which)}" if self._several else path

    async def _machine(self, part: str, kind: Any) -> object:  # noqa: ANN401 - a type of ours
        said = (await self._asked("GET", self._of_model("/machine"))).get(part)
        if said is None:
            raise UserError(f"{self._where.url} is asleep until the next request")
        return self._read(kind, said)

    def _read(self, kind: Any, said: object) -> object:  # noqa: ANN401 - the same
        try:
            return read(kind, said)
        except ValueError as error:
            raise ServerUnreachable(
                f"{self._where.url} sent an answer that this hetrun cannot read: {error}; is it the "
                "same version?"
            ) from None

    async def close(self) -> None:
        """Does nothing: no connection stays open."""

    # --- HTTP

    async def _asked(self, method: str, path: str, body: Json | None = None) -> Json:
        status, said = await self._json(method, path, body)
        if status == 404:
            raise UserError(f"{self._where.url} does not offer {path}: it may not be a hetrun server")
        if status != 200:
            raise failure(self._where.url, status, said)
        return said

    async def _json(
        self, method: str, path: str, body: Json | None = None, limit_s: float | None = LOOK_S
    ) -> tuple[int, Json]:
        """The status and the JSON object; an empty one if the answer is not an object."""
        url = self._where.url
        too_large = f"{url} answers with more than {format_bytes(MOST_BODY)}"
        try:
            async with asyncio.timeout(limit_s), self._exchange(method, path, body) as (status, parts):
                raw = await join_bounded(parts, MOST_BODY, lambda: ServerUnreachable(too_large))
        except TimeoutError:
            raise ServerUnreachable(f"{url} does not answer within {limit_s:g} s") from None
        try:
            said = parsed(raw)
        except (ValueError, RecursionError):
            said = None
        return status, said if isinstance(said, dict) else {"data": said} if isinstance(said, list) else {}

    async def _lines(self, path: str, body: Json) -> AsyncGenerator[str, None]:
        """Read the events of a stream."""
        rest, url = b"", self._where.url
        async with self._exchange("POST", path, body) as (status, parts):
            if status != 200:
                raw = await join_bounded(parts, MOST_LINE, lambda: failure(url, status, {}))
                raise failure(url, status, self._parsed(raw.decode("utf-8", "replace"), {}))
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                if len(rest) > MOST_LINE:
                    raise ServerUnreachable(f"{url} sent an endless line")
                for line in lines:
                    yield line.decode("utf-8", "replace").rstrip("\r")

    def _parsed(self, text: str, otherwise: Json | None = None) -> Json:
        try:
            said = parsed(text.encode("utf-8", "replace"))
        except (ValueError, RecursionError):
            said = otherwise
        if not isinstance(said, dict):
            raise ServerUnreachable(
                f"{self._where.url} sent something that is not a JSON object: {text[:60]!r}"
            )
        return said

    @asynccontextmanager
    async def _exchange(self, method: str, path: str, body: Json | None) -> AsyncIterator[Answer]:
        """Send one request over its own connection; the status and the body of the answer."""
        where = self._where
        try:
            connection = HttpConnection(where.header, *await where.connected())
        except OSError as error:
            raise ServerUnreachable(
                f"{where.url} cannot be reached: {error}; is the server running?"
            ) from None
        try:
            headers = [("Accept", "*/*"), ("Connection", "close"), *self._api.headers(self._key)]
            content = b"" if body is None else json.dumps(body).encode()
            head = await connection.send(method, where.path + path, headers, content)
            yield head.status_code, connection.parts()
        except (OSError, EOFError, h11.ProtocolError) as error:
            raise ServerUnreachable(
                f"{where.url} closed the connection{f': {error}' if str(error) else ''}; try again"
            ) from None
        finally:
            connection.close()


def _data_of(line: str) -> str:
    """The object in a line of a stream: of server-sent events, or of JSON lines; empty if there is none."""
    if line.startswith("data:"):
        data = line[len("data:") :].strip()
        return "" if data == "[DONE]" else data
    return line if line.startswith("{") else ""
