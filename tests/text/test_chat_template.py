"""Chat templates: the same text as transformers, which one is in use and why, and what is wrong with one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hetrun.errors import OptionError, TemplateError
from hetrun.text.chat import ChatTemplate, checked_messages
from hetrun.text.chat.messages import variants
from hetrun.text.chat.renderer import TemplateWorker
from hetrun.text.chat.template import CHATML, MOST_SOURCE, NO_TEMPLATE
from tests.text.chat_styles import STYLES

HI = [{"role": "user", "content": "Hi"}]
TALK = [
    {"role": "system", "content": "You are terse. "},
    {"role": "user", "content": " What is 2+2?\n"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And <b>3</b> & \"4\" 'é' 🙂?"},
]
THOUGHTS: list[dict[str, Any]] = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nFour."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes.", "thinking": "Again.\n"},
]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Zürich?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "abcdef123",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
            }
        ],
    },
    {"role": "tool", "content": '{"c": 21}', "tool_call_id": "abcdef123", "name": "weather"},
    {"role": "assistant", "content": "21 degrees."},
    {"role": "user", "content": "Thanks"},
]
TALKS = {
    "one": HI,
    "talk": TALK,
    "no system": TALK[1:3],
    "thoughts": THOUGHTS,
    "calls": CALLS,
    "a call last": CALLS[:2],
}
PROPERTIES = {"city": {"type": "string"}, "days": {"type": ["integer", "null"]}, "<x>": {"type": "array"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "größe & 'x'",
            "parameters": {
                "type": "object",
                "properties": {k: v for k, v in PROPERTIES.items() if k != "<x>"},
            },
        },
    }
]
DOCUMENTS = [{"title": "A", "text": "b\nc"}]

WorkerOf = Callable[[str], TemplateWorker]


@pytest.fixture(scope="module")
def worker_of() -> Iterator[WorkerOf]:
    """One process for each template."""
    made: dict[str, TemplateWorker] = {}

    def worker(source: str) -> TemplateWorker:
        if source not in made:
            made[source] = TemplateWorker(ChatTemplate(source, "the test's template"))
        return made[source]

    yield worker
    for one in made.values():
        one.close()


def transformers_rendering(source: str, messages: list[dict[str, Any]], **variables: object) -> str:
    utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="needs transformers")
    rendered, _ = utils.render_jinja_template([messages], chat_template=source, **variables)
    return str(rendered[0])


@cache
def transformers_tokenizer() -> Any:  # noqa: ANN401
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )


# --- the text


SPECIAL: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
WITH: list[dict[str, Any]] = [{}, {"tools": TOOLS}, {"documents": DOCUMENTS, "enable_thinking": False}]


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("style", STYLES)
def test_text_is_what_transformers_writes(style: str, talk: str, worker_of: WorkerOf) -> None:
    for prompt in (True, False):
        for extra in WITH:
            variables = {"add_generation_prompt": prompt, **extra}
            expected, refusal = expectation(STYLES[style], talk, variables)
            text, said = None, ""
            try:
                text = worker_of(STYLES[style]).render(TALKS[talk], **variables, **SPECIAL)
            except TemplateError as error:
                said = str(error)
            assert text == expected
            assert text is not None or refusal in said


def expectation(source: str, talk: str, variables: dict[str, Any]) -> tuple[str | None, str]:
    """What transformers writes; or why it does not, and then what it writes if calls of tools are put in
    another way, which it does not try by itself."""
    try:
        return transformers_tokenizer().apply_chat_template(
            TALKS[talk], chat_template=source, tokenize=False, **variables
        ), ""
    except Exception as error:
        refusal = str(error)[:100]
    for messages in variants(checked_messages(TALKS[talk])):
        with suppress(Exception):
            return transformers_rendering(source, messages, **variables, **SPECIAL), refusal
    return None, refusal


def test_the_table_has_texts_and_refusals(worker_of: WorkerOf) -> None:
    texts = {style: worker_of(source).render(TALK, bos_token="<s>") for style, source in STYLES.items()}
    assert len(STYLES) >= 16
    assert len(set(texts.values())) >= 14
    assert all(
        "3</b> & \"4\" 'é' 🙂?" in text for style, text in texts.items() if style not in ("turns", "tools")
    )
    assert "And <b>3…" not in texts["turns"]
    with pytest.raises(
        TemplateError, match=r"template, line \d+: the template refuses these messages: user and"
    ):
        worker_of(STYLES["mistral"]).render([*HI, *HI])
    assert "<think>\n\n</think>" in worker_of(STYLES["qwen3"]).render(HI, enable_thinking=False)
    assert '{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}' in worker_of(
        STYLES["qwen3"]
    ).render(CALLS, tools=TOOLS)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content + '|' }}{% endfor %}", "Weather in Zürich?||"),
        (
            "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.arguments }}"
            "{% else %}{{ m.content + '|' }}{% endif %}{% endfor %}",
            "Weather in Zürich?|{'city': 'Zürich', 'days': 2}",
        ),
        (
            "{% for m in messages %}{% if m.tool_calls %}"
            "{{ 'f(' + m.tool_calls[0].function.arguments + ')' }}{% else %}"
            "{{ m.content + '|' }}{% endif %}{% endfor %}",
            'Weather in Zürich?|f({"city": "Zürich", "days": 2})',
        ),
    ],
    ids=["an empty text", "none", "arguments as text"],
)
def test_calls_of_tools_are_put_as_a_template_wants_them(
    source: str, expected: str, worker_of: WorkerOf
) -> None:
    assert worker_of(source).render(CALLS[:2]) == expected


def test_channels_by_hand(worker_of: WorkerOf) -> None:
    """What clients say of thoughts, efforts and tools arrives; also what such a template would refuse."""
    worker = worker_of(STYLES["channels"])
    nameless = [{"type": "function", "function": {"name": "now"}}]
    text = worker.render(HI, tools=nameless, reasoning_effort="high", builtin_tools=["python"])
    assert "\nReasoning: high\nYou have Python.<|end|>" in text
    assert "// \ntype now = () => any;" in text
    assert text.endswith("<|start|>user<|message|>Hi<|end|><|start|>assistant")
    calls: list[dict[str, Any]] = [{**CALLS[1], "reasoning_content": "Hm."}, CALLS[2]]
    expected = (
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "Zürich", "days": 2}<|call|><|start|>functions.weather to=assistant<|channel|>commentary'
    )
    for content in (None, "", "Let me look."):
        assert expected in worker.render([*HI, {**calls[0], "content": content}, calls[1]])
    with pytest.raises(TemplateError, match="no channels in content"):
        worker.render([*HI, {"role": "assistant", "content": "<|channel|>final<|message|>Yes"}])


def test_chatml_by_hand(worker_of: WorkerOf) -> None:
    worker = worker_of(CHATML)
    assert worker.render(HI) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert worker.render(HI, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_variables_of_the_template(worker_of: WorkerOf) -> None:
    worker = worker_of("{{ self_ | default(0) }}{{ mood }}{{ tools }}{{ documents }}{{ deep.a[0].b }}")
    variables: dict[str, Any] = {"self": 1, "mood": "x", "deep": {"a": [{"b": None}]}}
    assert worker.render(HI, **variables) == "0xNoneNoneNone"
    with pytest.raises(OptionError, match=r"variables.deep holds a object, which is not JSON"):
        worker.render(HI, deep=object())
    with pytest.raises(OptionError, match=r"variables.mood holds U\+D800, half of a character"):
        worker.render(HI, mood="\ud800")


def test_the_date(worker_of: WorkerOf) -> None:
    before = datetime.now()
    found = worker_of("{{ strftime_now('%Y-%m-%d %H:%M') }}").render(HI)
    form = "%Y-%m-%d %H:%M"
    assert before.strftime(form) <= found <= datetime.now().strftime(form)


def test_long_messages_are_allowed(worker_of: WorkerOf) -> None:
    text = "long 🙂\n" * 300_000
    assert text in worker_of(CHATML).render([{"role": "user", "content": text}])
    with pytest.raises(OptionError, match="the messages take 33 MiB, and hetrun reads up to 32: send less"):
        worker_of(CHATML).render([{"role": "user", "content": "x" * (33 << 20)}])


# --- which template


@dataclass
class Model:
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    chat_template_place: str = "the file"
    path: str = "m.gguf"


@pytest.mark.parametrize(
    ("named", "source", "origin"),
    [
        ({}, CHATML, "ChatML, because the model has none"),
        ({"default": "d"}, "d", "the model's own (the file)"),
        ({"rag": "r", "default": "d"}, "d", "the model's own (the file), named default; it also has rag"),
        ({"rag": "r"}, "r", "the model's own (the file), named rag, because it has none named default"),
        (
            {"tool_use": "t"},
            "t",
            "the model's own (the file), named tool_use, because it has none named default",
        ),
        (
            {"default": "d", "tool_use": "t", "\x1b[31m": "x"},
            "d",
            "the model's own (the file), named default; it also has tool_use, \u241b[31m"
            " (tool_use is used where tools are given)",
        ),
    ],
)
def test_the_models_own(named: dict[str, str], source: str, origin: str) -> None:
    found = ChatTemplate.of_model(Model(named))
    assert (found.source, found.origin) == (source, origin)
    assert found.path == ("m.gguf" if named else "")
    assert (found.for_tools is not None) == ("tool_use" in named and "default" in named)


def test_a_template_of_its_own_for_tools() -> None:
    model = Model({"default": "plain", "tool_use": "tools{{ tools | length }}{{ x.y.z }}"})
    with TemplateWorker(ChatTemplate.of_model(model)) as worker:
        assert worker.render(HI) == worker.render(HI, tools=[]) == "plain"
        with pytest.raises(
            TemplateError, match=r"named tool_use, because tools are given, line 1: 'x' is und"
        ):
            worker.render(HI, tools=TOOLS)
        assert worker.render(HI, tools=TOOLS, x={"y": {"z": 3}}) == "tools13"


def test_a_template_from_a_file(tmp_path: Path, worker_of: WorkerOf) -> None:
    path = tmp_path / "x.jinja"
    path.write_text("\ufeff{{ messages[0].content }}!", encoding="utf-8")
    found = ChatTemplate.named(path)
    assert found.origin == f"--chat-template {path}"
    assert worker_of(found.source).render(HI) == "Hi!"
    path.write_bytes(b"x\xff\xfe")
    with pytest.raises(TemplateError, match=r"x.jinja: byte 1 is not UTF-8 text; give a file with a Jinja"):
        ChatTemplate.named(path)
    with pytest.raises(TemplateError, match=r"missing: No such file or directory; .* or a name such as"):
        ChatTemplate.named(tmp_path / "missing")
    with pytest.raises(TemplateError, match=r"is a directory, not a file"):
        ChatTemplate.named(tmp_path)
    path.write_text("a" * (MOST_SOURCE + 1), encoding="utf-8")
    with pytest.raises(TemplateError, match=r"x.jinja: longer than 131,072 characters"):
        TemplateWorker(ChatTemplate.named(path)).render(HI)
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(TemplateError, match=f"{name}: is not a regular file; give a file with a Jinja"):
            ChatTemplate.named(name)


def test_a_template_given_as_text(worker_of: WorkerOf) -> None:
    found = ChatTemplate.named("{{ messages[0].content }} // x")
    assert found.origin == "--chat-template, given as text"
    assert worker_of(found.source).render(HI) == "Hi // x"


def test_a_name_that_is_nearly_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TemplateError, match=r"lama3: No such file or directory; .* a name such as llama3$"):
        ChatTemplate.named("lama3")


def test_a_template_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ChatTemplate.named("chatml") == ChatTemplate(
        CHATML, "--chat-template chatml, which is built into hetrun"
    )
    Path("chatml").write_text("mine")
    assert ChatTemplate.named(Path("chatml")).source == "mine"


def test_no_template() -> None:
    assert ChatTemplate.of_model(Model()) == ChatTemplate(CHATML, NO_TEMPLATE)


# --- errors


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "a\n\n{{ raise_exception('only user') }}",
            ", line 3: the template refuses these messages: only user",
        ),
        ("a\n{{ messages[0].foo.bar }}", ", line 2: 'dict object' has no attribute 'foo'"),
        ("{% if true %}\n{{ 1 + 'a' }}{% endif %}", ", line 2: TypeError: unsupported operand"),
        ("\n\n{% for %}", ", line 3: Expected an expression"),
        ("x\n{{ 'a' | nofilter }}", ", line 2: No filter named 'nofilter'."),
        ("{% macro m() %}\n\n{{ 1 / 0 }}{% endmacro %}{{ m() }}", ", line 3: ZeroDivisionError: division by"),
        ("{% break %}", ": SyntaxError: 'break' outside loop"),
        (
            "a\n{{ raise_exception('\\x1b[31m\\nred') }}",
            ", line 2: the template refuses these messages: ␛[31m red;",
        ),
    ],
)
def test_errors_name_the_template_and_the_line(source: str, said: str) -> None:
    with TemplateWorker(ChatTemplate(source, "the test's template")) as worker:
        with pytest.raises(TemplateError) as caught:
            worker.render(HI)
        assert worker.pid is not None  # an error is no reason to start again
    assert str(caught.value).startswith("the test's template" + said)
    assert str(caught.value).endswith("; use another with --chat-template FILE")


@pytest.mark.parametrize(
    ("source", "said"), [("x" * (1 << 24), "longer than 131,"), ("\ud800", "half of a char")]
)
def test_what_is_no_template_at_all(source: str, said: str) -> None:
    """A JSON file may hold any of these."""
    template = ChatTemplate("{{ messages[0].content }}", "x", ChatTemplate(source, "the other"))
    with TemplateWorker(template) as worker:
        worker.warm()
        with pytest.raises(TemplateError, match=f"the other: .*{said}"):
            worker.render(HI, tools=TOOLS)
        assert worker.render(HI) == "Hi"


def test_a_mistake_shows_before_the_first_message(worker_of: WorkerOf) -> None:
    with (
        TemplateWorker(ChatTemplate("{% if %}", "x")) as worker,
        pytest.raises(TemplateError, match="x, line 1: "),
    ):
        worker.check()
    worker_of(CHATML).check()
