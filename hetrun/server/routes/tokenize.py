"""POST /tokenize, /detokenize and /apply-template, GET /tokenizer_info: texts and tokens, no answers.

Names are llama.cpp's and vLLM's; answers suit clients of either.
"""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun.client.events import ModelInfo
from hetrun.client.queries import Detokenize, Render, Tokenize, TokenizerInfo
from hetrun.errors import OptionError
from hetrun.server.body import json_object
from hetrun.server.chat import TOOLS, TURN, messages, template_options, tools_of, turn
from hetrun.server.errors import ApiError, wrong_type
from hetrun.server.fields import Body
from hetrun.server.json_stream import LazyList, json_response
from hetrun.server.pictures.parts import taken_out
from hetrun.server.query import asked, few, refuse_pictures
from hetrun.server.request import check
from hetrun.server.routes.models import meant
from hetrun.server.service import Service
from hetrun.text.chat.continuation import OPTION

MOST_TEXT = 1 << 20  # characters: some 250,000 tokens
MOST_SPELLED = 1 << 17  # characters of a text whose tokens are returned with their texts
MOST_TOKENS = 1 << 18
# Names of the field with the text; whether special tokens are added by default.
SOURCES: Mapping[str, bool] = {"content": False, "prompt": True, "messages": False}
ADD = ("add_special", "add_special_tokens")
TEMPLATE = ("messages", "chat_template_kwargs", *TURN, "tools", "tool_choice")
TOKENIZE = ("model", *SOURCES, *ADD, "parse_special", "with_pieces", "return_token_strs", *TEMPLATE)

Json = dict[str, object]


def routes(service: Service) -> list[Route]:
    async def tokenize(request: Request) -> Response:
        body = await json_object(request)
        here = await meant(body, service)
        info = await here.info()
        check(body, info, here, TOKENIZE, built=TOOLS)
        source, question = await _text(here, body)
        spelled = _flag(body, "with_pieces"), _flag(body, "return_token_strs")
        most = MOST_SPELLED if any(spelled) else MOST_TEXT
        if len(question.text) > most:
            message = f"{source} may have {most} characters here, not {len(question.text)}"
            raise ApiError(message, source, "string_above_max_length")
        try:
            tokens = await asked(here, question)
        except OptionError as error:  # a text that takes too long to tokenise
            raise ApiError(str(error), source, "invalid_value") from error
        pieces = await asked(here, Detokenize(tuple(tokens))) if any(spelled) else []
        return await json_response(_tokenized(tokens, pieces, info, *spelled))

    async def detokenize(request: Request) -> Response:
        body = await json_object(request)
        here = await meant(body, service)
        check(body, await here.info(), here, ("model", "tokens"))
        try:
            pieces = await asked(here, Detokenize(_tokens(body)))
        except OptionError as error:  # a token that doesn't exist
            raise ApiError(str(error), "tokens", "invalid_value") from error
        text = b"".join(pieces).decode(errors="replace")
        return JSONResponse({"content": text, "prompt": text})

    async def rendered(request: Request) -> Response:
        body = await json_object(request)
        here = await meant(body, service)
        check(body, await here.info(), here, ("model", *TEMPLATE), built=TOOLS)
        return JSONResponse({"prompt": await asked(here, await _render(body, here))})

    async def described(request: Request) -> Response:
        here = await meant(request.query_params, service)
        info = await here.info()
        facts = await asked(here, TokenizerInfo())
        return JSONResponse(
            {
                "vocab_size": facts.n_tokens,
                "model_max_length": info.context,
                "add_bos_token": facts.add_bos,
                "bos_token": facts.bos_text or None,
                "bos_token_id": facts.bos,
                "eos_token": facts.eos_text or None,
                "eos_token_id": facts.eos,
                "chat_template": facts.template,
                "chat_template_origin": facts.template_origin,
            }
        )

    return [
        Route("/tokenize", tokenize, methods=["POST"], middleware=few()),
        Route("/detokenize", detokenize, methods=["POST"], middleware=few()),
        Route("/apply-template", rendered, methods=["POST"], middleware=few()),
        Route("/tokenizer_info", described, middleware=few()),
    ]


async def _text(service: Service, body: Body) -> tuple[str, Tokenize]:
    """The text to tokenise, and its field."""
    given = [name for name in SOURCES if body.get(name) is not None]
    if len(given) != 1:
        said = f"{' and '.join(given)} are both given" if given else "content, prompt or messages is missing"
        code = "invalid_value" if given else "missing_required_parameter"
        raise ApiError(f"{said}: tokenize takes one of them", given[-1] if given else "content", code)
    source = given[0]
    add, parse = SOURCES[source], _flag(body, "parse_special", default=True)
    for name in ADD:
        add = _flag(body, name, default=add)
    if source == "messages":
        return source, Tokenize(await asked(service, await _render(body, service, counts=True)), add, parse)
    text = body[source]
    if not isinstance(text, str):
        raise wrong_type(source, "a string", text)
    return source, Tokenize(text, add, parse)


async def _render(body: Body, service: Service, counts: bool = False) -> Render:
    loaded = await service.pictures.loaded(body)
    said, pictures = taken_out(messages(body, loaded), await service.info())
    if counts:
        refuse_pictures(pictures)
    end = turn(body, said)
    more: dict[str, object] = end if OPTION in end else {"add_generation_prompt": True, **end}
    if tools := tools_of(body).all:
        more["tools"] = [tool.given for tool in tools]
    return Render(said, {**template_options(body), **more})


def _tokens(body: Body) -> tuple[int, ...]:
    tokens = body.get("tokens")
    if tokens is None:
        raise ApiError("tokens is missing", "tokens", "missing_required_parameter")
    if not isinstance(tokens, list):
        raise wrong_type("tokens", "a list of token ids", tokens)
    if len(tokens) > MOST_TOKENS:
        message = f"tokens may hold {MOST_TOKENS} token ids, not {len(tokens)}"
        raise ApiError(message, "tokens", "array_above_max_length")
    for i, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < 1 << 31:
            message = f"tokens[{i}] must be a token id, not {short(token)}"
            raise ApiError(message, f"tokens[{i}]", "invalid_value")
    return tuple(tokens)


def _tokenized(
    tokens: list[int], pieces: list[bytes], info: ModelInfo, with_pieces: bool, with_strs: bool
) -> Json:
    said: Json = {"tokens": tokens, "count": len(tokens), "max_model_len": info.context}
    if with_pieces:
        said["tokens"] = LazyList(
            {"id": token, "piece": _spelled(piece)} for token, piece in zip(tokens, pieces, strict=True)
        )
    if with_strs:
        said["token_strs"] = LazyList(piece.decode(errors="replace") for piece in pieces)
    return said


def _spelled(piece: bytes) -> str | list[int]:
    """A token as text; part of a character as its bytes."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _flag(body: Body, name: str, *, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong_type(name, "true or false", value)
    return value
