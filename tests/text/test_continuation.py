"""A last message that is continued: where the prompt ends, what of it is thought, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from hetrun.errors import FieldError, OptionError
from hetrun.text.answers.reading import AnswerFormat
from hetrun.text.chat import ChatTemplate, checked_messages
from hetrun.text.chat.continuation import part_of, thought_within, written
from hetrun.text.chat.renderer import TemplateWorker
from hetrun.text.chat.template import CHATML
from hetrun.text.tool_parsers.parts import Piece, Prose, Thought
from tests.text.chat_styles import STYLES
from tests.text.test_chat_template import SPECIAL, transformers_tokenizer

BOOK: list[dict[str, Any]] = [{"role": "user", "content": "Book?"}]
ENDS = ("Whill", "Whill ", "\n  Whill\n", "a\n\nb")
THINKING = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


def assistant(content: str = "", **more: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def rendered(source: str, last: dict[str, Any], wanted: bool | str = True) -> str:
    with TemplateWorker(ChatTemplate(source, "x")) as worker:
        return worker.render([*BOOK, last], continue_final_message=wanted, **SPECIAL)


@pytest.mark.parametrize("style", ["chatml", "llama3", "mistral", "gemma", "phi3", "zephyr", "qwen3"])
def test_prompts_end_where_those_of_transformers_do(style: str) -> None:
    tokenizer = transformers_tokenizer()
    with TemplateWorker(ChatTemplate(STYLES[style], "x")) as worker:
        for content in ENDS:
            talk = [*BOOK, assistant(content)]
            expected = tokenizer.apply_chat_template(
                talk, chat_template=STYLES[style], tokenize=False, continue_final_message=True
            )
            text = worker.render(talk, continue_final_message=True, **SPECIAL)
            assert text == expected
            assert text.rstrip().endswith(content.strip())


def test_by_hand() -> None:
    assert rendered(CHATML, assistant("Whill ")) == (
        "<|im_start|>user\nBook?<|im_end|>\n<|im_start|>assistant\nWhill "
    )
    assert rendered(STYLES["llama3"], assistant("Whill ")).endswith("<|end_header_id|>\n\nWhill")  # trimmed


def test_thoughts_are_continued_where_nothing_was_said_yet() -> None:
    assert rendered(THINKING, assistant("", reasoning_content="Let me")).endswith("<think>\nLet me")
    said = assistant("It is", reasoning_content="Let me see.")
    assert rendered(THINKING, said).endswith("Let me see.\n</think>\n\nIt is")
    assert rendered(THINKING, said, "reasoning_content").endswith("<think>\nLet me see.")
    assert rendered(THINKING, said, "content").endswith("\n\nIt is")


@pytest.mark.parametrize(
    ("last", "wanted", "mark", "before"),
    [
        (assistant("It is"), True, "", "It is"),
        (assistant("", reasoning_content="Let me"), True, "<think>", "Let me"),
        (assistant("It is", reasoning_content="Hm."), True, "", "It is"),
        (assistant("It is", reasoning_content="Hm."), "reasoning_content", "<think>", "Hm."),
        (
            assistant("<think>\nLet me"),
            True,
            "<think>",
            "<think>\nLet me",
        ),  # as clients of llama.cpp write it
        (assistant("<think>\nHm.\n</think>\nIt"), True, "", "<think>\nHm.\n</think>\nIt"),
    ],
)
def test_whether_the_answer_goes_on_with_a_thought(
    last: dict[str, Any], wanted: bool | str, mark: str, before: str
) -> None:
    prompt = rendered(THINKING, last, wanted)
    checked = checked_messages([last])[0]
    assert (thought_within(prompt, checked, wanted), written(prompt, checked, wanted)) == (mark, before)


def test_a_question_about_marks_opens_no_thought() -> None:
    with TemplateWorker(ChatTemplate(CHATML, "x")) as worker:
        talk = [{"role": "user", "content": "What is <think>?"}, assistant("A")]
        prompt = worker.render(talk, continue_final_message=True)
    assert thought_within(prompt, talk[-1], True) == ""


def test_a_template_that_leaves_the_message_out() -> None:
    with pytest.raises(OptionError, match="the chat template leaves the last message out"):
        rendered("{{ messages[0].content }}", assistant("A"))


@pytest.mark.parametrize(
    ("last", "wanted", "said"),
    [
        (BOOK[0], True, "needs a last message of the assistant"),
        (assistant("A"), "thoughts", "must be true, false, content or reasoning_content, not 'thoughts'"),
        (assistant("A"), 1.5, "must be true"),
        (assistant("A"), "reasoning_content", "the last message has no reasoning_content"),
        ({**assistant(), "tool_calls": [{}]}, True, "a message with tool_calls cannot be continued"),
    ],
)
def test_what_cannot_be_continued(last: dict[str, Any], wanted: object, said: str) -> None:
    with pytest.raises(FieldError, match=said):
        part_of(last, wanted)


def read(how: AnswerFormat, *texts: str, opened: bool = False) -> list[Piece]:
    reader = how.reader()
    return [
        piece
        for i, text in enumerate((*texts, ""))
        for piece in reader.push(text, opened=opened and not i, last=i == len(texts))
    ]


def joined(pieces: list[Piece], kind: type[Prose] | type[Thought]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


@pytest.mark.parametrize("mark", ["<think>", "<|channel|>analysis<|message|>"])
def test_space_between_the_parts_of_a_message_is_kept(mark: str) -> None:
    how = AnswerFormat(thought=mark, resumed=True)
    assert joined(read(how, " on", " it goes"), Prose) == " on it goes"
    end = "</think>\n\n" if mark == "<think>" else "<|end|><|start|>assistant<|channel|>final<|message|>"
    pieces = read(how, " see", end, "Four.", opened=True)
    assert (joined(pieces, Thought), joined(pieces, Prose)) == (" see", "Four.")
