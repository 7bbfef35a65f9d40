"""Ollama's API: bodies and answers. Its errors have a form of their own."""

from __future__ import annotations

from hetrun.server import fields
from hetrun.server.fields import MOST_TOP
from hetrun.server.ollama.options import FLAGS, LEVELS, NUMBERS, UNLIMITED
from hetrun.server.ollama.storage import MOST_NAME
from hetrun.server.openapi.requests import NOTHING, SAMPLING
from hetrun.server.openapi.schemas import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    NUMBER,
    STRING,
    Json,
    array,
    const,
    described,
    either,
    enum,
    integer,
    optional,
    ref,
    string,
    struct,
)

_COUNT = integer(0)
_OBJECT: Json = {"type": "object"}
_OPTIONS: dict[str, Json] = {
    **SAMPLING,
    "seed": described(INTEGER, "a negative one: a random one"),
    "num_predict": described(integer(min(UNLIMITED)), "0, -1 and -2: no limit"),
    **{name: described(NUMBER, "accepted, without effect") for name in NUMBERS},
    **{name: described(BOOLEAN, "accepted, without effect") for name in FLAGS},
}
_KEEP = described(either(NUMBER, STRING), "seconds, or a duration such as 5m; 0: unload, negative: for ever")
_MODEL: dict[str, Json] = {"model": STRING, "name": described(STRING, "the older name of model")}
_ASKER: dict[str, Json] = {
    "priority": described(integer(-fields.MOST_PRIORITY, fields.MOST_PRIORITY), "lower ones go first"),
    "deadline_s": {"type": "number", "exclusiveMinimum": 0, "maximum": fields.MOST_DEADLINE_S},
    "user": STRING,
}
_COMMON: dict[str, Json] = {
    **_MODEL,
    **_ASKER,
    "stream": described(BOOLEAN, "true if not given"),
    "format": described(either(enum("", "json"), _OBJECT), "or a JSON schema"),
    "options": ref("OllamaOptions"),
    "keep_alive": _KEEP,
    "think": either(BOOLEAN, enum(*LEVELS)),
    "truncate": described(BOOLEAN, "without effect: a prompt that is too long is refused"),
    "shift": described(BOOLEAN, "without effect: an answer ends when the context is full"),
    "logprobs": BOOLEAN,
    "top_logprobs": described(integer(0, MOST_TOP), "needs logprobs"),
}


def _body(more: dict[str, Json]) -> Json:
    return struct({}, {name: optional(schema) for name, schema in more.items()})


_CALL = struct({"function": struct({"name": STRING, "arguments": _OBJECT})}, {"id": STRING})
_IMAGES = described(array(STRING), "pictures in base64")
_MESSAGE = struct(
    {"role": enum("system", "user", "assistant", "tool", "developer")},
    {
        "content": optional(STRING),
        "thinking": optional(STRING),
        "tool_calls": optional(array(_CALL)),
        "tool_name": optional(STRING),
        "tool_call_id": optional(STRING),
        "images": optional(_IMAGES),
    },
)
_TOOL = struct({"type": const("function"), "function": struct({"name": STRING})})
_CHAT = _body(_COMMON | {"messages": array(_MESSAGE), "tools": array(_TOOL)})
_GENERATE = _body(
    _COMMON
    | {
        "prompt": STRING,
        "system": STRING,
        "raw": BOOLEAN,
        "suffix": STRING,
        **{name: NOTHING for name in ("template", "context")},
        "images": _IMAGES,
    }
)
_EMBEDS: dict[str, Json] = {**_MODEL, **_ASKER, "options": _OBJECT, "keep_alive": _KEEP}
_EMBED = _body(
    {
        **_EMBEDS,
        "input": either(STRING, array(STRING)),
        "truncate": described(BOOLEAN, "true if not given: texts that are too long are cut off"),
        "dimensions": _COUNT,
    }
)
_NAMED = {name: string(1, MOST_NAME) for name in ("model", "name")}

_METRICS: dict[str, Json] = {
    name: _COUNT
    for name in (
        *("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"),
        *("eval_count", "eval_duration"),
    )
}
_SCORES = array(struct({"token": STRING, "logprob": NUMBER}))
_MADE = struct({"id": STRING, "function": struct({"index": _COUNT, "name": STRING, "arguments": _OBJECT})})
_SAID = struct(
    {"role": const("assistant"), "content": STRING}, {"thinking": STRING, "tool_calls": array(_MADE, 1)}
)


def _answer(said: dict[str, Json], more: dict[str, Json]) -> Json:
    return struct(
        {"model": STRING, "created_at": STRING, **said, "done": BOOLEAN},
        {"done_reason": enum("stop", "length", "load", "unload"), "logprobs": _SCORES, **_METRICS, **more},
    )


_DETAILS = struct(
    {
        **{
            name: STRING
            for name in ("parent_model", "format", "family", "parameter_size", "quantization_level")
        },
        "families": array(STRING),
    }
)
_LISTED: dict[str, Json] = {
    **{name: STRING for name in ("name", "model", "digest")},
    "size": _COUNT,
    "details": _DETAILS,
}
_RUNNING: dict[str, Json] = {"size_vram": _COUNT, "expires_at": STRING, "context_length": _COUNT}
_SHOWN = struct(
    {
        **{name: STRING for name in ("modelfile", "parameters", "template", "modified_at")},
        "details": _DETAILS,
        "model_info": struct({"general.architecture": STRING, "general.parameter_count": _COUNT}),
        "capabilities": array(enum("completion", "tools", "thinking", "embedding", "insert", "vision")),
    },
    {"license": STRING},
)

SCHEMAS: Json = {
    "OllamaOptions": struct({}, {name: optional(schema) for name, schema in _OPTIONS.items()}),
    "OllamaChatRequest": _CHAT,
    "OllamaGenerateRequest": _GENERATE,
    "OllamaEmbedRequest": _EMBED,
    "OllamaEmbeddingsRequest": _body({**_EMBEDS, "prompt": STRING}),
    "OllamaShowRequest": _body({**_NAMED, "verbose": ANYTHING}),
    "OllamaPullRequest": _body({**_NAMED, "stream": BOOLEAN, "insecure": ANYTHING}),
    "OllamaDeleteRequest": _body({**_NAMED}),
    "OllamaChatAnswer": _answer({"message": _SAID}, {}),
    "OllamaGenerated": _answer({"response": STRING}, {"thinking": STRING}),
    "OllamaModels": struct({"models": array(struct(_LISTED | {"modified_at": STRING}))}),
    "OllamaLoadedModels": struct({"models": array(struct(_LISTED | _RUNNING))}),
    "OllamaModel": _SHOWN,
    "OllamaEmbeddings": struct(
        {"model": STRING, "embeddings": array(array(NUMBER))},
        {name: _COUNT for name in ("total_duration", "load_duration", "prompt_eval_count")},
    ),
    "OllamaProgress": struct({"status": STRING}, {"digest": STRING, "total": _COUNT, "completed": _COUNT}),
    "OllamaVersion": struct({"version": STRING, "hetrun": STRING}),
    "OllamaError": struct({"error": STRING}),
}
LINES = described(STRING, "an object of the same form in each line; an error in the middle is one, too")
