"""`LLM` as programs use it."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from hetrun import LLM, AsyncLLM, ChatChunk, Event, SamplingParams, ToolCall, UserError
from hetrun.api.conversation import Chats
from hetrun.api.keywords import ModelOptions, SamplingKeywords
from hetrun.api.wording import python_words
from hetrun.errors import ContextFull, EngineStopped, FieldError, OptionError
from tests.api.scripted import ScriptedEngine, scripted_llm
from tests.models.cases import GQA
from tests.support.rig import model_file
from tests.tools import keywords

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
BOTH = f"<think>\nIs it cold?\n</think>\n\nLet me look.\n{CALL}\n{CALL.replace('Oslo', 'Rome')}"


@pytest.fixture
def llm(engine: ScriptedEngine) -> Iterator[LLM]:
    with scripted_llm(engine) as made:
        yield made


def drained(chunks: Iterator[ChatChunk]) -> list[ChatChunk]:
    """All chunks: only the last one has an end."""
    found = list(chunks)
    assert [chunk.finish_reason is None for chunk in found] == [True] * (len(found) - 1) + [False]
    return found


# --- chats


def test_a_streamed_chat_gives_reasoning_text_calls_and_the_end(llm: LLM) -> None:
    chunks = drained(llm.chat(f"say {BOTH}", stream=True, tools=[WEATHER]))
    assert len(chunks) > 3
    assert "".join(chunk.reasoning for chunk in chunks) == "Is it cold?"
    assert "".join(chunk.text for chunk in chunks) == "Let me look."
    calls = [call for chunk in chunks for call in chunk.tool_calls]
    assert [(call.name, call.parsed()) for call in calls] == [
        ("weather", {"city": "Oslo"}),
        ("weather", {"city": "Rome"}),
    ]
    assert calls[0].id != calls[1].id
    last = chunks[-1]
    assert last.finish_reason == "tool_calls"
    assert last.usage is not None
    assert last.usage.completion_tokens == len(f"{BOTH}".split(" "))
    assert last.completion is not None
    assert last.completion.tool_calls == calls


def test_a_whole_chat_says_the_same_and_its_message_goes_back(llm: LLM, engine: ScriptedEngine) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"say {BOTH}"}]
    answer = llm.chat(messages, tools=[WEATHER])
    assert (answer.reasoning, answer.text, answer.finish_reason) == (
        "Is it cold?",
        "Let me look.",
        "tool_calls",
    )
    messages.append(answer.message)
    for call in answer.tool_calls:
        messages.append(
            {"role": "tool", "tool_call_id": call.id, "content": f"snow in {call.parsed()['city']}"}
        )
    messages.append({"role": "user", "content": "say Cold."})
    second = llm.chat(messages, tools=[WEATHER])
    assert (second.text, second.message) == ("Cold.", {"role": "assistant", "content": "Cold."})
    said = engine.requests[-1].messages
    assert said is not None
    assert [call["id"] for call in said[1]["tool_calls"]] == [call.id for call in answer.tool_calls]  # type: ignore[attr-defined]
    assert said[1]["reasoning_content"] == "Is it cold?"


def test_reasoning_stays_in_the_text_where_that_is_asked_for(engine: ScriptedEngine) -> None:
    answer = scripted_llm(engine, reasoning_format="none").chat("say <think>a</think>b")
    assert (answer.text, answer.reasoning) == ("<think>a</think>b", "")


def test_leaving_a_streamed_chat_cancels_it(llm: LLM, engine: ScriptedEngine) -> None:
    chunks = llm.chat("forever", stream=True)
    assert next(chunks).text == "ha "
    chunks.close()
    assert engine.cancelled == [1]


def test_tools_are_forced_on_a_real_model(tiny_llm: LLM) -> None:
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    answer = tiny_llm.chat("Snow?", **asked, seed=1)
    (call,) = answer.tool_calls
    jsonschema.validate(call.parsed(), SCHEMA)
    assert (call.name, answer.text, answer.finish_reason) == ("weather", "", "tool_calls")
    chunks = drained(tiny_llm.chat("Snow?", stream=True, **asked, seed=1))
    (streamed,) = [found for chunk in chunks for found in chunk.tool_calls]
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {}}]}),
        ("tools[0]", {"tools": ["weather"]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": "maybe"}),
    ],
)
def test_wrong_tools_are_named(llm: LLM, field: str, options: dict[str, Any]) -> None:
    with pytest.raises(FieldError) as refused:
        llm.chat("say hi", **options)
    assert refused.value.field == field
    assert str(refused.value).startswith(field)


def test_arguments_that_are_no_json_are_an_error_when_they_are_read() -> None:
    with pytest.raises(UserError, match="call to weather are not JSON"):
        ToolCall("1", "weather", '{"city": ').parsed()


def test_an_unknown_role_is_refused(llm: LLM, engine: ScriptedEngine) -> None:
    with pytest.raises(OptionError, match=r"messages\[1\]\.role must be one of system, .*, not 'x'"):
        llm.chat([{"role": "user", "content": "say hi"}, {"role": "x", "content": "y"}])
    assert engine.requests == []


def test_a_text_is_a_message_of_the_user(llm: LLM, engine: ScriptedEngine) -> None:
    assert llm.chat("say hi").text == "hi"
    assert engine.requests[0].messages == ({"role": "user", "content": "say hi"},)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("kind", ["texts", "lists"])
def test_several_conversations_are_answered_together(llm: LLM, engine: ScriptedEngine, kind: str) -> None:
    texts = ["say one two three", "say <think>a</think>b", "say c"]
    answers = llm.chat(texts if kind == "texts" else [user(text) for text in texts])
    assert [(a.text, a.reasoning) for a in answers] == [("one two three", ""), ("b", "a"), ("c", "")]
    said = [request.messages for request in engine.requests]
    assert said == [tuple(user(text)) for text in texts]
    assert [a.text for a in llm.chat(["say alone"])] == ["alone"]


def test_several_conversations_run_at_the_same_time(llm: LLM, engine: ScriptedEngine) -> None:
    with pytest.raises(Exception, match="the fake backend failed"):
        llm.chat(["forever", "fail"])  # the second one could not end if it waited for the first
    assert 1 in engine.cancelled


@pytest.mark.parametrize(
    ("messages", "stream", "said"),
    [
        (["say a", "say b"], True, "stream=True is for one conversation"),
        ([user("say a"), user("say b")], True, "stream=True is for one conversation"),
        (["say a", user("say b")], False, "all of them texts, or all of them lists of messages"),
        (
            [*user("say a"), "say b"],
            False,
            r"^messages\[1\] must be an object with role and content, not str",
        ),
        ([user("say a"), []], False, "^conversation 1: messages is empty"),
        ([user("say a"), [{"role": "boss", "content": "b"}]], False, r"^conversation 1: messages\[0\]\.role"),
        ([], False, "^messages is empty"),
    ],
)
def test_what_is_neither_one_nor_several_conversations(
    llm: LLM, engine: ScriptedEngine, messages: Chats, stream: bool, said: str
) -> None:
    chat: Any = llm.chat  # no overload has several conversations and a stream
    with pytest.raises(OptionError, match=said):
        chat(messages, stream=stream)
    assert engine.requests == []


def test_render_shows_the_text_for_the_model(tiny_llm: LLM) -> None:
    assert tiny_llm.render("hi") == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    without = tiny_llm.render("hi", template_options={"add_generation_prompt": False})
    assert without == "<|im_start|>user\nhi<|im_end|>\n"
    assert "weather" in tiny_llm.render("hi", tools=[WEATHER])


# --- keywords


def test_keywords_change_a_copy_of_the_params(llm: LLM, engine: ScriptedEngine) -> None:
    params = SamplingParams(top_k=7, max_tokens=9)
    llm.generate("say a", params, temperature=0, stop="END")
    llm.chat("say a", temperature=0)
    list(llm.stream("say a", seed=3))
    first, second, third = (request.params for request in engine.requests)
    assert (first.top_k, first.max_tokens, first.temperature, first.stop) == (7, 9, 0, ("END",))
    assert (params.temperature, params.stop) == (None, ())
    assert second == SamplingParams(temperature=0)
    assert third.seed == 3


def test_keywords_begin_with_the_options_of_the_model(engine: ScriptedEngine) -> None:
    scripted_llm(engine, max_tokens=5, temperature=0.5).generate("say a", seed=1)
    params = engine.requests[0].params
    assert (params.max_tokens, params.temperature, params.seed) == (5, 0.5, 1)


def test_wrong_keywords_are_answered_with_the_right_ones(llm: LLM) -> None:
    wrong: dict[str, Any] = {"temperatur": 0}
    with pytest.raises(
        OptionError, match="unknown sampling parameter 'temperatur': did you mean temperature"
    ):
        llm.generate("say a", **wrong)
    wrong_option: dict[str, Any] = {"n_ctx": 5}
    with pytest.raises(OptionError, match="unknown option n_ctx: did you mean ctx"):
        LLM(**wrong_option)
    of_commands: dict[str, Any] = {"port": 80}
    with pytest.raises(OptionError, match="port is an option of commands only"):
        LLM(**of_commands)


def test_the_keywords_of_type_checkers_are_current() -> None:
    assert keywords.PATH.read_text(encoding="utf-8") == keywords.source(), "python -m tests.tools.keywords"


def test_every_parameter_has_a_meaning() -> None:
    meanings = keywords.sampling_meanings()
    assert set(meanings) == set(SamplingKeywords.__optional_keys__)
    assert all(meanings.values())
    assert {"ctx", "ram", "tool_parser"} <= ModelOptions.__optional_keys__
    assert not keywords.OF_COMMANDS & ModelOptions.__optional_keys__


# --- what it shows


def public(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_")]


def test_dir_lists_the_interface_only() -> None:
    assert public(LLM) == [
        *("chat", "close", "detokenize", "embed", "generate", "info", "load_prompts", "logits", "memory"),
        *("plan", "render", "rerank", "save_prompts", "set_ram", "stats", "stream", "tokenize"),
    ]
    assert public(AsyncLLM) == public(LLM)


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_every_parameter_is_documented(kind: type[LLM] | type[AsyncLLM]) -> None:
    constructor = kind.__init__.__doc__ or ""
    assert all(f"        {name}: " in constructor for name in ModelOptions.__optional_keys__)
    for name in public(kind):
        assert getattr(kind, name).__doc__, name
    for name in ("generate", "chat", "embed", "render", "set_ram", "save_prompts", "load_prompts"):
        method = getattr(LLM, name)
        parameters = set(inspect.signature(method).parameters) - {"self"}
        assert parameters <= set(re.findall(r"\b\w+\b(?=[\w, ]*:)", method.__doc__)), name


def test_it_shows_its_model_and_context(tiny_llm: LLM) -> None:
    assert repr(tiny_llm) == f"<LLM {tiny_llm.info.id}, context {tiny_llm.info.context}>"


def test_events_and_chunks_show_no_empty_fields() -> None:
    assert repr(Event("token", "a", 5)) == "Event(kind='token', text='a', token=5)"
    assert repr(ChatChunk("a")) == "ChatChunk(text='a')"


def test_one_text_is_one_row_of_vectors(tiny_llm: LLM) -> None:
    found = tiny_llm.embed("a")
    assert found.shape == (1, tiny_llm.info.width)
    assert found.dtype == np.float32


# --- errors


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("shorten it, or ask for more with --ctx", "shorten it, or ask for more with ctx=..."),
        ("--ram 100 MiB is too little", 'ram="100 MiB" is too little'),
        ("ctx (--ctx) must be an integer", "ctx must be an integer"),
        ("--kv-type q8_0 needs heads", 'kv_type="q8_0" needs heads'),
        ("--spec draft:MODEL takes a file", 'spec="draft:MODEL" takes a file'),
        ("use another with --chat-template FILE", "use another with chat_template FILE"),
        ("--deterministic is not available here", "deterministic=True is not available here"),
        ("no: --backend llamacpp", 'no: backends=["llamacpp"]'),
        ("--ctx-size is none of them", "--ctx-size is none of them"),
    ],
)
def test_flags_become_keywords(said: str, heard: str) -> None:
    assert python_words(said) == heard


def test_errors_name_keywords(tiny_llm: LLM) -> None:
    with pytest.raises(ContextFull, match="ask for more with ctx=") as refused:
        tiny_llm.generate([[5] * (tiny_llm.info.context + 1)])
    assert "--" not in str(refused.value)
    with pytest.raises(OptionError, match=r"^ctx must be an integer of 1 or more"):
        LLM(ctx=0)


def test_a_closed_model_says_so_at_once() -> None:
    llm = LLM(model_file(GQA), backends=["reference"], planner="static")
    llm.close()
    llm.close()
    assert repr(llm).endswith(", closed>")
    with pytest.raises(EngineStopped, match="was closed"), llm:
        pytest.fail("it was entered")
    with pytest.raises(EngineStopped, match="was closed"):
        llm.stream("a")
    with pytest.raises(EngineStopped, match="was closed"):
        llm.chat("a", stream=True)


def test_it_is_not_pickled_and_not_copied(llm: LLM) -> None:
    with pytest.raises(
        TypeError, match=r"a model cannot be pickled: open it in each process with LLM\(path\)"
    ):
        pickle.dumps(llm)
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.copy(llm)


def test_a_call_is_json_for_others(llm: LLM) -> None:
    (call,) = llm.chat(f"say {CALL}", tools=[WEATHER]).tool_calls
    assert json.loads(json.dumps(call.to_json()))["function"]["name"] == "weather"
