"""Chat templates: the same text as transformers, which one is in use and why, a process that is looked after.

What hostile templates do is in tests/hostile/test_templates.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetrun.chat import ChatTemplate, checked_messages
from hetrun.chat import process as processes
from hetrun.chat.messages import checked_objects, variants
from hetrun.chat.renderer import TemplateWorker
from hetrun.chat.template import CHATML, MOST_SOURCE, NO_TEMPLATE
from hetrun.errors import EngineStopped, HetrunError, OptionError, TemplateError
from tests.unit.chat_styles import STYLES

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


@pytest.fixture(scope="module")
def worker_of() -> Iterator[Any]:
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


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
WITH: list[dict[str, Any]] = [{}, {"tools": TOOLS}, {"documents": DOCUMENTS, "enable_thinking": False}]


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("style", STYLES)
def test_text_is_what_transformers_writes(style: str, talk: str, worker_of: Any) -> None:  # noqa: ANN401
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


def test_the_table_has_texts_and_refusals(worker_of: Any) -> None:  # noqa: ANN401
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
    source: str,
    expected: str,
    worker_of: Any,  # noqa: ANN401
) -> None:
    assert worker_of(source).render(CALLS[:2]) == expected


def test_chatml_by_hand(worker_of: Any) -> None:  # noqa: ANN401
    worker = worker_of(CHATML)
    assert worker.render(HI) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert worker.render(HI, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_variables_of_the_template(worker_of: Any) -> None:  # noqa: ANN401
    worker = worker_of("{{ self_ | default(0) }}{{ mood }}{{ tools }}{{ documents }}{{ deep.a[0].b }}")
    assert worker.render(HI, **{"self": 1, "mood": "x", "deep": {"a": [{"b": None}]}}) == "0xNoneNoneNone"
    with pytest.raises(OptionError, match=r"variables.deep holds a object, which is not JSON"):
        worker.render(HI, deep=object())
    with pytest.raises(OptionError, match=r"variables.mood holds U\+D800, half of a character"):
        worker.render(HI, mood="\ud800")


def test_the_date(worker_of: Any) -> None:  # noqa: ANN401
    before = datetime.now()
    found = worker_of("{{ strftime_now('%Y-%m-%d %H:%M') }}").render(HI)
    form = "%Y-%m-%d %H:%M"
    assert before.strftime(form) <= found <= datetime.now().strftime(form)


def test_long_messages_are_allowed(worker_of: Any) -> None:  # noqa: ANN401
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


def test_a_template_from_a_file(tmp_path: Path, worker_of: Any) -> None:  # noqa: ANN401
    path = tmp_path / "x.jinja"
    path.write_text("\ufeff{{ messages[0].content }}!", encoding="utf-8")
    found = ChatTemplate.named(path)
    assert found.origin == f"--chat-template {path}"
    assert worker_of(found.source).render(HI) == "Hi!"
    path.write_bytes(b"x\xff\xfe")
    with pytest.raises(TemplateError, match=r"x.jinja: byte 1 is not UTF-8 text; give a file with a Jinja"):
        ChatTemplate.named(path)
    with pytest.raises(TemplateError, match=r"missing: No such file or directory; .* or a name: chatml$"):
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


def test_a_template_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ChatTemplate.named("chatml") == ChatTemplate(
        CHATML, "--chat-template chatml, which hetrun has built in"
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


def test_a_mistake_shows_before_the_first_message(worker_of: Any) -> None:  # noqa: ANN401
    with (
        TemplateWorker(ChatTemplate("{% if %}", "x")) as worker,
        pytest.raises(TemplateError, match="x, line 1: "),
    ):
        worker.check()
    worker_of(CHATML).check()


# --- the process


def test_one_process_for_all_conversations(worker_of: Any) -> None:  # noqa: ANN401
    worker = worker_of(CHATML)
    worker.warm()
    pid = worker.pid
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda i: worker.render([{"role": "user", "content": str(i)}]), range(100)))
    assert texts == [f"<|im_start|>user\n{i}<|im_end|>\n<|im_start|>assistant\n" for i in range(100)]
    assert worker.pid == pid


def test_warming_does_not_wait() -> None:
    with TemplateWorker(ChatTemplate("x" * MOST_SOURCE, "x")) as worker:
        began = time.monotonic()
        worker.warm()
        assert time.monotonic() - began < 0.5
        assert worker.pid
        assert worker.render(HI) == "x" * MOST_SOURCE


def test_a_killed_process_is_started_again() -> None:
    with TemplateWorker(ChatTemplate("{{ messages[0].content }}", "x")) as worker:
        assert worker.render(HI) == "Hi"
        first = worker.pid
        assert first
        os.kill(first, signal.SIGKILL)
        time.sleep(0.1)
        assert worker.render(HI) == "Hi"
        assert worker.pid != first


def test_what_the_process_has_given_up() -> None:
    with TemplateWorker(ChatTemplate(CHATML, "x")) as worker:
        worker.check()
        proc = Path(f"/proc/{worker.pid}")
        names = [os.readlink(path) for path in (proc / "fd").iterdir()]
        assert sorted(name.partition(":")[0] for name in names) == ["/dev/null"] * 3 + ["socket"]
        environment = (proc / "environ").read_bytes().split(b"\0")
        assert {entry.partition(b"=")[0] for entry in environment if entry} <= {
            name.encode() for name in processes.ENVIRONMENT
        }
        found = {line[:26].strip(): line[26:].split() for line in (proc / "limits").read_text().splitlines()}
        for name in ("Max file size", "Max open files", "Max processes", "Max core file size"):
            assert found[name][:2] == ["0", "0"], name
        assert int(found["Max address space"][0]) < 512 << 20


def test_the_process_ends_with_its_parent() -> None:
    code = (
        "from hetrun.chat import ChatTemplate; from hetrun.chat.renderer import TemplateWorker; import os\n"
        "worker = TemplateWorker(ChatTemplate('x', 'x')); worker.check(); print(worker.pid, flush=True)\n"
        "os._exit(0)"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30).stdout
    end = time.monotonic() + 10
    while Path(f"/proc/{int(said)}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{int(said)}").exists() or b"Z" in Path(f"/proc/{int(said)}/stat").read_bytes()


def test_a_worker_that_nobody_has_any_more_ends_its_process() -> None:
    worker = TemplateWorker(ChatTemplate("x", "x"))
    worker.check()
    pid = worker.pid
    del worker
    assert not Path(f"/proc/{pid}").exists()


def test_closing_ends_what_runs() -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    worker = TemplateWorker(ChatTemplate("{% if messages | length > 1 %}" + loop + "{% endif %}", "x"))
    assert worker.render(HI) == ""
    failed: list[BaseException] = []

    def render() -> None:
        try:
            worker.render([*HI, *HI])
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    time.sleep(0.1)
    worker.close()
    thread.join()
    assert [type(error) for error in failed] == [EngineStopped]
    with pytest.raises(EngineStopped):
        worker.render(HI)
    worker.close()


def test_closing_ends_what_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CHILD", "import time; time.sleep(60)")
    worker = TemplateWorker(ChatTemplate("x", "x"))
    worker.warm()
    closer = threading.Timer(0.1, worker.close)
    closer.start()
    with pytest.raises(EngineStopped):
        worker.render(HI)
    closer.join()


def test_a_process_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CHILD", "raise SystemExit(7)")
    with (
        TemplateWorker(ChatTemplate(CHATML, "x")) as worker,
        pytest.raises(HetrunError, match=r"did not start \(\w+, exit code 7\); see whether this works: "),
    ):
        worker.render(HI)


def test_jinja_is_for_the_child_alone() -> None:
    code = (
        "import sys; from hetrun.chat import ChatTemplate; from hetrun.chat.renderer import TemplateWorker\n"
        "worker = TemplateWorker(ChatTemplate('{{ 1 + 1 }}', 'x'))\n"
        "assert worker.render([{'role': 'user', 'content': ''}]) == '2'; assert 'jinja2' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_the_child_imports_little() -> None:
    code = "import sys, hetrun.chat.child; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=30
    )
    modules = found.stdout.split()
    assert {m for m in modules if m.startswith("hetrun.") and not m.startswith("hetrun.chat")} <= {
        "hetrun.errors",
        "hetrun.files",
        "hetrun.visible",
    }
    assert not {"numpy", "subprocess", "asyncio", "socket", "multiprocessing", "ctypes"} & {*modules}


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
            [{"role": "user", "content": "a", "x": 1 << 9999}],
            "messages[0].x is a number of more than 8192 bits",
        ),
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
        checked_messages(messages)
    assert said in str(caught.value)


def test_depth_is_bounded() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(OptionError, match="nested more than 64 deep"):
        checked_messages([{"role": "user", "content": "a", "x": deep}])


@pytest.mark.parametrize(
    ("tools", "said"),
    [("x", "tools must be a list"), ([1], r"tools\[0\] must be a JSON object, not int")],
)
def test_tools_that_cannot_be_used_are_named(tools: Any, said: str) -> None:  # noqa: ANN401
    with pytest.raises(OptionError, match=said):
        checked_objects("tools", tools)


def test_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert checked_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"
    assert checked_messages([{"role": "user", "content": []}])[0]["content"] == ""


def test_tool_calls_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    broken = {"function": {"name": "g", "arguments": "{"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call, broken]}
    checked = checked_messages([message])[0]
    assert "content" not in checked
    assert checked["tool_calls"][0]["function"]["arguments"] == {"x": [1]}
    assert checked["tool_calls"][1]["function"]["arguments"] == "{"
    assert call["function"] == {"name": "f", "arguments": '{"x": [1]}'}


def test_a_template_gets_plain_values(worker_of: Any) -> None:  # noqa: ANN401
    class Sly(str):
        def harm(self) -> str:
            return "harm"

    class SlyInt(int):
        def harm(self) -> str:
            return "harm"

    messages = [{"role": "user", "content": Sly("a"), "n": SlyInt(1)}]
    for source in ("{{ messages[0].content.harm() }}", "{{ messages[0].n.harm() }}"):
        with pytest.raises(TemplateError, match="has no attribute 'harm'"):
            worker_of(source).render(messages)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200)
@given(messages=st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), json_values), max_size=3))
def test_any_json_is_rendered_or_refused_in_a_sentence(
    worker_of: Any,  # noqa: ANN401
    messages: list[dict[str, Any]],
) -> None:
    refused, text = "", ""
    try:
        text = worker_of(CHATML).render(messages)
    except OptionError as error:
        refused = str(error)
    assert refused.startswith("messages") or text.endswith("<|im_start|>assistant\n")
