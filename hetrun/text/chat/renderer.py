"""Templates at work, in a process that may die at any time: a text comes of it, or an error that says why."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

from hetrun.errors import OptionError, TemplateError
from hetrun.system.sandbox.child import ChildGone
from hetrun.system.sandbox.framing import framed
from hetrun.system.sandbox.kept_child import KeptChild
from hetrun.system.terminal_text import visible
from hetrun.text.chat import gemma4_turns, limits
from hetrun.text.chat.continuation import ContinuedChat
from hetrun.text.chat.messages import checked_messages, checked_objects, plain
from hetrun.text.chat.sandbox_process import SandboxProcess
from hetrun.text.chat.template import MOST_SOURCE, ChatTemplate
from hetrun.text.tool_parsers.formats import takes_functions

NEXT = "use another with --chat-template FILE"
# A template that asks whether the variable is there has a default of its own.
HAS_DEFAULT = re.compile(r"\benable_thinking\s*(?:is\b|\|\s*default\b)")
# Of what the process says of an error.
MOST_LINE = 1 << 20
MOST_REASON = 600


class RenderFault(NamedTuple):
    """Why the process does not render a text, and in which line of the template."""

    reason: str
    line: int | None


class TemplateWorker:
    """Renders one model's templates. Any thread may call; one text is written at a time.

    The process is kept for the next conversation, and started again when it is gone.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._all = [template, *([template.for_tools] if template.for_tools else [])]
        # One that cannot be used is never asked for, and need not travel.
        sources = ["" if _fault(each.source) else each.source for each in self._all]
        self._kept = KeptChild(partial(SandboxProcess, sources), "its template was rendered")

    @property
    def pid(self) -> int | None:
        """The process, where one runs."""
        return self._kept.pid

    def warm(self) -> None:
        """Start the process without waiting for it, so that the first conversation need not."""
        self._kept.warm()

    def check(self) -> None:
        """Raise what is wrong with the template, as far as it shows before there are messages."""
        self._ask(0, {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        bos_token: str = "",
        eos_token: str = "",
        **variables: object,
    ) -> str:
        """The text for the model. It holds the special tokens, perhaps the one for the beginning too.

        `continue_final_message`: the text ends where the last message does; no answer begins. `variables` are
        the template's own, such as enable_thinking, and other special tokens.
        """
        number = 1 if tools and len(self._all) > 1 else 0
        source = self._all[number].source
        said, cut = checked_messages(messages), None
        if continue_final_message:
            cut = ContinuedChat.after_last(said, continue_final_message)
            said, add_generation_prompt = cut.messages, False
        variables = usual_variables(source, tools) | variables
        variables |= {
            "add_generation_prompt": add_generation_prompt,
            "bos_token": bos_token,
            "eos_token": eos_token,
        }
        given = plain("the template's variables", variables) | {
            "messages": gemma4_turns.suited(source, said),
            "tools": checked_objects("tools", tools),
            "documents": checked_objects("documents", documents),
        }
        text = self._ask(number, {"variables": given})
        if cut:
            return cut.of(text)
        return gemma4_turns.ready(source, text) if add_generation_prompt else text

    def close(self) -> None:
        """End the process, also while it renders. A fork leaves the process of its parent alone."""
        self._kept.close()

    def __enter__(self) -> TemplateWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, number: int, request: Mapping[str, object]) -> str:
        if fault := _fault(self._all[number].source):
            raise self._failed(number, fault)
        data = framed({"template": number, **request})
        if len(data) > limits.MOST_INPUT:
            raise OptionError(
                f"the messages take {len(data) >> 20} MiB, and hetrun reads up to {limits.MOST_INPUT >> 20}: "
                "send less"
            )
        most = limits.output(len(data))
        try:
            answer = self._kept.ask(lambda process: _answer(process, data, most))
        except ChildGone as error:
            raise self._failed(number, str(error)) from None
        if isinstance(answer, RenderFault):
            raise self._failed(number, answer.reason, answer.line)
        return answer

    def _failed(self, number: int, reason: str, line: int | None = None) -> TemplateError:
        where = f", line {line}" if line and 0 < line < MOST_LINE else ""
        said = " ".join(visible(reason[:MOST_REASON]).split())
        template = self._all[number]
        whose = f"{visible(template.path)}: " if template.path else ""
        return TemplateError(f"{whose}{template.origin}{where}: {said}; {NEXT}")


def _answer(process: SandboxProcess, request: bytes, most: int) -> str | RenderFault:
    """What the process says, checked: a template may have found a way to speak for it."""
    match process.ask(request, limits.MOST_BYTES * most + 1024):
        case {"text": str() as text} if len(text) <= most and _is_unicode(text):
            return text
        case {"reason": str() as reason, "line": int() | None as line, "over": bool() as over}:
            if over:
                process.end()
            return RenderFault(reason, line)
    process.end()
    return RenderFault("its process sent an unreadable answer", None)


def usual_variables(source: str, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, object]:
    """Variables that templates get besides those of the conversation, as in llama.cpp."""
    now = datetime.now()
    found: dict[str, object] = {
        "date_string": now.strftime("%d %b %Y"),  # Llama 3
        "datetime": now.strftime("%b %d %Y"),
    }
    if "enable_thinking" in source and not HAS_DEFAULT.search(source):
        found["enable_thinking"] = True
    if takes_functions(source):
        found["functions"] = json.dumps(list(tools), indent=2, ensure_ascii=False) if tools else ""
    return found


def _fault(source: str) -> str | None:
    """Why a text is no template at all."""
    if len(source) > MOST_SOURCE:
        return f"longer than {MOST_SOURCE:,} characters, which no template is"
    return None if _is_unicode(source) else "it holds half of a character (a lone surrogate)"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
