"""The server's answers."""

from __future__ import annotations

from hetrun.server.openapi import tools
from hetrun.server.openapi.schemas import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    NULL,
    NUMBER,
    STRING,
    Json,
    array,
    const,
    described,
    either,
    enum,
    integer,
    mapping,
    number,
    optional,
    ref,
    struct,
)

_COUNT = integer(0)
_REASON = enum("stop", "length")
_CHAT_REASON = enum("stop", "length", "tool_calls")
_NUMBERS = array(NUMBER)

ERROR = struct(
    {
        "error": struct(
            {
                "message": STRING,
                "type": enum("invalid_request_error", "rate_limit_error", "server_error"),
                "param": described(optional(STRING), "the field at fault"),
                "code": described(optional(STRING), "for programs"),
            }
        )
    }
)
USAGE = struct(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": struct({"cached_tokens": _COUNT}),
    }
)
_RATES = ("ms", "per_token_ms", "per_second")
TIMINGS = struct(
    {
        "cache_n": _COUNT,
        **{f"{what}_n": _COUNT for what in ("prompt", "predicted")},
        **{f"{what}_{rate}": NUMBER for what in ("prompt", "predicted") for rate in _RATES},
    },
    {"draft_n": _COUNT, "draft_n_accepted": _COUNT},
)


def _token(**more: Json) -> Json:
    """A token with its log-probability."""
    return struct({"token": STRING, "logprob": NUMBER, "bytes": optional(array(integer(0, 255))), **more})


_SCORES = struct({"content": array(_token(top_logprobs=array(_token()))), "refusal": NULL})
_LEGACY = struct(
    {
        "tokens": array(STRING),
        "token_logprobs": array(optional(NUMBER)),
        "top_logprobs": optional(array(optional(mapping(NUMBER)))),
        "text_offset": array(_COUNT),
    }
)
_RANKED = mapping(
    struct({"logprob": NUMBER, "rank": optional(integer(1)), "decoded_token": optional(STRING)})
)


def _answer(kind: str, choice: Json, more: dict[str, Json] | None = None) -> Json:
    return struct(
        {
            "id": STRING,
            "object": const(kind),
            "created": INTEGER,
            "model": STRING,
            "system_fingerprint": STRING,
            "choices": array(choice, 1),
            "usage": ref("Usage"),
            "timings": ref("Timings"),
        },
        more,
    )


_MESSAGE = struct(
    {"role": const("assistant"), "content": optional(STRING), "refusal": NULL},
    {"reasoning_content": STRING, "tool_calls": array(tools.MADE, 1)},
)
CHAT = _answer(
    "chat.completion",
    struct(
        {"index": _COUNT, "message": _MESSAGE, "finish_reason": _CHAT_REASON, "logprobs": optional(_SCORES)}
    ),
    {"prompt_logprobs": array(optional(_RANKED), 1)},
)
COMPLETION = _answer(
    "text_completion",
    struct({"index": _COUNT, "text": STRING, "finish_reason": _REASON, "logprobs": optional(_LEGACY)}),
)
_OUTPUT = struct({"id": STRING, "type": enum("message", "reasoning", "function_call"), "status": STRING})
RESPONSE = struct(
    {
        "id": STRING,
        "object": const("response"),
        "created_at": INTEGER,
        "completed_at": optional(INTEGER),
        "status": enum("completed", "incomplete"),
        "error": NULL,
        "incomplete_details": optional(struct({"reason": STRING})),
        "instructions": optional(STRING),
        "max_output_tokens": optional(INTEGER),
        "metadata": mapping(STRING),
        "model": STRING,
        "output": array(_OUTPUT),
        "parallel_tool_calls": BOOLEAN,
        "previous_response_id": optional(STRING),
        "store": BOOLEAN,
        "temperature": optional(NUMBER),
        "top_p": optional(NUMBER),
        "text": {"type": "object"},
        "tool_choice": either(STRING, {"type": "object"}),
        "tools": array({"type": "object"}),
        "truncation": const("disabled"),
        "usage": struct(
            {
                "input_tokens": _COUNT,
                "input_tokens_details": struct({"cached_tokens": _COUNT}),
                "output_tokens": _COUNT,
                "output_tokens_details": struct({"reasoning_tokens": _COUNT}),
                "total_tokens": _COUNT,
            }
        ),
        "timings": ref("Timings"),
    }
)
DROPPED = struct({"id": STRING, "object": const("response"), "deleted": const(True)})
# OpenAPI 3.1 has no schema for events: some tools apply it to each event, others to the whole stream.
NAMED_STREAM = described(
    ANYTHING, "Events with names and numbers as OpenAI has them, the last of which has the whole response."
)
NATIVE_STREAM = described(
    ANYTHING,
    "Events with one JSON object each, the last of which has stop: true; or an object with an error.",
)
STREAM = described(
    ANYTHING,
    "Events with one JSON object each: chunks as OpenAI has them, the last with timings. Then comes [DONE], "
    "or an object with an error where the answer could not be completed.",
)
EMBEDDINGS = struct(
    {
        "object": const("list"),
        "data": array(
            struct(
                {
                    "object": const("embedding"),
                    "index": _COUNT,
                    "embedding": either(_NUMBERS, described(STRING, "base64 of little-endian float32")),
                }
            )
        ),
        "model": STRING,
        "usage": struct({"prompt_tokens": _COUNT, "total_tokens": _COUNT}),
    }
)
RANKING = either(
    struct(
        {
            "object": const("list"),
            "model": STRING,
            "results": array(
                struct({"index": _COUNT, "relevance_score": NUMBER}, {"document": struct({"text": STRING})})
            ),
            "usage": struct({"prompt_tokens": _COUNT, "total_tokens": _COUNT}),
        }
    ),
    array(struct({"index": _COUNT, "score": NUMBER}, {"text": STRING})),
)
MODEL = struct(
    {
        "id": STRING,
        "object": const("model"),
        "created": INTEGER,
        "owned_by": STRING,
        "aliases": array(STRING),
        "status": struct({"value": enum("loaded", "loading", "failed", "unloaded")}),
        "meta": optional(
            struct(
                {
                    "name": STRING,
                    "architecture": STRING,
                    "n_ctx": INTEGER,
                    "n_vocab": INTEGER,
                    "n_embd": INTEGER,
                    "n_params": INTEGER,
                    "size": INTEGER,
                    "chat_template": STRING,
                    "rerank": described(BOOLEAN, "whether /v1/rerank works with it"),
                    "infill": described(BOOLEAN, "whether /infill and suffix work with it"),
                    "vision": described(BOOLEAN, "whether it reads pictures"),
                }
            )
        ),
    },
    {"architecture": struct({"input_modalities": array(STRING), "output_modalities": array(STRING)})},
)
MODELS = struct({"object": const("list"), "data": array(ref("Model"))})
_PIECE = described(either(STRING, array(integer(0, 255))), "part of a character as its bytes")
TOKENIZED = struct(
    {
        "tokens": either(array(_COUNT), array(struct({"id": _COUNT, "piece": _PIECE}))),
        "count": _COUNT,
        "max_model_len": _COUNT,
    },
    {"token_strs": array(STRING)},
)
DETOKENIZED = struct({"content": STRING, "prompt": STRING})
RENDERED = struct({"prompt": STRING})
TOKENIZER = struct(
    {
        "vocab_size": _COUNT,
        "model_max_length": _COUNT,
        "add_bos_token": BOOLEAN,
        "bos_token": optional(STRING),
        "bos_token_id": optional(INTEGER),
        "eos_token": optional(STRING),
        "eos_token_id": optional(INTEGER),
        "chat_template": STRING,
        "chat_template_origin": STRING,
    }
)
PLAN = described({"type": "object"}, "what hetrun plan --json prints, of what runs now")
_PROBABILITY: dict[str, Json] = {"id": _COUNT, "token": STRING, "bytes": array(integer(0, 255))}
_DRAWN = number(0, 1)
_CHOSEN = either(
    struct(
        {
            **_PROBABILITY,
            "logprob": NUMBER,
            "top_logprobs": array(struct(_PROBABILITY | {"logprob": NUMBER})),
        }
    ),
    struct({**_PROBABILITY, "prob": _DRAWN, "top_probs": array(struct(_PROBABILITY | {"prob": _DRAWN}))}),
)
_NATIVE: dict[str, Json] = {
    "index": _COUNT,
    "content": STRING,
    "tokens": array(_COUNT),
    "id_slot": INTEGER,
    "stop": const(True),
    "model": STRING,
    "tokens_predicted": _COUNT,
    "tokens_evaluated": _COUNT,
    "generation_settings": {"type": "object"},
    "prompt": STRING,
    "has_new_line": BOOLEAN,
    "truncated": BOOLEAN,
    "stop_type": enum("eos", "limit", "word"),
    "stopping_word": STRING,
    "tokens_cached": described(_COUNT, "of the prompt, those that were not computed again"),
    "timings": ref("Timings"),
    "completion_probabilities": array(_CHOSEN),
}
# With response_fields, an answer has only some of them.
NATIVE = struct({}, _NATIVE)
INPUT_TOKENS = struct({"object": const("response.input_tokens"), "input_tokens": _COUNT})
SLOT_DONE = struct(
    {"id_slot": _COUNT},
    {
        "filename": STRING,
        **{f"n_{what}": _COUNT for what in ("saved", "written", "restored", "read", "erased")},
        "timings": mapping(NUMBER),
    },
)
PROPS = struct(
    {
        "default_generation_settings": struct({"n_ctx": _COUNT, "params": {"type": "object"}}),
        "total_slots": _COUNT,
        "model_alias": STRING,
        "model_path": described(STRING, "the file's name only"),
        "modalities": struct({"vision": BOOLEAN, "audio": const(False)}),
        "build_info": STRING,
        "is_sleeping": BOOLEAN,
        "chat_template": optional(STRING),
        "bos_token": optional(STRING),
        "eos_token": optional(STRING),
    },
    {"chat_template_origin": STRING},
)
SLOTS = array(
    struct(
        {
            "id": described(integer(-1), "-1: it waits for a place"),
            "id_task": described(integer(-1), "-1: no request is there"),
            "n_ctx": _COUNT,
            "is_processing": BOOLEAN,
            "state": enum("idle", "prompt", "answer", "displaced", "waiting"),
            "seconds": NUMBER,
            "n_prompt_tokens": _COUNT,
            "n_prompt_tokens_processed": _COUNT,
            "n_prompt_tokens_cache": _COUNT,
            "n_decoded": _COUNT,
            "n_remain": _COUNT,
        }
    )
)
HEALTH = struct(
    {"status": enum("ok", "loading", "stuck", "failed")},
    {
        "progress": NUMBER,
        "reason": STRING,
        "error": STRING,
        "segment": optional(STRING),
        "seconds": NUMBER,
        "expected": optional(NUMBER),
        "streaming": described({"type": "object"}, "where weights come from disk"),
    },
)
MACHINE = struct(
    {
        "state": described(optional({"type": "object"}), "null: the model sleeps"),
        "layers": array(
            struct(
                {
                    "scope": STRING,
                    **{name: _COUNT for name in ("nbytes", "streamed", "crossing")},
                    **{name: mapping(_COUNT) for name in ("decode", "prefill")},
                }
            )
        ),
    }
)
FORESEEN = struct(
    {
        "context": _COUNT,
        **{name: optional(NUMBER) for name in ("decode_tok_s", "full_tok_s", "prefill_tok_s")},
        "memory": described(mapping(NUMBER), "the bill, in bytes"),
        "devices": mapping(mapping(NUMBER)),
        "streamed_bytes": _COUNT,
        "measured": BOOLEAN,
        "threads": _COUNT,
        "kv_type": STRING,
        "notes": array(STRING),
    }
)
RAM = struct({"ram": _COUNT, "memory": described(mapping(NUMBER), "the bill, in bytes")})
DOCUMENT = described({"type": "object"}, "this document")
