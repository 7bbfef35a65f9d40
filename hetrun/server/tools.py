"""The tools of a chat request."""

from __future__ import annotations

from hetrun.server.errors import ApiError, api_errors
from hetrun.server.fields import Body, flag
from hetrun.text.answers.tools import Tools, read_tools

NAMES = ("tools", "tool_choice", "functions", "function_call")


def tools_of(body: Body) -> Tools:
    """The tools of a request; ApiError says which field is wrong."""
    _refuse_older(body)
    parallel = body.get("parallel_tool_calls") is None or flag(body, "parallel_tool_calls")
    with api_errors():
        return read_tools(body.get("tools"), body.get("tool_choice"), parallel=parallel)


def _refuse_older(body: Body) -> None:
    for name, neutral in (("functions", ([],)), ("function_call", ("none", "auto"))):
        value = body.get(name)
        if value is not None and value not in neutral:
            message = f"{name} is the older form, which this server does not take: send tools and tool_choice"
            raise ApiError(message, name, "unsupported_parameter")
