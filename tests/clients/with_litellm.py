"""LiteLLM, which takes the server for one that speaks OpenAI's API."""

from __future__ import annotations

import litellm

from tests.clients.checks import (
    HURRIED,
    HURRY,
    KEY,
    MESSAGES,
    MODEL,
    SCHEMA,
    TOO_LONG,
    TOOL,
    URL,
    check,
    expect,
    good_city,
    package,
    raises,
    refuses_hurry,
)


def ask(**more: object) -> litellm.ModelResponse:
    said = {"model": f"openai/{MODEL}", "messages": MESSAGES, "max_tokens": 8, "num_retries": 0}
    return litellm.completion(**{**said, "api_base": URL, "api_key": KEY, **more})


def chat() -> None:
    answer = ask()
    expect(bool(answer.choices[0].message.content) and answer.usage.total_tokens > 0, answer)


def stream() -> None:
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    expect(bool("".join(c.choices[0].delta.content or "" for c in chunks if c.choices)), chunks)


def structured() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": SCHEMA}}
    good_city(ask(response_format=form, max_tokens=60, temperature=0).choices[0].message.content)


def tools() -> None:
    answer = ask(tools=[TOOL], tool_choice="required", max_tokens=80, temperature=0)
    call, *_ = answer.choices[0].message.tool_calls
    expect(call.function.name == "look_up", answer)
    good_city(call.function.arguments)


def completion() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="One, two,", max_tokens=4, api_base=URL, api_key=KEY
    )
    expect(bool(answer.choices[0].text), answer)


def embeddings() -> None:
    answer = litellm.embedding(model=f"openai/{MODEL}", input=["one", "two"], api_base=URL, api_key=KEY)
    expect(len(answer.data) == 2 and len(answer.data[0]["embedding"]) > 100, answer)


if __name__ == "__main__":
    package("litellm")
    for does in (chat, stream, structured, tools, completion, embeddings):
        check(does.__name__, does)
    check("400", lambda: raises(litellm.BadRequestError, lambda: ask(temperature=-1)))
    check("401", lambda: raises(litellm.AuthenticationError, lambda: ask(api_key="wrong")))
    check("404", lambda: raises(litellm.NotFoundError, lambda: ask(model="openai/another")))
    check(
        "429", lambda: refuses_hurry(litellm.RateLimitError, lambda: ask(messages=HURRIED, extra_body=HURRY))
    )
    check(
        "too long",
        lambda: raises(litellm.ContextWindowExceededError, lambda: ask(messages=TOO_LONG)),
    )
