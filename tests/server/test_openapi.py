"""The OpenAPI document: it is valid, has every route, and says the limits that the code keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from starlette.routing import Route

from hetrun.client.engine_client import LocalClient
from hetrun.client.sampling_params import CHECKS
from hetrun.errors import OptionError
from hetrun.server import chat
from hetrun.server.anthropic import request as anthropic
from hetrun.server.app import create_app
from hetrun.server.llamacpp import infill, request as native
from hetrun.server.ollama import (
    embeddings as ollama_embeddings,
    generation as ollama_generation,
    options as ollama_options,
)
from hetrun.server.openapi import document
from hetrun.server.openapi.paths import written
from hetrun.server.openapi.requests import SAMPLING
from hetrun.server.responses import routes as responses
from hetrun.server.routes import completions, embeddings, rerank, tokenize
from hetrun.server.sampling import SAMPLING as READ
from tests.support.fakes import FakeEngine

METHODS = ("get", "post", "put", "patch", "delete")
DOCUMENT: Any = document()


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def schemas() -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["components"]["schemas"]
    return found


def validator(name: str) -> jsonschema.Draft202012Validator:
    root = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    return jsonschema.Draft202012Validator(root)


def test_every_schema_is_one_and_every_reference_leads_somewhere() -> None:
    for schema in schemas().values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for path in DOCUMENT["paths"].values():
        for method in path.keys() & set(METHODS):
            for response in path[method]["responses"].values():
                for media in response.get("content", {}).values():
                    jsonschema.Draft202012Validator.check_schema(media["schema"])
    for reference in set(references(DOCUMENT)):
        found = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]


def test_every_operation_has_a_name_of_its_own() -> None:
    names = [path[m]["operationId"] for path in DOCUMENT["paths"].values() for m in METHODS if m in path]
    assert len(names) == len(set(names)) > 100


def test_it_has_the_routes_of_the_server_and_no_others(engine: FakeEngine) -> None:
    routes = {
        (written(route.path), method.lower())
        for route in create_app(LocalClient(engine)).routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"  # which starlette adds to every GET
    }
    assert routes == {(path, m) for path, item in DOCUMENT["paths"].items() for m in METHODS if m in item}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("ChatRequest", chat.KNOWN),
        ("CompletionRequest", completions.KNOWN),
        ("NativeRequest", native.KNOWN),
        ("InfillRequest", infill.KNOWN),
        ("RerankRequest", rerank.KNOWN),
        ("ResponseRequest", tuple({*responses.KNOWN} - {*responses.CHAT_NAMES})),
        ("EmbeddingRequest", embeddings.KNOWN),
        ("AnthropicRequest", anthropic.KNOWN),
        ("TokenizeRequest", tokenize.TOKENIZE),
        ("DetokenizeRequest", ("model", "tokens")),
        ("ApplyTemplateRequest", ("model", *tokenize.TEMPLATE)),
        ("OllamaChatRequest", ollama_generation.CHAT.known),
        ("OllamaGenerateRequest", ollama_generation.GENERATE.known),
        ("OllamaEmbedRequest", ollama_embeddings.EMBED),
        ("OllamaEmbeddingsRequest", ollama_embeddings.EMBEDDINGS),
        ("OllamaOptions", ollama_options.KNOWN),
    ],
)
def test_it_has_the_fields_that_are_read(name: str, known: tuple[str, ...]) -> None:
    assert set(schemas()[name]["properties"]) == set(known)


@pytest.mark.parametrize("name", READ)
def test_limits_of_sampling_are_those_that_are_checked(name: str) -> None:
    values: list[object] = ["", "a", "top_k;temp", [], ["a"], [""], ["top_k"], True, {}, {"7": -1}, {"a": 1}]
    for limit in _limits(SAMPLING[name]):
        values += [limit, limit - 1, limit + 1]
        if isinstance(limit, float) and limit:
            values += [math.nextafter(limit, math.inf), math.nextafter(limit, -math.inf)]
    for value in filter(_is_json, values):
        if name == "samplers" and isinstance(value, str):
            continue  # which names stand between semicolons the document says in words
        fits = jsonschema.Draft202012Validator(SAMPLING[name]).is_valid(value)
        assert fits == _taken(name, value), (name, value)


def _limits(schema: Any) -> Iterator[int | float]:  # noqa: ANN401
    for inner in schema.get("anyOf", [schema]):
        yield from (inner[end] for end in ("minimum", "maximum") if end in inner)


def _is_json(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _taken(name: str, value: object) -> bool:
    try:
        CHECKS[name](name, value)
    except OptionError:
        return False
    return True


async def test_it_is_served(http: httpx.AsyncClient) -> None:
    answer = await http.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == DOCUMENT


async def test_answers_are_as_it_says(http: httpx.AsyncClient) -> None:
    asked: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}], "n": 2}
    asked |= {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}
    validator("ChatRequest").validate(asked)
    validator("ChatAnswer").validate((await http.post("/v1/chat/completions", json=asked)).json())
    asked = {"prompt": ["a", "b"], "logprobs": 2, "echo": True}
    validator("CompletionRequest").validate(asked)
    validator("CompletionAnswer").validate((await http.post("/v1/completions", json=asked)).json())
    for drawn in (False, True):
        asked = {
            "prompt": ["a", [98, "c"]],
            "n_probs": 2,
            "post_sampling_probs": drawn,
            "return_tokens": True,
        }
        validator("NativeRequest").validate(asked)
        for answer in (await http.post("/completion", json=asked)).json():
            validator("NativeAnswer").validate(answer)
    asked = {"input": "hi", "max_output_tokens": 3}
    validator("ResponseRequest").validate(asked)
    response = (await http.post("/v1/responses", json=asked)).json()
    validator("Response").validate(response)
    validator("Response").validate((await http.get(f"/v1/responses/{response['id']}")).json())
    validator("Error").validate((await http.post("/v1/completions", json={})).json())


async def test_a_refused_method_is_told_of_all_that_are_allowed(http: httpx.AsyncClient) -> None:
    for path, item in DOCUMENT["paths"].items():
        refused = await http.request("TRACE", path)
        allowed = {method.strip().lower() for method in refused.headers["allow"].split(",")}
        assert (refused.status_code, allowed - {"head"}) == (405, item.keys() & set(METHODS)), path
