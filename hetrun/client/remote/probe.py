"""Which API a server has, by what it says to harmless requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hetrun.client.remote.anthropic_format import NO_ROUTE, AnthropicApi
from hetrun.client.remote.interface import Json, JsonSender, RemoteApi
from hetrun.client.remote.ollama_format import OllamaApi
from hetrun.client.remote.openai_format import OpenAIApi

APIS: Mapping[str, Callable[[], RemoteApi]] = {
    "openai": OpenAIApi,
    "ollama": OllamaApi,
    "anthropic": AnthropicApi,
}


async def api_of(ask: JsonSender) -> RemoteApi:
    """OpenAI's API where a server has it, since most have; `ask` sends the headers of that API. A server with
    none of the three gets OpenAI's, for the error that it then gives."""
    status, said = await ask("GET", "/v1/models")
    if _is_error_of_anthropic(said) or _is_list_of_anthropic(said):
        return AnthropicApi()
    if status in NO_ROUTE or (status == 200 and "data" not in said):
        status, version = await ask("GET", "/api/version")
        if status == 200 and isinstance(version.get("version"), str):
            return OllamaApi()
        _, refusal = await ask("POST", "/v1/messages", {})
        if _is_error_of_anthropic(refusal):
            return AnthropicApi()
    return OpenAIApi()


def _is_error_of_anthropic(said: Json) -> bool:
    return said.get("type") == "error" and isinstance(said.get("error"), dict)


def _is_list_of_anthropic(said: Json) -> bool:
    match said.get("data"):
        case [{"type": "model", **more}, *_]:
            return "object" not in more
    return False
