"""Tools for templates that know nothing of them."""

from __future__ import annotations

import json
from typing import Any

from hetrun.text.chat import ChatTemplate
from hetrun.text.chat.template import CHATML
from hetrun.text.chat.tool_prompt import needs_telling, told

NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}


def test_tools_are_told_in_the_system_message() -> None:
    system, user = told(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], [NOW]
    )
    assert system["role"] == "system"
    assert system["content"].startswith("Be brief.\n\n")
    assert json.dumps(NOW["function"]) in system["content"]
    assert user == {"role": "user", "content": "Hi"}
    first, _ = told([{"role": "user", "content": "Hi"}], [NOW])
    assert first["role"] == "system"


def test_calls_and_results_become_texts_of_users_and_assistants_in_turn() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "10:00"},
        {"role": "tool", "tool_call_id": "1", "content": "11:00"},
        {"role": "user", "content": "Well?"},
    ]
    _, assistant, user = told(messages, None)
    said = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
    assert assistant == {"role": "assistant", "content": f"{said}\n{said}"}
    results = [f"<tool_response>\n{time}\n</tool_response>" for time in ("10:00", "11:00")]
    assert user == {"role": "user", "content": "\n".join([*results, "Well?"])}


def test_only_templates_that_leave_them_out_need_it() -> None:
    assert needs_telling(ChatTemplate(CHATML, "a test"), [NOW])
    assert needs_telling(ChatTemplate(CHATML, "a test"), None)  # a conversation may hold calls
    assert not needs_telling(ChatTemplate("{% for t in tools %}{% endfor %}", "a test"), [NOW])
    knows_calls = ChatTemplate("{{ messages[0].tool_calls }}", "a test")
    assert not needs_telling(knows_calls, None)
    assert needs_telling(knows_calls, [NOW])
