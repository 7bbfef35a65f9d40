"""Bodies of requests, with the limits of the code: the same constants, or compared by a test.

Fields that are not listed here are ignored, unless the server is strict.
"""

from __future__ import annotations

import sys

from hetrun.client.queries import KNOBS
from hetrun.client.sampling_params import (
    LEAST_TEMPERATURE,
    MOST,
    MOST_BIAS,
    MOST_BREAKERS,
    MOST_LOGPROBS,
    MOST_STOPS,
    MOST_STRINGS,
    MOST_STRUCTURE,
    SAMPLERS,
    SPELLINGS,
)
from hetrun.server import fields
from hetrun.server.chat import MOST_EFFORT, MOST_ID, THOUGHTS
from hetrun.server.fields import MOST_LEGACY_TOP, MOST_TOP
from hetrun.server.llamacpp import infill, request as native, slots
from hetrun.server.openapi import tools
from hetrun.server.openapi.schemas import (
    ANYTHING,
    BOOLEAN,
    NUMBER,
    STRING,
    Json,
    array,
    const,
    described,
    either,
    enum,
    integer,
    number,
    optional,
    ref,
    string,
    struct,
)
from hetrun.server.request import MOST_CHOICES
from hetrun.server.responses import routes
from hetrun.server.routes import embeddings, rerank, tokenize
from hetrun.server.routes.completions import MOST_TOKENS, PROMPT
from hetrun.server.sampling import LIMITS, UNLIMITED
from hetrun.text.answers.tools import CHOICES, MOST_TOOLS
from hetrun.text.chat.continuation import CONTENT, REASONING
from hetrun.text.chat.messages import ROLES

MOST_TOKEN = 2**31 - 1
# Values of a field that have no effect.
NOTHING = enum(None, False, 0, "", [], {})


def _strings(most: int) -> Json:
    return either(string(1, MOST_STRINGS), array(string(1, MOST_STRINGS), 0, most))


# Sampling parameters by name; each may also be null.
SAMPLING: dict[str, Json] = {
    "temperature": either(const(0), number(LEAST_TEMPERATURE, sys.float_info.max)),
    "top_k": integer(-1),
    "top_p": number(0, 1),
    "min_p": number(0, 1),
    "typical_p": number(0, 1),
    "top_n_sigma": number(-MOST, MOST),
    "xtc_probability": number(0, 1),
    "xtc_threshold": number(0, 1),
    "min_keep": integer(0),
    "dynatemp_range": number(0, MOST),
    "dynatemp_exponent": number(0, MOST),
    "repeat_penalty": number(LEAST_TEMPERATURE, MOST),
    "frequency_penalty": number(-MOST, MOST),
    "presence_penalty": number(-MOST, MOST),
    "repeat_last_n": integer(-1),
    "dry_multiplier": number(0, MOST),
    "dry_base": number(0, MOST),
    "dry_allowed_length": integer(0),
    "dry_penalty_last_n": integer(-1),
    "dry_sequence_breakers": _strings(MOST_BREAKERS),
    "mirostat": integer(0, 2),
    "mirostat_tau": number(0, MOST),
    "mirostat_eta": number(0, MOST),
    "samplers": either(
        described(STRING, "names with semicolons between them"),
        array(enum(*SAMPLERS, *SPELLINGS, ""), 0, len(SAMPLERS) + 1),
    ),
    "seed": described(integer(-1, 2**64 - 1), "-1: a random one"),
    "stop": _strings(MOST_STOPS),
    "ignore_eos": BOOLEAN,
    "logit_bias": {
        "type": "object",
        "patternProperties": {"^[0-9]{1,10}$": number(-MOST_BIAS, MOST_BIAS)},
        "additionalProperties": False,
    },
}
_SCHEMA = either({"type": "object"}, BOOLEAN, string(0, MOST_STRUCTURE))
FORMS: dict[str, Json] = {
    "response_format": either(
        struct({"type": const("text")}),
        struct({"type": const("json_object")}, {"schema": optional(_SCHEMA)}),
        struct(
            {
                "type": const("json_schema"),
                "json_schema": struct(
                    {"schema": {"type": "object"}},
                    {"name": ANYTHING, "strict": optional(BOOLEAN)},
                ),
            }
        ),
    ),
    "json_schema": _SCHEMA,
    "regex": string(1, MOST_STRUCTURE),
    "grammar": described(string(0, MOST_STRUCTURE), "GBNF or Lark"),
}
_LENGTHS = {name: described(integer(0), "0 only where scores of the prompt are asked for") for name in LIMITS}
_LENGTHS["n_predict"] = described(integer(min(UNLIMITED)), f"{' or '.join(map(str, UNLIMITED))}: no limit")
_ASKER: dict[str, Json] = {
    "user": STRING,
    "safety_identifier": STRING,
    "priority": described(integer(-fields.MOST_PRIORITY, fields.MOST_PRIORITY), "lower ones go first"),
    "deadline_s": {"type": "number", "exclusiveMinimum": 0, "maximum": fields.MOST_DEADLINE_S},
}
# llama.cpp's fields for what becomes of the text and its place.
_PLACE: dict[str, Json] = {
    "cache_prompt": described(BOOLEAN, "false: compute the whole prompt"),
    "id_slot": described(integer(-1, fields.MOST_TOKENS), "-1, or a slot that does not exist: any"),
    "context_shift": described(BOOLEAN, "drop the oldest tokens when the context is full"),
    "n_keep": described(integer(-1, fields.MOST_TOKENS), "how many of them stay, at the beginning"),
    "n_discard": described(integer(0, fields.MOST_TOKENS), "how many are dropped at a time; 0: half of them"),
    "return_progress": BOOLEAN,
    "t_max_predict_ms": described(integer(-1, fields.MOST_TOKENS), "end after a line; 0 or -1: no limit"),
}
_NEUTRAL = {name: enum(*values) for name, values in fields.UNBUILT.items()}
_IGNORED: dict[str, Json] = {name: ANYTHING for name in fields.HINTS}
_COMMON: dict[str, Json] = {
    "model": STRING,
    "stream": BOOLEAN,
    "stream_options": struct({}, {"include_usage": optional(BOOLEAN)}),
    "n": integer(1, MOST_CHOICES),
    **_ASKER,
    **_PLACE,
    **SAMPLING,
    **_LENGTHS,
    **FORMS,
    **_NEUTRAL,
}


def _body(required: dict[str, Json], more: dict[str, Json], **constraints: object) -> Json:
    """All optional fields may be null."""
    return struct(required, {name: optional(schema) for name, schema in more.items()}) | constraints


def _with_hints(more: dict[str, Json]) -> dict[str, Json]:
    return _IGNORED | {name: NOTHING for name in fields.NEVER} | more


def _texts(least: int, most: int) -> Json:
    """One or several, as text or as token ids."""
    tokens = array(integer(0, MOST_TOKEN), 1)
    return either(string(least), array(either(string(least), tokens), 1, most), tokens)


_PART = struct({"type": const("text"), "text": STRING})
_URL = described(STRING, "data:image/png;base64,..., or an address that the server may read")
_DETAIL: dict[str, Json] = {
    "detail": described(optional(enum("auto", "low", "high", "original")), "no effect")
}
_PICTURE = either(
    struct({"type": const("image_url"), "image_url": either(_URL, struct({"url": _URL}, _DETAIL))}),
    struct({"type": const("input_image"), "image_url": _URL}, _DETAIL),
    struct({"type": const("image"), "image": _URL}),
)
_CONTENT = either(STRING, array(either(_PART, _PICTURE)))
_NAMED: dict[str, Json] = {"name": optional(STRING)}
_OTHERS = enum(*(role for role in ROLES if role not in ("assistant", "tool")))
MESSAGE = either(
    struct({"role": _OTHERS, "content": _CONTENT}, _NAMED),
    struct({"role": const("tool"), "content": _CONTENT, "tool_call_id": string(0, MOST_ID)}, _NAMED),
    struct(
        {"role": const("assistant")},
        {
            "content": optional(_CONTENT),
            "tool_calls": optional(array(tools.SENT)),
            **{name: optional(STRING) for name in THOUGHTS},
            **_NAMED,
        },
    ),
)
_MESSAGES = array(ref("Message"), 1)
_TURN: dict[str, Json] = {
    "add_generation_prompt": described(BOOLEAN, "true if not given; not with continue_final_message"),
    "continue_final_message": described(
        either(BOOLEAN, enum(CONTENT, REASONING)), "of the assistant; true if not given"
    ),
}
_TEMPLATE: dict[str, Json] = {
    "chat_template_kwargs": {"type": "object"},
    **_TURN,
    **{name: _NEUTRAL[name] for name in tokenize.TEMPLATE if name in _NEUTRAL},
}

_EFFORT = {"type": "string", "maxLength": MOST_EFFORT}

CHAT = _body(
    {"messages": _MESSAGES},
    _with_hints(
        _COMMON
        | tools.FIELDS
        | {
            "logprobs": BOOLEAN,
            "top_logprobs": described(integer(0, MOST_TOP), "needs logprobs"),
            "prompt_logprobs": integer(0, MOST_TOP),
            "n_probs": integer(0, MOST_TOP),
            "chat_template_kwargs": {"type": "object"},
            **_TURN,
            "reasoning_effort": optional(_EFFORT),
        }
    ),
)
_IMAGES = described(array(STRING), "pictures in base64, one for each <__media__> of the text")
_WITH_PICTURES = struct({"prompt_string": STRING}, {"multimodal_data": _IMAGES})
COMPLETION = _body(
    {PROMPT.name: either(_texts(0, PROMPT.most), _WITH_PICTURES)},
    _with_hints(
        _COMMON
        | {
            "max_tokens": described(integer(0), f"{MOST_TOKENS} if not given; 0 with echo: scores only"),
            "logprobs": integer(0, MOST_LEGACY_TOP),
            "n_probs": integer(0, MOST_TOP),
            "echo": BOOLEAN,
            "best_of": described(integer(1, MOST_CHOICES), "at least n"),
            "suffix": described(STRING, "behind the gap that is to be filled; not with echo"),
        }
    ),
)
_ONE = either(STRING, _WITH_PICTURES)
_MIXED = array(either(integer(0, MOST_TOKEN), STRING), 1)
_NATIVE: dict[str, Json] = _COMMON | {
    "stop": either(STRING, array(STRING, 0, MOST_STOPS)),
    "samplers": either(described(STRING, "names, or a letter for each"), array(STRING)),
    "logit_bias": either(
        {"type": "object", "additionalProperties": either(NUMBER, const(False))},
        array(
            either(
                array(either(integer(0, MOST_TOKEN), STRING, NUMBER, const(False)), 2, 2),
                struct({"token": either(integer(0, MOST_TOKEN), STRING), "bias": ANYTHING}),
            ),
            0,
            native.MOST_BIASES,
        ),
    ),
    "n_probs": integer(0, MOST_LOGPROBS),
    "n_cmpl": described(integer(1, MOST_CHOICES), "the same as n"),
    **{name: BOOLEAN for name in ("post_sampling_probs", "return_tokens", "timings_per_token")},
    "response_fields": array(string(0, native.MOST_FIELD), 0, native.MOST_FIELDS),
    **{name: enum(neutral) for name, neutral in native.UNBUILT.items()},
    "adaptive_target": described({"type": "number", "exclusiveMaximum": 0}, "below 0: off"),
    "adaptive_decay": ANYTHING,
}
NATIVE = _body(
    {
        native.PROMPT.name: described(
            either(_ONE, _MIXED, array(either(_ONE, _MIXED), 1, native.PROMPT.most)),
            "a text, a list of tokens and texts, or a list of several prompts",
        )
    },
    _with_hints(_NATIVE),
)
_LITERAL = either(STRING, array(either(integer(0, MOST_TOKEN), STRING)))
_SNIPPET = struct({"text": STRING}, {"filename": optional(string(0, infill.MOST_NAME))})
INFILL = _body(
    {
        infill.PREFIX: described(_LITERAL, "before the gap: a text, or tokens and texts"),
        infill.SUFFIX: described(_LITERAL, "behind the gap"),
    },
    _with_hints(
        _NATIVE
        | {
            infill.EXTRA: described(
                array(_SNIPPET, 0, infill.MOST_SNIPPETS), "other files, or parts of them"
            ),
            infill.PROMPT: described(STRING, "the beginning of what is to be written"),
        }
    ),
)
SLOT_FILE = struct({"filename": described(string(1, slots.MOST_NAME), "a name without slashes")})
_NOT_THERE = {*routes.MOVED, "n"}
_ITEMS = array(
    either(struct({"type": STRING}), struct({"role": STRING, "content": either(STRING, array(ANYTHING))}))
)
RESPONSE = _body(
    {},
    {name: schema for name, schema in _with_hints(_COMMON).items() if name not in _NOT_THERE}
    | {name: NOTHING for name in routes.NEVER}
    | {
        "input": described(either(STRING, _ITEMS), "a text, or messages, calls and their results"),
        "instructions": STRING,
        "max_output_tokens": integer(0),
        "text": struct({}, {"format": {"type": "object"}, "verbosity": optional(STRING)}),
        "reasoning": struct({}, {"effort": optional(_EFFORT), "summary": optional(STRING)}),
        "previous_response_id": STRING,
        "store": BOOLEAN,
        "metadata": {"type": "object", "additionalProperties": STRING},
        "truncation": const("disabled"),
        "include": array(enum(*routes.INCLUDES)),
        "top_logprobs": integer(0, MOST_TOP),
        "max_tool_calls": integer(1, MOST_TOKEN),
        "chat_template_kwargs": {"type": "object"},
        "prompt_cache_key": STRING,
        "tools": array(struct({"type": const("function"), "name": STRING}), 0, MOST_TOOLS),
        "tool_choice": either(enum(*CHOICES), struct({"type": const("function"), "name": STRING})),
        "parallel_tool_calls": BOOLEAN,
    },
    anyOf=[{"required": ["input"]}, {"required": ["previous_response_id"]}],
)
EMBEDDING = _body(
    {embeddings.INPUT.name: _texts(1, embeddings.INPUT.most)},
    _with_hints(
        {
            "model": STRING,
            "encoding_format": enum(*embeddings.FORMATS),
            "dimensions": described(integer(1), "no more than n_embd of /v1/models"),
            **_ASKER,
        }
    ),
)
_SOURCES: dict[str, Json] = {
    "content": string(0, tokenize.MOST_TEXT),
    "prompt": string(0, tokenize.MOST_TEXT),
    "messages": _MESSAGES,
}
_SPELLED = f"at most {tokenize.MOST_SPELLED} characters then"
TOKENIZE = _body(
    {},
    {
        "model": STRING,
        **_SOURCES,
        **{name: BOOLEAN for name in (*tokenize.ADD, "parse_special")},
        **{name: described(BOOLEAN, _SPELLED) for name in ("with_pieces", "return_token_strs")},
        **_TEMPLATE,
    },
    anyOf=[{"required": [name]} for name in _SOURCES],
)
DETOKENIZE = _body({"tokens": array(integer(0, MOST_TOKEN), 0, tokenize.MOST_TOKENS)}, {"model": STRING})
APPLY_TEMPLATE = _body({"messages": _MESSAGES}, {"model": STRING, **_TEMPLATE})
_WRITTEN = described(either(STRING, integer(0)), "as on the command line")
WHAT_IF = struct({}, {"model": STRING, **dict.fromkeys(KNOBS, _WRITTEN)}) | {"additionalProperties": False}
RAM = struct({"ram": described(either(STRING, integer(0)), "as 1.5GiB, or in bytes")}, None) | {
    "additionalProperties": False
}
_DOCUMENTS = array(either(STRING, struct({"text": STRING})), 1, rerank.MOST_DOCUMENTS)
RERANK = _body(
    {"query": STRING},
    _with_hints(
        {
            "model": STRING,
            rerank.DOCUMENTS: _DOCUMENTS,
            rerank.TEXTS: described(_DOCUMENTS, "instead of documents: the answer is a list"),
            "top_n": integer(1, rerank.MOST_N),
            "return_documents": BOOLEAN,
            "return_text": described(BOOLEAN, "the same with texts"),
            "raw_scores": described(BOOLEAN, "log-odds instead of probabilities"),
            "truncate": const(False),
            "truncation_direction": ANYTHING,
            **_ASKER,
        }
    ),
    anyOf=[{"required": [rerank.DOCUMENTS]}, {"required": [rerank.TEXTS]}],
)
