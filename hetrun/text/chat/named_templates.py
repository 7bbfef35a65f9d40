"""Chat templates by llama.cpp's names (`--chat-template llama3`), for files without one, or with a wrong one.

They write plain conversations: no tools, and no token for the beginning, which the tokenizer adds. Most
formats have something before and after the text of every message. Those are rows of a table, from which the
Jinja is made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

ROLE = "ROLE"  # in a row: the message's role
COLON = "\uff1a"  # the Chinese one


@dataclass(frozen=True)
class MessageFrame:
    """What stands before and after a message's text."""

    before: str
    after: str
    trim: bool = False


@dataclass(frozen=True)
class Turns:
    """A conversation, message by message. The beginning of an answer is what stands before the assistant's
    text, without the space at its end, unless it is said."""

    user: MessageFrame
    assistant: MessageFrame
    system: MessageFrame
    answer: str | None = None
    begin: str = ""
    without_system: str = ""  # instead of a system message, if there is none
    note: str = ""

    def jinja(self) -> str:
        """The template."""
        answer = self.assistant.before.rstrip(" ") if self.answer is None else self.answer
        default = (
            f"{{% if messages[0].role != 'system' %}}{{{{ {_text(self.without_system)} }}}}{{% endif %}}"
        )
        return "".join(
            (
                f"{{#- {self.note} -#}}" if self.note else "",
                f"{{{{ {_text(self.begin)} }}}}" if self.begin else "",
                default if self.without_system else "",
                "{% for message in messages %}{% if message.role == 'system' %}",
                _written(self.system),
                "{% elif message.role == 'assistant' %}",
                _written(self.assistant),
                "{% else %}",
                _written(self.user),
                "{% endif %}{% endfor %}",
                f"{{% if add_generation_prompt %}}{{{{ {_text(answer)} }}}}{{% endif %}}" if answer else "",
            )
        )


def _text(text: str) -> str:
    """A text in Jinja."""
    return json.dumps(text, ensure_ascii=False)


def _written(turn: MessageFrame) -> str:
    content = "message.content | trim" if turn.trim else "message.content"
    before = " ~ message.role ~ ".join(_text(part) for part in turn.before.split(ROLE))
    return f"{{{{ {before} ~ ({content}) ~ {_text(turn.after)} }}}}"


def _alike(before: str, after: str, answer: str | None = None, trim: bool = False, note: str = "") -> Turns:
    """All messages in the same way, with their role before them."""
    turn = MessageFrame(before, after, trim)
    begin = before.replace(ROLE, "assistant") if answer is None else answer
    return Turns(turn, turn, turn, answer=begin, note=note)


_HEADER = "<|start_of_role|>ROLE<|end_of_role|>"
_INST = (
    "{% set ns = namespace(open=false) %}{% for message in messages %}"
    "{% if not ns.open %}{{ OPEN }}{% set ns.open = true %}{% endif %}"
    "{% if message.role == 'system' %}{{ SYSTEM }}"
    "{% elif message.role == 'assistant' %}{{ ASSISTANT }}{% set ns.open = false %}"
    "{% else %}{{ USER }}{% endif %}{% endfor %}"
)
_AFTER_FIRST = (
    "{% set ns = namespace(system='') %}{% for message in messages %}{% if message.role == 'system' %}"
    "{% set ns.system = ns.system ~ CONTENT ~ '\\n\\n' %}"
    "{% elif message.role == 'assistant' %}{{ ASSISTANT }}"
    "{% else %}{{ USER }}{% set ns.system = '' %}{% endif %}{% endfor %}"
)


def _filled(form: str, **parts: str) -> str:
    for name, part in parts.items():
        form = form.replace(name, part)
    return form


def _inst(open: str, system: str, user: str, assistant: str) -> str:
    """Mistral's and Llama 2's: a user's turn holds the system message, too; # is the message's text."""
    named = {"SYSTEM": system, "USER": user, "ASSISTANT": assistant}
    written = {name: _around(text) for name, text in named.items()}
    return _filled(_INST, OPEN=open, **written)


def _around(text: str, content: str = "message.content") -> str:
    before, after = text.split("#")
    return f"{_text(before)} ~ {content} ~ {_text(after)}"


def _llama2(system: str, again: str = "[INST] ", trim: bool = False) -> str:
    open = f"{_text('[INST] ')} if loop.first else {_text(again)}"
    form = _inst(open, system, "# [/INST]", "#</s>")
    return form.replace("message.content", "(message.content | trim)") if trim else form


def _with_system(answer: str, assistant: str, user: str, trim: bool = False) -> str:
    """Families without a system message: it stands in the next user's."""
    content = "(message.content | trim)" if trim else "message.content"
    prompt = f"{{% if add_generation_prompt %}}{{{{ {_text(answer)} }}}}{{% endif %}}" if answer else ""
    asked = _around(user, f"ns.system ~ {content}")
    return _filled(_AFTER_FIRST, CONTENT=content, ASSISTANT=_around(assistant, content), USER=asked) + prompt


_DEEPSEEK_END = "<｜end▁of▁sentence｜>"
_BAILING = Turns(
    MessageFrame("<role>HUMAN</role>", ""),
    MessageFrame("<role>ASSISTANT</role>", ""),
    MessageFrame("<role>SYSTEM</role>", ""),
)
_GRANITE = _alike(_HEADER, "<|end_of_text|>\n")
_LLAMA_SYSTEM = "<<SYS>>\n#\n<</SYS>>\n\n"
_NO_END = MessageFrame("", "")

SAME: Mapping[str, Turns] = {
    "bailing": _BAILING,
    "bailing-think": Turns(
        _BAILING.user, _BAILING.assistant, _BAILING.system, "<role>ASSISTANT</role><think>", note="</think>"
    ),
    "bailing2": Turns(
        MessageFrame("<role>HUMAN</role>", "<|role_end|>"),
        MessageFrame("<role>ASSISTANT</role>", "<|role_end|>"),
        MessageFrame("<role>SYSTEM</role>", "<|role_end|>"),
        without_system="<role>SYSTEM</role>detailed thinking off<|role_end|>",
    ),
    "chatglm3": Turns(
        MessageFrame("<|user|>\n ", ""),
        MessageFrame("<|assistant|>\n ", ""),
        MessageFrame("<|system|>\n ", ""),
        "<|assistant|>",
        "[gMASK]sop",
    ),
    "chatglm4": Turns(
        MessageFrame("<|user|>\n", ""),
        MessageFrame("<|assistant|>\n", ""),
        MessageFrame("<|system|>\n", ""),
        begin="[gMASK]<sop>",
    ),
    "command-r": Turns(
        MessageFrame("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>", True),
        MessageFrame("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>", True),
        MessageFrame("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>", True),
    ),
    "deepseek": Turns(
        MessageFrame("### Instruction:\n", "\n"),
        MessageFrame("### Response:\n", "\n<|EOT|>\n"),
        MessageFrame("", ""),
    ),
    "deepseek-ocr": Turns(_NO_END, _NO_END, _NO_END),
    "deepseek2": Turns(
        MessageFrame("User: ", "\n\n"), MessageFrame("Assistant: ", _DEEPSEEK_END), MessageFrame("", "\n\n")
    ),
    "deepseek3": Turns(
        MessageFrame("<｜User｜>", ""),
        MessageFrame("<｜Assistant｜>", _DEEPSEEK_END),
        MessageFrame("", "\n\n"),
    ),
    "exaone-moe": _alike("<|ROLE|>\n", "<|endofturn|>\n", trim=True),
    "exaone3": Turns(
        MessageFrame("[|user|]", "\n", True),
        MessageFrame("[|assistant|]", "[|endofturn|]\n", True),
        MessageFrame("[|system|]", "[|endofturn|]\n", True),
    ),
    "falcon3": _alike("<|ROLE|>\n", "\n"),
    "gigachat": Turns(
        MessageFrame("user<|role_sep|>", "<|message_sep|>available functions<|role_sep|>[]<|message_sep|>"),
        MessageFrame("assistant<|role_sep|>", "<|message_sep|>"),
        MessageFrame("", "<|message_sep|>"),
        begin="<s>",
    ),
    "glmedge": _alike("<|ROLE|>\n", "", "<|assistant|>"),
    "gpt-oss": Turns(
        MessageFrame("<|start|>user<|message|>", "<|end|>"),
        MessageFrame("<|start|>assistant<|message|>", "<|return|>"),
        MessageFrame("<|start|>system<|message|>", "<|end|>"),
        "<|start|>assistant",
        note="answers are written as <|channel|>analysis<|message|> and <|channel|>final<|message|>",
    ),
    "granite": _GRANITE,
    "granite-4.0": _GRANITE,
    "granite-4.1": _GRANITE,
    "grok-2": Turns(
        MessageFrame("Human: ", "<|separator|>\n\n", True),
        MessageFrame("Assistant: ", "<|separator|>\n\n"),
        MessageFrame("System: ", "<|separator|>\n\n", True),
    ),
    "hunyuan-dense": Turns(
        MessageFrame("<｜hy_User｜>", ""),
        MessageFrame("<｜hy_Assistant｜>", "<｜hy_place▁holder▁no▁2｜>"),
        MessageFrame("", "<｜hy_place▁holder▁no▁3｜>"),
    ),
    "hunyuan-moe": Turns(
        MessageFrame("<|startoftext|>", "<|extra_0|>"),
        MessageFrame("", "<|eos|>"),
        MessageFrame("<|startoftext|>", "<|extra_4|>"),
    ),
    "hunyuan-vl": Turns(
        MessageFrame("", "<｜hy_User｜>"),
        MessageFrame("", "<｜hy_Assistant｜>"),
        MessageFrame("", "<｜hy_place▁holder▁no▁3｜>"),
        begin="<｜hy_begin▁of▁sentence｜>",
    ),
    "kimi-k2": Turns(
        MessageFrame("<|im_user|>user<|im_middle|>", "<|im_end|>"),
        MessageFrame("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
        MessageFrame("<|im_system|>system<|im_middle|>", "<|im_end|>"),
    ),
    "llama3": _alike("<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>", trim=True),
    "llama4": _alike("<|header_start|>ROLE<|header_end|>\n\n", "<|eot|>", trim=True),
    "megrez": _alike("<|role_start|>ROLE<|role_end|>", "<|turn_end|>"),
    "minicpm": Turns(
        MessageFrame("<用户>", "<AI>", True), MessageFrame("", "", True), MessageFrame("", "", True)
    ),
    "mistral-v7": Turns(
        MessageFrame("[INST] ", "[/INST]"),
        MessageFrame(" ", "</s>"),
        MessageFrame("[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"),
        "",
    ),
    "mistral-v7-tekken": Turns(
        MessageFrame("[INST]", "[/INST]"),
        MessageFrame("", "</s>"),
        MessageFrame("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    ),
    "openchat": Turns(
        MessageFrame("GPT4 Correct User: ", "<|end_of_turn|>"),
        MessageFrame("GPT4 Correct Assistant: ", "<|end_of_turn|>"),
        MessageFrame("", "<|end_of_turn|>"),
    ),
    "pangu-embedded": Turns(
        MessageFrame(f"[unused9]用户{COLON}", "[unused10]"),
        MessageFrame(f"[unused9]助手{COLON}", "[unused10]"),
        MessageFrame(f"[unused9]系统{COLON}", "[unused10]"),
        without_system=f"[unused9]系统{COLON}[unused10]",
    ),
    "phi3": _alike("<|ROLE|>\n", "<|end|>\n"),
    "phi4": _alike("<|im_start|>ROLE<|im_sep|>", "<|im_end|>"),
    "rwkv-world": Turns(
        MessageFrame("User: ", "\n\n", True),
        MessageFrame("Assistant: ", "\n\n", True),
        MessageFrame("System: ", "\n\n", True),
    ),
    "seed_oss": Turns(
        MessageFrame("<seed:bos>user\n", "<seed:eos>"),
        MessageFrame("<seed:bos>assistant\n", "<seed:eos>", True),
        MessageFrame("<seed:bos>system\n", "<seed:eos>"),
        note="thoughts: <seed:think> and </seed:think>",
    ),
    "smolvlm": Turns(
        MessageFrame("User: ", "<end_of_utterance>\n"),
        MessageFrame("Assistant: ", "<end_of_utterance>\n"),
        MessageFrame("", "\n\n"),
        begin="<|im_start|>",
    ),
    "solar-open": _alike("<|begin|>ROLE<|content|>", "<|end|>", "<|begin|>assistant"),
    "vicuna": Turns(
        MessageFrame("USER: ", "\n"), MessageFrame("ASSISTANT: ", "</s>\n"), MessageFrame("", "\n\n")
    ),
    "vicuna-orca": Turns(
        MessageFrame("USER: ", "\n"), MessageFrame("ASSISTANT: ", "</s>\n"), MessageFrame("SYSTEM: ", "\n")
    ),
    "zephyr": _alike("<|ROLE|>\n", "<|endoftext|>\n"),
}


def _monarch() -> str:
    """Each message but the first begins with the token that the tokenizer puts before the first."""
    begin = "{% if not loop.first %}{{ '<s>' }}{% endif %}"
    turn = "{{ message.role ~ '\\n' ~ message.content ~ '</s>\\n' }}"
    answer = "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
    return f"{{% for message in messages %}}{begin}{turn}{{% endfor %}}{answer}"


def _yandex() -> str:
    """It knows no system message: that is left out, as in llama.cpp."""
    user = "{{ ' Пользователь: ' ~ message.content ~ '\\n\\n' }}"
    assistant = "{{ ' Ассистент: ' ~ message.content ~ '\\n\\n' }}"
    turns = f"{{% if message.role == 'user' %}}{user}{{% elif message.role == 'assistant' %}}{assistant}"
    answer = "{% if add_generation_prompt %}{{ ' Ассистент:[SEP]' }}{% endif %}"
    return f"{{% for message in messages %}}{turns}{{% endif %}}{{% endfor %}}{answer}"


@cache
def named() -> Mapping[str, str]:
    """All templates by name; but chatml, which is the usual one."""
    found = {name: turns.jinja() for name, turns in SAME.items()}
    found |= {"exaone4": found["exaone3"], "monarch": _monarch(), "yandex": _yandex()}
    found |= {
        "gemma": _with_system(
            "<start_of_turn>model\n",
            "<start_of_turn>model\n#<end_of_turn>\n",
            "<start_of_turn>user\n#<end_of_turn>\n",
            trim=True,
        ),
        "orion": _with_system("", "#</s>", "Human: #\n\nAssistant: </s>"),
        "mistral-v1": _inst("' [INST] '", "#\n\n", "# [/INST]", " #</s>"),
        "mistral-v3": _inst("'[INST] '", "#\n\n", "#[/INST]", " #</s>").replace(
            '" " ~ message.content', '" " ~ message.content | trim'
        ),
        "mistral-v3-tekken": _inst("'[INST]'", "#\n\n", "#[/INST]", "#</s>"),
        "llama2": _llama2("#\n"),
        "llama2-sys": _llama2(_LLAMA_SYSTEM),
        "llama2-sys-bos": _llama2(_LLAMA_SYSTEM, "<s>[INST] "),
        "llama2-sys-strip": _llama2(_LLAMA_SYSTEM, trim=True),
    }
    return dict(sorted(found.items()))
