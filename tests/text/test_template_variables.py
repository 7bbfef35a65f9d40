"""Variables that templates get by themselves: the date, whether to think, tools by another name."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from hetrun.config import Settings
from hetrun.engine.factory import renderer, template_variables
from hetrun.errors import OptionError
from hetrun.text.chat import ChatTemplate
from hetrun.text.chat.reasoning import opened_in
from hetrun.text.chat.renderer import TemplateWorker
from hetrun.text.chat.tool_prompt import needs_telling
from hetrun.text.tool_parsers.formats import family, takes_functions

HI = [{"role": "user", "content": "Hi"}]
DATED = (
    "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "Today Date: {{ date_string }}|{{ datetime }}"
)
# How templates ask for thoughts: as QwQ's in llama.cpp, as Qwen 3's, Gemma 4's, SmolLM3's.
BARE = "a{% if not enable_thinking %}<think>\n\n</think>{% else %}<think>\n{% endif %}"
ON = "{% if enable_thinking is defined and enable_thinking is false %}off{% else %}on{% endif %}"
OFF = "{% if enable_thinking is defined and enable_thinking %}on{% else %}off{% endif %}"
SET = (
    "{% if not enable_thinking is defined %}{% set enable_thinking = false %}{% endif %}{{ enable_thinking }}"
)
FALLBACK = "{{ enable_thinking | default(false) }}"
# As firefunction has it.
FUNCTIONS = (
    "{% set end = 'You can call functions.\n' + functions + '\nToday is ' + datetime + '.' %}"
    "{{ end }}{% for m in messages %}{% if m.tool_calls is defined %}{{ ' functools[' }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "weather", "description": "Wetter"}}]


def rendered(source: str, **variables: Any) -> str:  # noqa: ANN401
    with TemplateWorker(ChatTemplate(source, "x")) as worker:
        return worker.render(HI, **variables)


def test_the_date_of_today() -> None:
    before = datetime.now()
    date, other = rendered(DATED).removeprefix("Today Date: ").split("|")
    days = {before.date(), datetime.now().date()}  # it may be midnight
    assert datetime.strptime(date, "%d %b %Y").date() in days
    assert datetime.strptime(other, "%b %d %Y").date() in days


def test_a_date_that_a_request_sets() -> None:
    assert rendered(DATED, date_string="1 Jan 2025").startswith("Today Date: 1 Jan 2025|")


def test_thinking_is_on_where_a_template_takes_the_variable_for_granted() -> None:
    assert rendered(BARE) == "a<think>\n"
    assert opened_in(rendered(BARE)) == "<think>"  # so that the answer is read as a thought
    assert rendered(BARE, enable_thinking=False) == "a<think>\n\n</think>"
    assert opened_in(rendered(BARE, enable_thinking=False)) == ""


@pytest.mark.parametrize(("source", "text"), [(ON, "on"), (OFF, "off"), (SET, "False"), (FALLBACK, "False")])
def test_a_template_with_a_default_of_its_own_keeps_it(source: str, text: str) -> None:
    assert rendered(source) == text


def test_tools_by_the_name_of_functions() -> None:
    assert takes_functions(FUNCTIONS)
    assert family(FUNCTIONS) == "phi"  # the form of functools[...]
    assert not needs_telling(ChatTemplate(FUNCTIONS, "x"), TOOLS)
    assert rendered(FUNCTIONS).startswith("You can call functions.\n\nToday is ")
    text = rendered(FUNCTIONS, tools=TOOLS)
    assert json.loads(text[len("You can call functions.\n") : text.index("\nToday")]) == TOOLS


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'the provided functions' }}",
        "{% if functions is defined %}{{ functions }}{% endif %}",
        "{% for t in tools %}{{ t.functions }}{% endfor %}",
        "{{ functions.join(tools) }}",
    ],
)
def test_other_uses_of_the_word(source: str) -> None:
    assert not takes_functions(source)


# --- what the options of these names say


def with_options(source: str, options: dict[str, object], **given: object) -> str:
    settings = Settings.resolve(environ={}, **given)
    with TemplateWorker(ChatTemplate(source, "x")) as worker:
        return renderer(worker, None, template_variables(settings))(tuple(HI), options)


def test_reasoning_is_switched_for_all_requests() -> None:
    assert with_options(ON, {}) == "on"
    assert with_options(ON, {}, reasoning="off") == "off"
    assert with_options(OFF, {}, reasoning="on") == "on"
    assert with_options("{{ thinking }}", {}, reasoning="on") == "True"


def test_a_request_says_otherwise() -> None:
    assert with_options(ON, {"enable_thinking": True}, reasoning="off") == "on"
    kwargs = {"enable_thinking": False, "mood": "x"}
    assert with_options(ON + "{{ mood }}", {"mood": "y"}, chat_template_kwargs=kwargs) == "offy"


def test_variables_outweigh_the_switch() -> None:
    assert with_options(ON, {}, reasoning="off", chat_template_kwargs={"enable_thinking": True}) == "on"


def test_variables_may_be_json_or_a_table(tmp_path: Path) -> None:
    environ = {"HETRUN_CHAT_TEMPLATE_KWARGS": '{"mood": ["x"]}'}
    assert Settings.resolve(environ=environ).chat_template_kwargs == {"mood": ["x"]}
    path = tmp_path / "config.toml"
    path.write_text('reasoning = "off"\n[chat_template_kwargs]\nmood = "x"\n')
    settings = Settings.resolve(environ={"HETRUN_CONFIG": str(path)})
    assert (settings.reasoning, settings.chat_template_kwargs) == ("off", {"mood": "x"})


@pytest.mark.parametrize("value", ["[1]", "{", "x", '{"a": NaN}', 5, {"a": object()}])
def test_variables_that_are_no_object(value: object) -> None:
    with pytest.raises(
        OptionError, match=r"chat_template_kwargs \(--chat-template-kwargs\) must be a JSON obj"
    ):
        Settings.resolve(environ={}, chat_template_kwargs=value)


def test_variables_that_are_hetruns_own() -> None:
    settings = Settings.resolve(environ={}, chat_template_kwargs={"messages": []})
    with pytest.raises(OptionError, match="may not set messages"):
        template_variables(settings)
