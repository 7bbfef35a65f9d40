"""A chat's request: its messages, tools and variables for the template become a request to the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from reprlib import repr as short

from hetrun.client.events import GenerateRequest, Message, ModelInfo
from hetrun.client.pictures import PART_TYPES
from hetrun.server import request as orders
from hetrun.server.errors import ApiError, api_errors, wrong_type
from hetrun.server.fields import CHAT_LOGPROBS, Body, LogprobCount, flag, wanted_of_chat
from hetrun.server.pictures.parts import Loaded, Part, content_of, part_of, taken_out
from hetrun.server.request import Order
from hetrun.server.sampling import form_field, sampling_params
from hetrun.server.service import Service
from hetrun.text.answers.reading import AnswerFormat, ReadingOptions, parts, reading
from hetrun.text.answers.tools import Tools, read_tools
from hetrun.text.chat import continuation
from hetrun.text.chat.messages import RESERVED, ROLES
from hetrun.text.chat.reasoning import switched

THOUGHTS = ("reasoning_content", "reasoning")  # an assistant's earlier reasoning
MOST_ID = 256  # characters of a call's id
# Parts of messages other than texts and pictures, with their names in errors.
SENSES: Mapping[str, str] = {
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "video_url": "videos",
    "input_video": "videos",
    "file": "files",
    "input_file": "files",
}
MOST_EFFORT = 64  # characters of reasoning_effort
MOST_TEMPLATE_OPTIONS = 1 << 14  # characters of JSON

NONE_LOADED: Loaded = {}
TURN = ("add_generation_prompt", continuation.OPTION)
TOOLS = ("tools", "tool_choice", "functions", "function_call")
KNOWN = (*orders.COMMON, *CHAT_LOGPROBS, "messages", "chat_template_kwargs", *TURN)


def chat_order(
    body: Body, info: ModelInfo, service: Service, client: str = "", loaded: Loaded = NONE_LOADED
) -> Order:
    """Read a request of this client; raises an ApiError that names a wrong field."""
    orders.check(body, info, service, KNOWN, built=TOOLS)
    wanted = wanted_of_chat(body)
    prompt, how = chat_request(body, info, service, wanted, messages(body, loaded))
    return orders.bounded(
        orders.order(body, info, client, [prompt], wanted=wanted, field="messages", reading=how)
    )


def chat_request(
    body: Body,
    info: ModelInfo,
    service: Service,
    wanted: LogprobCount,
    said: tuple[Message, ...],
    *,
    resumes: bool = True,
) -> tuple[GenerateRequest, AnswerFormat]:
    """The engine's request for these messages, and the parsers of its answers. `resumes`: a last message of
    the assistant is continued."""
    said, pictures = taken_out(said, info)
    with api_errors():
        tools = tools_of(body)
        params = sampling_params(body, info, service.sampling, wanted)
        if tools.all and params.structure and params.json_schema is None:
            form = form_field(body)
            message = f"{form} and tools are both given: an answer cannot follow both"
            raise ApiError(message, form, "invalid_value")
        options = {**template_options(body), **turn(body, said, resumes=resumes)}
        reads = ReadingOptions(
            service.tool_parser, service.reasoning_format, info.tool_format, info.thought_mark
        )
        has_form, resumed = params.structure is not None, bool(options.get(continuation.OPTION))
        how = reading(tools, reads, has_form=has_form, resumed=resumed)
    thinks = options.get("enable_thinking") is not False
    # `SamplingParams` keeps a schema as JSON text.
    schema = None if params.json_schema is None else str(params.json_schema)
    prompt = GenerateRequest(
        params,
        messages=said,
        pictures=pictures,
        template_options=options,
        tools=tuple(tool.given for tool in tools.all),
        parts=parts(how, schema, has_form=has_form, thinks=thinks),
    )
    return prompt, how


@api_errors()
def tools_of(body: Body) -> Tools:
    """The tools of a request; ApiError says which field is wrong."""
    for name, neutral in (("functions", ([],)), ("function_call", ("none", "auto"))):
        value = body.get(name)
        if value is not None and value not in neutral:
            message = f"{name} is the older form, which this server does not take: send tools and tool_choice"
            raise ApiError(message, name, "unsupported_parameter")
    parallel = body.get("parallel_tool_calls") is None or flag(body, "parallel_tool_calls")
    return read_tools(body.get("tools"), body.get("tool_choice"), parallel=parallel)


def senseless(kind: str, where: str) -> ApiError:
    """A part that no model reads here."""
    message = f"{where}.type is {kind}, but this server reads texts and pictures: it takes no {SENSES[kind]}"
    return ApiError(message, f"{where}.type", "invalid_value")


def template_options(body: Mapping[str, object]) -> Mapping[str, object]:
    """Additional variables for the template, such as enable_thinking, including reasoning_effort."""
    field = "chat_template_kwargs"
    options = body.get(field)
    if options is None:
        return thinking(body)
    if not isinstance(options, dict):
        raise wrong_type(field, "an object", options)
    for name in options:
        if name in RESERVED:
            raise ApiError(f"{field} may not set {name}", f"{field}.{name}", "invalid_value")
    if len(json.dumps(options)) > MOST_TEMPLATE_OPTIONS:
        message = f"{field} may have {MOST_TEMPLATE_OPTIONS} characters of JSON"
        raise ApiError(message, field, "invalid_value")
    return {**thinking(body), **options}


def thinking(body: Mapping[str, object]) -> Mapping[str, object]:
    """The variables that reasoning_effort sets: the effort by name (Muse has another name), and those with
    which templates turn reasoning on or off."""
    field = "reasoning_effort"
    effort = body.get(field)
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise wrong_type(field, "a text", effort)
    if len(effort) > MOST_EFFORT:
        raise ApiError(f"{field} may have {MOST_EFFORT} characters", field, "invalid_value")
    return {field: effort, "reasoning_strength": effort, **switched(effort != "none")}


@api_errors()
def turn(body: Body, said: Sequence[Message], *, resumes: bool = True) -> dict[str, object]:
    """How the prompt ends, as options of the template: with the beginning of an answer, which is the usual
    end, with the last message, or within it. ApiError says which field is wrong.

    `resumes`: a last message of the assistant is continued, as in llama.cpp, unless one of the two fields
    says what the request wants.
    """
    begins, wanted = (body.get(name) for name in TURN)
    if begins is not None and not isinstance(begins, bool):
        raise wrong_type(TURN[0], "true or false", begins)
    if wanted is None:
        last = said[-1]
        is_open = (
            resumes and begins is None and last.get("role") == "assistant" and not last.get("tool_calls")
        )
        return {continuation.OPTION: True} if is_open else {} if begins is None else {TURN[0]: begins}
    if wanted is False:
        return {} if begins is None else {TURN[0]: begins}
    if begins:
        message = f"{TURN[0]} and {TURN[1]} are both true: a prompt ends in one way"
        raise ApiError(message, TURN[1], "invalid_value")
    continuation.part_of(said[-1], wanted)
    return {continuation.OPTION: wanted}


def given_messages(body: Mapping[str, object]) -> list[object]:
    """The messages as they were sent, at least one."""
    given = body.get("messages")
    if given is None:
        raise ApiError("messages is missing", "messages", "missing_required_parameter")
    if not isinstance(given, list):
        raise wrong_type("messages", "a list", given)
    if not given:
        raise nothing_to_answer()
    return given


def nothing_to_answer() -> ApiError:
    return ApiError("messages is empty: there is nothing to answer", "messages", "empty_array")


def messages(body: Mapping[str, object], loaded: Loaded = NONE_LOADED) -> tuple[Message, ...]:
    """The conversation so far; each message has the fields that templates use, and pictures their files."""
    given = given_messages(body)
    read = [_message(message, f"messages[{i}]", loaded) for i, message in enumerate(given[:-1])]
    # What is continued has no line ends that the client did not write.
    resumed = continuation.OPTION in body or TURN[0] not in body
    return (*read, _message(given[-1], f"messages[{len(read)}]", loaded, between="" if resumed else "\n"))


def _message(message: object, where: str, loaded: Loaded, between: str = "\n") -> Message:
    """`between`: what stands between two parts of an assistant's text."""
    if not isinstance(message, dict):
        raise wrong_type(where, "an object", message)
    role = message.get("role")
    if role == "function" or message.get("function_call"):
        text = f"{where}: this is the older form of calls; send tool_calls, and answers with the role tool"
        raise ApiError(text, where, "unsupported_parameter")
    if role is None:
        raise ApiError(f"{where}.role is missing", f"{where}.role", "missing_required_parameter")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role", "invalid_value")
    read: dict[str, object] = {"role": ROLES[role]}
    if role == "tool":
        read["tool_call_id"] = required_text(message, "tool_call_id", where, MOST_ID)
    content = message.get("content")
    calls = _calls(message.get("tool_calls"), f"{where}.tool_calls") if role == "assistant" else []
    if calls:
        read["tool_calls"] = calls
    if content is not None or not calls:
        mine = role == "assistant"
        place = f"{where}.content"
        read["content"] = _content(content, place, loaded, optional=mine, between=between if mine else "\n")
    for thought in THOUGHTS if role == "assistant" else ():
        if message.get(thought) is not None:
            read[thought] = required_text(message, thought, where)
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise wrong_type(f"{where}.name", "a string", name)
        read["name"] = name
    return read


def _calls(given: object, where: str) -> list[Message]:
    """An assistant's calls; templates get the same format."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise wrong_type(where, "a list", given)
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(given)]


def _call(call: object, where: str) -> Message:
    if not isinstance(call, dict):
        raise wrong_type(where, "an object", call)
    if call.get("type", "function") != "function":
        message = f"{where}.type must be function, not {short(call['type'])}"
        raise ApiError(message, f"{where}.type", "invalid_value")
    function = call.get("function")
    if not isinstance(function, dict):
        raise wrong_type(f"{where}.function", "an object", function)
    arguments: object = function.get("arguments")
    if not isinstance(arguments, dict):  # some clients send an object, although OpenAI has a string
        arguments = required_text(function, "arguments", f"{where}.function")
    read: dict[str, object] = {"type": "function", "id": required_text(call, "id", where, MOST_ID)}
    read["function"] = {
        "name": required_text(function, "name", f"{where}.function", MOST_ID),
        "arguments": arguments,
    }
    return read


def required_text(values: Mapping[str, object], name: str, where: str, most: int | None = None) -> str:
    """A field that must be a string."""
    text = values.get(name)
    if text is None:
        raise ApiError(f"{where}.{name} is missing", f"{where}.{name}", "missing_required_parameter")
    if not isinstance(text, str):
        raise wrong_type(f"{where}.{name}", "a string", text)
    if most is not None and len(text) > most:
        message = f"{where}.{name} may have {most} characters, not {len(text)}"
        raise ApiError(message, f"{where}.{name}", "string_above_max_length")
    return text


def _content(
    content: object, where: str, loaded: Loaded, *, optional: bool, between: str
) -> str | list[Part]:
    if isinstance(content, str):
        return content
    if content is None:
        if optional:
            return ""
        raise ApiError(f"{where} is missing", where, "missing_required_parameter")
    if not isinstance(content, list):
        raise wrong_type(where, "a string or a list of parts", content)
    return content_of([_part(part, f"{where}[{i}]", loaded) for i, part in enumerate(content)], between)


def _part(part: object, where: str, loaded: Loaded) -> str | Part:
    if not isinstance(part, dict):
        raise wrong_type(where, "an object", part)
    kind = part.get("type")
    if isinstance(kind, str) and kind in PART_TYPES:
        return part_of(part, where, loaded)
    if isinstance(kind, str) and kind in SENSES:
        raise senseless(kind, where)
    if kind != "text":
        raise ApiError(f"{where}.type must be text, not {short(kind)}", f"{where}.type", "invalid_value")
    text = part.get("text")
    if not isinstance(text, str):
        raise wrong_type(f"{where}.text", "a string", text)
    return text
