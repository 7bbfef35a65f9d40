"""Tool calls and thoughts: how an answer is made to hold them, and how its text is read."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetrun.errors import FieldError
from hetrun.text.answers.tools import Tools
from hetrun.text.chat.answer_parser import AnswerReader, Divider
from hetrun.text.chat.channels import ChannelReader
from hetrun.text.chat.reasoning import ThoughtSplitter
from hetrun.text.tool_parsers import forced_calls, gemma4
from hetrun.text.tool_parsers.dialects import BY_NAME, BY_THOUGHT
from hetrun.text.tool_parsers.formats import FORMATS, TEXT_ONLY, with_thoughts
from hetrun.text.tool_parsers.parser import CallReader
from hetrun.text.tool_parsers.parts import MARKS, Arguments, CallStart, Piece, Prose, Thought

Json = dict[str, object]
Schema = Mapping[str, Any]

SHORT = string.ascii_letters + string.digits
FAULT = re.compile(r"parts(?: at anyOf\[(\d+)\]\.?(\S*))?: (.*)", re.DOTALL)


@dataclass(frozen=True)
class AnswerFormat:
    """How answers are read; nothing in them where there are neither calls nor thoughts to look for."""

    tools: Tools = field(default_factory=Tools)
    format: str = ""  # of calls; empty: they stay text
    thought: str = ""  # the mark of thoughts; empty: they stay text
    resumed: bool = False  # they continue the last message

    def __bool__(self) -> bool:
        return bool(self.format or self.thought)

    def reader(self) -> ChoiceReader:
        """For one choice."""
        found = FORMATS[self.format] if self.format else None
        most = None if self.tools.parallel else 1
        dialect = BY_NAME.get(self.format) or BY_THOUGHT.get(self.thought)
        in_messages = dialect is not None and self.format == dialect.name
        divider: Divider | None = None
        if dialect:
            tools = self.tools.schemas if in_messages else None
            divider = ChannelReader(tools, most, raw=not self.thought, dialect=dialect, resumed=self.resumed)
        elif self.thought == gemma4.THOUGHT:
            # What is thought stands among calls, and marks of one stand in texts of the other.
            divider = CallReader(with_thoughts(found or TEXT_ONLY), self.tools.schemas, most)
        elif self.thought:
            divider = ThoughtSplitter(self.thought, self.resumed)
        has_calls = (in_messages and dialect and not dialect.tagged) or isinstance(divider, CallReader)
        calls = CallReader(found, self.tools.schemas, most) if found and not has_calls else None
        return ChoiceReader(AnswerReader(divider, calls), bool(found and found.short_ids))

    def fault(self, message: str) -> FieldError | None:
        """The answer to a request whose calls cannot be forced, if the engine says that with this message."""
        found = FAULT.fullmatch(message)
        if not found or not self.format:
            return None
        place, inner, reason = found.groups()
        wanted, where = self.tools.wanted, "tools"
        if place is not None and forced_calls.in_order(self.format):
            if int(place) >= len(wanted):  # of the form that the answer has where it is no call
                return None
            where = f"{wanted[int(place)].place}.function.parameters"
        said = f"{where}.{inner}" if inner and where != "tools" else where
        return FieldError(f"{said}: {reason}", where, "invalid_function_parameters")


PLAIN = AnswerFormat()


@dataclass(frozen=True)
class ReadingOptions:
    """What a model writes and what is wanted of it; the first two are the options of these names."""

    tool_parser: str  # none, auto or a name in `tool_parsers.formats`
    reasoning_format: str  # none leaves thoughts in the text
    tool_format: str  # of calls, by the model's template
    thought_mark: str  # of thoughts, by the model's template


def reading(tools: Tools, options: ReadingOptions, *, has_form: bool, resumed: bool = False) -> AnswerFormat:
    """How the answers to a request are read; `has_form`: they follow a schema, an expression or a grammar;
    `resumed`: they continue the last message."""
    chosen = options.tool_format if options.tool_parser == "auto" else options.tool_parser
    format = chosen if tools.all and chosen != "none" else ""
    if tools.choice == "required" and not format:
        message = "tool_choice cannot be followed: the option tool_parser is none, and no calls are read"
        raise FieldError(message, "tool_choice", "unsupported_parameter")
    known = {gemma4.NAME: gemma4.THOUGHT, **{name: dialect.thought for name, dialect in BY_NAME.items()}}
    mark = known.get(chosen, options.thought_mark)
    if options.reasoning_format == "deepseek" and not mark:
        mark = MARKS[0][0]
    # What must have a form has it from its first token on: nothing is thought before, unless a message is
    # there for what has the form.
    wanted = mark in BY_THOUGHT or not has_form
    return AnswerFormat(tools, format, mark if wanted and options.reasoning_format != "none" else "", resumed)


def parts(how: AnswerFormat, json_schema: str | None, *, has_form: bool, thinks: bool) -> str | None:
    """What the answer must look like for the sake of its calls and channels; None where it need not.

    Where calls are not required, an answer may be a call or have the form that is asked for; and the calls of
    strict functions have their form, once they have begun, where a family's calls begin with a mark.
    """
    tools, thought = how.tools, how.thought if thinks else ""
    schemas = {tool.name: tool.parameters for tool in tools.wanted}
    if how.format and tools.choice == "required":
        return forced_calls.calls(how.format, schemas, tools.parallel, thought)
    if json_schema is not None and how.resumed:
        return None  # the whole message follows the schema: its beginning and the answer
    if json_schema is not None:
        return _formed(how, json.loads(json_schema), schemas, thought)
    if how.format and not has_form and any(tool.strict for tool in tools.all):
        loose: Mapping[str, Any] = {"additionalProperties": True}
        checked = {tool.name: tool.parameters if tool.strict else loose for tool in tools.all}
        return forced_calls.when_begun(how.format, checked, tools.parallel)
    return None


def _formed(
    how: AnswerFormat, schema: Schema | bool, schemas: Mapping[str, Schema], thought: str
) -> str | None:
    """An answer by a schema, or a call; None where the schema alone says it."""
    if isinstance(schema, bool):
        if not schema:  # which nothing fits: said where it is compiled by itself
            return None
        schema = {}
    if how.thought in BY_THOUGHT:
        form = forced_calls.final(schema, how.thought, bool(thought))
    elif how.format:
        form, thought = json.dumps({"json": schema}, ensure_ascii=False), ""
    else:
        return None
    if not how.format:
        return form
    calls = forced_calls.calls(how.format, schemas, how.tools.parallel, thought)
    return f'{{"any": [{calls}, {form}]}}'


class ChoiceReader:
    """What one choice says, event by event."""

    def __init__(self, answer: AnswerReader, short_ids: bool) -> None:
        self._answer = answer
        self._short_ids = short_ids

    @property
    def calls(self) -> int:
        """Calls so far."""
        return self._answer.calls

    def push(self, text: str, *, opened: bool = False, last: bool = False, cut: bool = False) -> list[Piece]:
        """Take more text and return what is certain now; `opened`: the prompt has begun a thought; `cut`: a
        limit was reached."""
        if opened:
            self._answer.open()
        pieces = self._answer.push(text)
        if cut:
            self._answer.cut()
        return pieces + self._answer.finish() if last else pieces

    def new_id(self) -> str:
        """An id for a call; some templates refuse to render others than theirs."""
        if self._short_ids:
            return "".join(secrets.choice(SHORT) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def delta(self, piece: Piece) -> Json:
        """A piece as a chunk of a stream tells it."""
        match piece:
            case Prose(text):
                return {"content": text}
            case Thought(text):
                return {"reasoning_content": text}
            case CallStart(index, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": self.new_id(), "type": "function", "function": function}
                return {"tool_calls": [call]}
            case Arguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def message(self, pieces: Iterable[Piece]) -> Json:
        """All pieces as one message."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[tuple[str, list[str]]] = []
        for piece in pieces:
            match piece:
                case Prose(text):
                    texts.append(text)
                case Thought(text):
                    thoughts.append(text)
                case CallStart(_, name):
                    calls.append((name, []))
                case Arguments(_, text):
                    calls[-1][1].append(text)
        message: Json = {"role": "assistant", "content": "".join(texts), "refusal": None}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["content"] = "".join(texts) or None
            message["tool_calls"] = [self._call(name, "".join(arguments)) for name, arguments in calls]
        return message

    def _call(self, name: str, arguments: str) -> Json:
        return {
            "id": self.new_id(),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
