"""The fields of a request that say how tokens are drawn, and what the answer must look like."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hetrun.api.local_model import LocalModel
from hetrun.client.engine_client import LocalClient
from hetrun.client.sampling_params import CHECKS, SamplingParams, Structure
from hetrun.server.app import create_app
from tests.models.tiny import TinyLlama, write_gguf
from tests.server.test_api import CHAT, asking, error_of
from tests.support.fakes import FakeEngine

ANY_OBJECT = {"type": "object"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
DESCRIBED = {"name": "thing", "schema": SCHEMA, "strict": True}

EVERY_FIELD: dict[str, Any] = {
    "temperature": 0.3,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "typical_p": 0.8,
    "top_n_sigma": 1.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "min_keep": 2,
    "dynatemp_range": 0.4,
    "dynatemp_exponent": 1.2,
    "repeat_penalty": 1.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repeat_last_n": 32,
    "dry_multiplier": 0.8,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n"],
    "mirostat": 2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
    "samplers": ["top_k", "temperature"],
    "seed": 7,
    "stop": ["END"],
    "ignore_eos": True,
    "logit_bias": {"42": -100},
}


async def params_of(http: httpx.AsyncClient, engine: FakeEngine, **fields: Any) -> SamplingParams:  # noqa: ANN401
    response = await http.post(CHAT, json=asking(**fields))
    assert response.status_code == 200, response.text
    return engine.requests[-1].params


# --- what arrives


async def test_every_sampling_field_arrives(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    others = {"logprobs", "prompt_logprobs", "max_tokens", "json_schema", "regex", "grammar"}
    assert set(EVERY_FIELD) == set(CHECKS) - others
    more = {"max_tokens": 11, "max_completion_tokens": 9, "user": "me", "tools": [], "n": 1}
    nothing = {"top_logprobs": None, "prompt_logprobs": None, "grammar": "", "json_schema": None}
    params = await params_of(http, engine, **EVERY_FIELD, **more, **nothing, response_format={"type": "text"})
    assert params == SamplingParams.from_mapping(EVERY_FIELD | {"max_tokens": 9})


async def test_what_is_not_said_is_at_its_default(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert await params_of(http, engine) == SamplingParams(temperature=1.0)


async def test_the_server_s_own_defaults_hold_for_what_is_not_said(engine: FakeEngine) -> None:
    app = create_app(LocalClient(engine), sampling={"top_k": 3, "stop": ("X",), "temperature": 0.5})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        assert await params_of(http, engine, top_k=9) == SamplingParams(top_k=9, stop=("X",), temperature=0.5)


@pytest.mark.parametrize(
    ("fields", "kind", "asked"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", ANY_OBJECT),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": DESCRIBED}}, "json_schema", SCHEMA),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "json_schema",
            ANY_OBJECT,
        ),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"json_schema": {}}, "json_schema", ANY_OBJECT),
        ({"json_schema": False}, "json_schema", False),
        ({"json_schema": SCHEMA, "response_format": {"type": "text"}}, "json_schema", SCHEMA),
        ({"grammar": 'root ::= "x"'}, "grammar", 'root ::= "x"'),
        ({"regex": "a+"}, "regex", "a+"),
    ],
    ids=str,
)
async def test_what_the_answer_must_look_like(
    http: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, object], kind: str, asked: object
) -> None:
    structure = (await params_of(http, engine, **fields)).structure
    assert isinstance(structure, Structure)
    assert structure.kind == kind
    assert (json.loads(structure.text) if kind == "json_schema" else structure.text) == asked


async def test_options_of_the_template(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    await params_of(http, engine, chat_template_kwargs={"enable_thinking": False, "depth": [1]})
    assert engine.requests[-1].template_options == {"enable_thinking": False, "depth": [1]}
    await params_of(http, engine, chat_template_kwargs=None)
    assert engine.requests[-1].template_options == {}
    await params_of(http, engine, reasoning_effort="low")
    on = {"enable_thinking": True, "thinking": True}
    said = {"reasoning_effort": "low", "reasoning_strength": "low", **on}
    assert engine.requests[-1].template_options == said
    await params_of(http, engine, reasoning_effort="none", chat_template_kwargs={"x": 1})
    assert engine.requests[-1].template_options == {
        "reasoning_effort": "none",
        "reasoning_strength": "none",
        "enable_thinking": False,
        "thinking": False,
        "x": 1,
    }
    await params_of(http, engine, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert engine.requests[-1].template_options["enable_thinking"] is True


async def test_log_probabilities_of_the_prompt(http: httpx.AsyncClient) -> None:
    answer = (await http.post(CHAT, json=asking(prompt_logprobs=1, max_tokens=1))).json()
    assert answer["prompt_logprobs"] == [
        None,
        {
            "66": {"logprob": -0.2, "rank": None, "decoded_token": "B"},
            "65": {"logprob": -0.1, "rank": 1, "decoded_token": "A"},
        },
    ]
    ranked = (await http.post(CHAT, json=asking(prompt_logprobs=2, max_tokens=0))).json()
    assert ranked["prompt_logprobs"][1]["66"]["rank"] == 2
    assert "prompt_logprobs" not in (await http.post(CHAT, json=asking())).json()


# --- what is refused

DEEP: dict[str, Any] = {}
for _ in range(500):
    DEEP = {"not": DEEP}

BAD_FIELDS: list[tuple[dict[str, object], str, str]] = [
    ({"typical_p": 1.5}, "typical_p", "invalid_value"),
    ({"top_n_sigma": "x"}, "top_n_sigma", "invalid_value"),
    ({"xtc_probability": -0.1}, "xtc_probability", "invalid_value"),
    ({"xtc_threshold": True}, "xtc_threshold", "invalid_value"),
    ({"min_keep": -1}, "min_keep", "invalid_value"),
    ({"dynatemp_range": -1}, "dynatemp_range", "invalid_value"),
    ({"dynatemp_exponent": []}, "dynatemp_exponent", "invalid_value"),
    ({"repeat_penalty": 0}, "repeat_penalty", "invalid_value"),
    ({"frequency_penalty": 1e9}, "frequency_penalty", "invalid_value"),
    ({"presence_penalty": "much"}, "presence_penalty", "invalid_value"),
    ({"repeat_last_n": -2}, "repeat_last_n", "invalid_value"),
    ({"dry_multiplier": -1}, "dry_multiplier", "invalid_value"),
    ({"dry_base": None, "dry_allowed_length": 0.5}, "dry_allowed_length", "invalid_value"),
    ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers", "invalid_value"),
    ({"dry_sequence_breakers": [str(i) for i in range(100)]}, "dry_sequence_breakers", "invalid_value"),
    ({"mirostat": 3}, "mirostat", "invalid_value"),
    ({"mirostat_tau": {}}, "mirostat_tau", "invalid_value"),
    ({"samplers": ["top_x"]}, "samplers", "invalid_value"),
    ({"samplers": 5}, "samplers", "invalid_value"),
    ({"ignore_eos": "yes"}, "ignore_eos", "invalid_value"),
    ({"logit_bias": {"256": 1}}, "logit_bias", "invalid_value"),  # the model has 256 tokens
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": "x"}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": 1e300}}, "logit_bias", "invalid_value"),
    ({"seed": 2**64}, "seed", "invalid_value"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": True}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"max_tokens": 0, "prompt_logprobs": None}, "max_tokens", "invalid_value"),
    ({"grammar": 5}, "grammar", "invalid_value"),
    ({"grammar": "x" * (1 << 21)}, "grammar", "invalid_value"),
    ({"regex": ""}, "regex", "invalid_value"),
    ({"json_schema": []}, "json_schema", "invalid_value"),
    ({"json_schema": 5}, "json_schema", "invalid_value"),
    ({"json_schema": DEEP, "grammar": "x"}, "grammar", "invalid_value"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "invalid_value"),
    ({"response_format": "json"}, "response_format", "invalid_type"),
    ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": ["text"]}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_object", "schema": 3}}, "response_format", "invalid_value"),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "missing_required_parameter",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": [SCHEMA]}},
        "response_format.json_schema",
        "invalid_type",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}}},
        "response_format.json_schema.schema",
        "invalid_type",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": DESCRIBED | {"strict": "yes"}}},
        "response_format.json_schema.strict",
        "invalid_type",
    ),
    ({"reasoning_effort": 3}, "reasoning_effort", "invalid_type"),
    ({"reasoning_effort": "x" * 65}, "reasoning_effort", "invalid_value"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "invalid_type"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize", "invalid_value"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "invalid_value"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", "invalid_value"),
    ({"chat_template_kwargs": {"x": "y" * 20_000}}, "chat_template_kwargs", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_FIELDS, ids=lambda x: str(x)[:50])
async def test_a_wrong_field_is_named(
    http: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, object], param: str, code: str
) -> None:
    response = await http.post(CHAT, json=asking() | fields)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert len(error["message"]) < 300
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": DESCRIBED}},
            "json_schema",
            "response_format",
        ),
        ({"json_schema": SCHEMA}, "json_schema", "json_schema"),
        ({"grammar": "root ::= ("}, "grammar", "grammar"),
        ({"regex": "("}, "regex", "regex"),
    ],
    ids=str,
)
async def test_what_cannot_be_compiled_is_refused_before_anything_is_sent(
    http: httpx.AsyncClient, stream: bool, fields: dict[str, object], kind: str, param: str
) -> None:
    response = await http.post(CHAT, json=asking(f"unfit {kind}", stream=stream, **fields))
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert error["message"] == f"{param}: there is a mistake in it"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalModel]:
    path = tmp_path_factory.mktemp("server") / "tiny.gguf"
    model = TinyLlama("tiny", layers=1, embd=64, ffn=64, heads=2, kv_heads=2)
    with LocalModel(write_gguf(model, path), backends=["reference"]) as llm:
        yield llm


BAD_SCHEMAS: list[dict[str, object]] = [
    {"type": "nonsense"},
    {"type": "string", "pattern": "("},
    {"$ref": "#"},
    {"$ref": "http://example.com/schema.json"},
    {"$ref": "#/$defs/missing"},
    DEEP,
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("schema", BAD_SCHEMAS, ids=lambda x: str(x)[:50])
async def test_a_schema_that_no_answer_can_follow(
    tiny: LocalModel, schema: dict[str, object], stream: bool
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    app = create_app(LocalClient(tiny))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        response = await http.post(CHAT, json=asking(response_format=form, stream=stream, max_tokens=5))
    assert response.status_code == 400
    assert (error_of(response)["param"], error_of(response)["code"]) == ("response_format", "invalid_value")
    assert error_of(response)["message"].startswith("response_format")


async def test_an_answer_follows_its_schema(tiny: LocalModel) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    app = create_app(LocalClient(tiny))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        response = await http.post(CHAT, json=asking(response_format=form, temperature=0, max_tokens=200))
    (choice,) = response.json()["choices"]
    if choice["finish_reason"] == "stop":
        assert set(json.loads(choice["message"]["content"])) == {"a"}
    else:
        assert choice["message"]["content"].startswith('{"a":')


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": 2.1}, "temperature", "decimal_above_max_value"),
        ({"presence_penalty": 3}, "presence_penalty", "decimal_above_max_value"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "decimal_below_min_value"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema.name",
            "missing_required_parameter",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": DESCRIBED | {"name": "a b"}}},
            "response_format.json_schema.name",
            "invalid_value",
        ),
    ],
    ids=lambda x: str(x)[:50],
)
async def test_openai_s_limits_hold_when_strict(
    http: httpx.AsyncClient, strict: httpx.AsyncClient, fields: dict[str, object], param: str, code: str
) -> None:
    assert (await http.post(CHAT, json=asking() | fields)).status_code == 200
    response = await strict.post(CHAT, json=asking() | fields)
    assert response.status_code == 400
    assert (error_of(response)["param"], error_of(response)["code"]) == (param, code)


async def test_strict_knows_every_field(strict: httpx.AsyncClient) -> None:
    fields = EVERY_FIELD | {"chat_template_kwargs": {"x": 1}, "prompt_logprobs": 1, "regex": "a"}
    assert (await strict.post(CHAT, json=asking(**fields))).status_code == 200
