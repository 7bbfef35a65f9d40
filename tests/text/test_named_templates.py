"""Chat templates by name: the text that llama.cpp writes for the same name."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest

from hetrun.text.chat import ChatTemplate
from hetrun.text.chat.jinja_sandbox import compiled, rendered
from hetrun.text.chat.template import CHATML, built_in
from hetrun.text.tool_parsers.formats import takes_tools
from tests.support.paths import ROOT
from tests.support.peer import llama_cpp

Said = Sequence[tuple[str, str]]
# A conversation, and whether an answer is begun.
TALKS: dict[str, tuple[Said, bool]] = {
    "one": ([("user", " Hi\n")], True),
    "system": ([("system", " Be brief. "), ("user", "Hi")], True),
    "turns": ([("user", "2+2?"), ("assistant", " Four.\n"), ("user", "Sure?")], True),
    "all": (
        [("system", "Be 'brief'."), ("user", 'a\n"b"'), ("assistant", "é 🙂"), ("user", " Sure? ")],
        True,
    ),
    "ended": ([("system", "S"), ("user", "2+2?"), ("assistant", "Four.")], False),
}
# llama.cpp writes the mark of the assistant twice before each earlier answer; Tencent's template does not.
TWICE = "<｜hy_Assistant｜>"


def names_of_llama_cpp() -> list[str]:
    count = llama_cpp().llama_chat_builtin_templates(None, 0)
    names = (ctypes.c_char_p * count)()
    llama_cpp().llama_chat_builtin_templates(names, count)
    return [name.decode() for name in names]


def llama_cpp_rendering(name: str, said: Said, add_generation_prompt: bool) -> str:
    texts = [(role.encode(), content.encode()) for role, content in said]
    messages = (llama_cpp().llama_chat_message * len(texts))(
        *(llama_cpp().llama_chat_message(role=role, content=content) for role, content in texts)
    )
    buffer = ctypes.create_string_buffer(1 << 14)
    size = llama_cpp().llama_chat_apply_template(
        name.encode(), messages, len(texts), add_generation_prompt, buffer, len(buffer)
    )
    assert size >= 0, name
    return buffer.raw[:size].decode()


def test_there_is_one_for_each_name_of_llama_cpp() -> None:
    assert set(names_of_llama_cpp()) <= set(built_in())


@pytest.mark.parametrize("name", built_in())
def test_text_is_what_llama_cpp_writes(name: str) -> None:
    template = compiled(ChatTemplate.named(name).source)
    for said, begins in TALKS.values():
        messages = [{"role": role, "content": content} for role, content in said]
        text = rendered(template, {"messages": messages, "add_generation_prompt": begins}, 1 << 14)
        assert text == llama_cpp_rendering(name, said, begins).replace(2 * TWICE, TWICE)


def test_tools_are_told_to_models_of_these_templates() -> None:
    assert not any(takes_tools(source) for source in built_in().values())


def test_names_are_no_longer_taken_for_files_that_are_missing() -> None:
    found = ChatTemplate.named("llama3")
    assert found.origin == "--chat-template llama3, which is built into hetrun"
    assert "<|start_header_id|>" in found.source
    assert ChatTemplate.named("chatml").source == CHATML


def test_the_names_are_in_the_manual() -> None:
    manual = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert [name for name in built_in() if f"`{name}`" not in manual] == []
